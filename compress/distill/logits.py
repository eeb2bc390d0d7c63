"""Knowledge distillation on the logits."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.depth.settings import LAYERS_BEHIND_PARTS
from smelt.compress.distill.fit import check_folders, check_losses, check_student, check_teacher
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.unlabelled import check_unlabelled, needs_of_rows, with_rows
from smelt.compress.distill.weights import INNER
from smelt.compress.train.run import masks_unfit, train
from smelt.compress.train.settings import (
    check_training,
    left_by_training,
    lost_by_training,
    training_needs,
)
from smelt.core.artifact import Artifact, Format
from smelt.core.data import IMAGES, SIMILARITY, TASKS, TEXT_TO_TEXT, Split, Task
from smelt.core.errors import InputError
from smelt.core.messages import Message, mistake
from smelt.core.stage import Context, Need

if TYPE_CHECKING:
    from smelt.compress.distill.teachers.kept import KeptTeacher
    from smelt.runtime.models.structure import Edit


class Distill:
    """Train a student to predict what a teacher predicts.

    With `student`, the source's layers are thinned out first; without it the source itself is the
    student, which recovers what pruning or factorization lost better than labels alone do, because a
    teacher says of every word how likely it is. The loss is
    logits * T^2 * KL(softmax(teacher / T) || softmax(student / T)) + labels * cross-entropy.
    A classifier with several classes a text compares sigmoids class by class, one that gives a number
    takes mean squared errors instead of both parts; a sentence embedder learns the teacher's vectors and
    their cosines with each other, which needs only texts. Further parts look inside both models: hidden
    states, embeddings, attention scores, relations; `layer_map` says of which layers, `phases` in which
    order. After `quantize` the student trains through its codes, which are decided again at the end.

        - distill: {student: {decoder_layers: 1}, epochs: 2}
        - distill: {student: {layers: 3}, losses: {logits: 1.0, labels: 0.5}}
        # a student of another config, which is drawn
        - distill: {student: {config: small.json}, epochs: 20}
        # on the texts that the teacher's beams write, as Kim & Rush
        - distill: {sequence_level: {num_beams: 5}, losses: {logits: 0, labels: 1}}
        # inner losses first, as TinyBERT
        - distill:
            phases: [{losses: {hidden_states: 1}}, {losses: {logits: 1}}]
        # several teachers
        - distill: {teacher: [large, {model: other}], student: {layers: 3}}
        # sentence-similarity
        - distill: {losses: {sentence_embedding: 1.0, pairwise_similarity: 1.0}}
        # binary inputs behind scheme binary, as BiT; no runtime here gains speed
        - distill: {qat: {activations: one-bit}}
    """

    name: ClassVar[str] = "distill"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "unlabelled", "validation"})
    source: ClassVar[str] = (
        "Hinton et al. 2015, arXiv:1503.02531; layers: Shleifer & Rush 2020, arXiv:2010.13002;"
        " masking: transformers-research-projects distillation/distiller.py; inside: TinyBERT,"
        " arXiv:1909.10351; DistilBERT, arXiv:1910.01108; MiniLMv2, arXiv:2012.15828;"
        " sequence_level: Kim & Rush 2016, arXiv:1606.07947;"
        " activations: BiT, Liu et al. 2022, arXiv:2205.13016"
    )
    version: ClassVar[int] = 7
    settings_type: ClassVar[type[DistillSettings]] = DistillSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def leaves(cls, settings: DistillSettings) -> frozenset[str]:
        """Return what later steps may lose: what was learned."""
        return left_by_training(settings)

    @classmethod
    def spoils(cls, settings: DistillSettings) -> Mapping[str, str]:
        """Return what is lost of the work of steps before it: codes that were chosen with care.

        A student of fewer layers needs of each kind of part one that `drop-layers` left it.
        """
        cut = settings.student is not None and not settings.student.other
        return {**lost_by_training(settings), **({"parts": LAYERS_BEHIND_PARTS} if cut else {})}

    @classmethod
    def needs_with(cls, settings: DistillSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs with these settings."""
        found: frozenset[Need] = frozenset()
        for training in settings.trainings():
            found |= training_needs(training)
        return found - {"train"} | needs_of_rows(settings)

    @classmethod
    def check_model(
        cls, settings: DistillSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], dict[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        found: list[Message] = []
        after = dict(config)
        if settings.student is not None:
            wrong, after = check_student(settings.student, config)
            found = [mistake(one.code, one.message, setting=f"student.{one.setting}") for one in wrong]
        found += check_training(settings, config) + check_folders(settings, config)
        # the layers of a student that cannot be are not counted
        return found + ([] if found else check_losses(settings, after)), after

    @classmethod
    def check_named(
        cls, settings: DistillSettings, config: Mapping[str, Any], named: Mapping[str, Mapping[str, Any]]
    ) -> list[Message]:
        """Return what a student of this config cannot be compared in with a teacher of the config it has."""
        teacher = named.get("teacher")
        return check_teacher(settings, config, teacher) if teacher is not None else []

    @classmethod
    def check_rows(cls, settings: DistillSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return what of the settings does not fit the task or the rows, by setting."""
        settings = settings.for_task(task)
        found = settings.losses.unfit(task) + masks_unfit(settings, task)
        if len(settings.teachers()) > 1 and task == SIMILARITY:
            found.append(
                mistake(
                    "several-teachers",
                    "the vectors of several embedders have no common directions; name one teacher.",
                    setting="teacher",
                )
            )
        if settings.sequence_level is not None and task not in TEXT_TO_TEXT:
            text = f"a teacher writes no targets for {task}; leave it out."
            found.append(mistake("does-not-fit-task", text, setting="sequence_level"))
        for number, phase in enumerate(settings.phases or ()):
            found += [
                mistake(one.code, one.message, setting=f"phases.{number}.{one.setting}")
                for one in phase.losses.unfit(task)
            ]
        if settings.cache_logits is not None and not any(
            t.answers_suffice(task) for t in settings.trainings()
        ):
            inner = ", ".join(INNER)
            found.append(
                mistake(
                    "nothing-to-store",
                    "nothing is saved by it: no training learns from what the teacher gives without looking"
                    f" inside it ({inner}), for which it runs each time.",
                    setting="cache_logits",
                )
            )
        found += check_unlabelled(settings, task, data)
        if task == IMAGES:
            looks = [t for t in settings.trainings() if t.losses.of_inner()]
            place = "losses" if settings.phases is None else "phases"
            text = f"{task} compares logits; leave the inner losses out."
            found += [mistake("does-not-fit-task", text, setting=place) for _ in looks[:1]]
        lack = [data[n] for n in ("train", "validation") if n in data and not data[n].labelled]
        if task == SIMILARITY and any(t.losses.of_vectors()["cosent"] for t in settings.trainings()) and lack:
            place = "losses.cosent" if settings.phases is None else "phases"
            text = f"the rows of {lack[0].origin} have no scores (column 'label')."
            found.append(mistake("missing-scores", text, setting=place))
        return found

    def __call__(self, src: Artifact, settings: DistillSettings, ctx: Context) -> None:
        """Make the student from `src`, train it against the teacher, write it to `ctx.out`."""
        from smelt.compress.distill.objective import kept_teacher
        from smelt.compress.distill.teachers.load import (
            agree_on_words,
            as_one,
            check_outputs,
            identity_of,
            load_teachers,
        )
        from smelt.compress.quantize.through_codes import save_trained
        from smelt.compress.quantize.training.binary_inputs import binarize_first
        from smelt.compress.quantize.training.splitting import split_first

        settings = settings.for_task(ctx.task)
        with tempfile.TemporaryDirectory(prefix="student-", dir=ctx.out.parent) as folder:
            space = Path(folder)
            teachers = load_teachers(settings, src, space / "teachers", ctx)
            (space / "student").mkdir()
            model, edits, home = _student(
                src, as_one(teachers, None, settings), settings, space / "student", ctx
            )
            edits = split_first(model, edits, settings, ctx)
            words = agree_on_words(teachers, model, home, ctx)
            for one in teachers:
                check_outputs(model, one.model, settings, several=len(teachers) > 1)
            teacher = as_one(teachers, model, settings)
            ctx.details["teacher"] = ", ".join(one.name for one in teachers)
            if settings.sequence_level is not None:
                from smelt.compress.distill.sequences import taught_rows

                writer = settings.sequence_level.generator or teachers[0].name
                rows = taught_rows(ctx.ancestors[writer], settings.sequence_level, ctx)
                ctx = replace(ctx, data={**ctx.data, "train": rows})
            ctx = with_rows(settings, model.config, ctx)
            binarize_first(model, edits, Artifact(home, src.manifest), settings, ctx, self.name)
            said = None
            if settings.cache_logits is not None:
                who = identity_of(teachers, words, model, settings, ctx)
                said = kept_teacher(teacher, who, model, settings, ctx)
            with contextlib.closing(said) if said else contextlib.nullcontext():
                _train(model, teacher, Artifact(home, src.manifest), settings, ctx, edits, said)
            save_trained(model, edits, home, settings, ctx)


def _student(
    src: Artifact, teacher: Any, settings: DistillSettings, space: Path, ctx: Context
) -> tuple[Any, list[Edit], Path]:
    """Return the student, its edits, and the folder that says how its weights are stored.

    space: an empty folder, where a student that is not cut out of `src` is made.
    """
    from smelt.compress.quantize.through_codes import load_trainable
    from smelt.runtime.models.checkpoint import load_model

    student = settings.student
    if student is not None and student.other:
        from smelt.compress.distill.other_student import make_other

        make_other(student, src, teacher, space, ctx)
        try:
            return *load_model(space), space
        except InputError as error:
            named = str(student.model or student.config)
            raise InputError(str(error).replace(str(space), named), code=error.code) from error
    model, edits = load_trainable(src, ctx, settings.lora is not None)
    if student is not None:
        from smelt.compress.distill.student import keep_layers

        for stack in ("encoder_layers", "decoder_layers", "layers"):
            choice = getattr(student, stack)
            if choice is not None:
                edits, kept = keep_layers(model, edits, stack, choice, choose=student.layer_selection)
                ctx.details[f"kept_{stack}"] = kept
    return model, edits, src.path


def _train(
    model: Any,
    teacher: Any,
    src: Artifact,
    settings: DistillSettings,
    ctx: Context,
    edits: list[Edit],
    said: KeptTeacher | None,
) -> None:
    """Train `model` in place, phase by phase; `said` answers for the teacher where nobody looks inside it."""
    from smelt.compress.distill.objective import distill_objective, inner_of
    from smelt.compress.train.extension import Extension

    told: list[Any] = []
    warned: list[list[Message]] = []
    trainings = [training.without_noise() for training in settings.trainings()]
    inners = [inner_of(model, teacher, training, ctx.seed) for training in trainings]  # refuse before work
    for training, inner in zip(trainings, inners, strict=True):
        kept = said if training.answers_suffice(ctx.task) else None
        objective = distill_objective(teacher, training, inner, kept)
        before = len(ctx.warnings)
        extension = Extension(modules=inner.modules, around=inner.around) if inner else Extension()
        if kept is not None:
            extension = replace(extension, rows=kept.number)
        train(
            model,
            src,
            training,
            ctx,
            objective=objective,
            edits=edits,
            stage=Distill.name,
            extension=extension,
            random=_random(settings, src, ctx) and not told,  # a second phase begins with what the first left
        )
        told.append(ctx.details["training"])
        warned.append(ctx.warnings[before:])
        del ctx.warnings[before:]
    if len(told) > 1:
        ctx.details["phases"] = told
    ctx.warnings.extend(_of_phases(warned))


def _random(settings: DistillSettings, src: Artifact, ctx: Context) -> bool:
    """Return whether the student begins with random weights: its own config's, or those that came in."""
    from smelt.compress.train.run import starts_random

    student = settings.student
    if student is not None and student.other:
        return student.config is not None
    return starts_random(src, ctx)


def _of_phases(warned: Sequence[Sequence[Message]]) -> list[Message]:
    """Return the warnings of all phases: once what all say, who read the same rows; else with the phase."""
    found: dict[Message, None] = {}
    for number, messages in enumerate(warned, 1):
        for one in messages:
            text = f"phase {number}: {one.message}"
            shared = all(one in others for others in warned)
            found[one if shared else replace(one, message=text)] = None
    return list(found)
