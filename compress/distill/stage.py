"""The stage `distill`: train a student on the outputs and inner states of a teacher.

The targets of the training samples are their own, or those that a teacher generates.
Sequence-level distillation, Kim & Rush 2016, arXiv:1606.07947: the teacher decodes the sources of the
training samples with beam search, and the student trains on the result (Seq-KD), or on the candidate that is
closest to the reference (Seq-Inter). For unlabeled samples the teacher's outputs are the only targets.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.distill.augmentation import augment_training_samples, check_augmentation
from smelt.compress.distill.check_config import (
    check_losses,
    check_several_teachers,
    check_student,
    check_teacher,
    check_teacher_folders,
    check_unlabeled,
    inner_loss_errors,
    make_external_student,
)
from smelt.compress.distill.settings import INNER_LOSSES, DistillSettings, SequenceSettings
from smelt.compress.drop_layers.settings import LAYERS_AFTER_PARTS_ERROR
from smelt.compress.finetune import (
    check_training,
    estimate_training,
    invalidated_by_training,
    provided_by_training,
    train_with_techniques,
    training_task_errors,
)
from smelt.compress.model_input import codebook_error
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import json_hash
from smelt.core.messages import Message, error_message
from smelt.data.bleu_tokenizer import bleu_tokenizer
from smelt.data.labels import MULTI_LABEL, NO_LABEL, REGRESSION, problem_type
from smelt.data.splits import Example, Label, Split
from smelt.data.tasks import Task, task_traits
from smelt.models.families.layout import STACK_NAMES
from smelt.models.model_size import SizeInputs, StepSize
from smelt.models.text_rules import read_text_rules
from smelt.stage import Context, Need, QuantizedInput, Settings, Stage
from smelt.tasks.read_split import UNLABELED, UNLABELED_TASKS
from smelt.training.settings import TrainingSettings, lighter_trainings, needed_by_training

if TYPE_CHECKING:
    from smelt.compress.distill.logit_cache import CachedTeacher
    from smelt.models.edits import Edit


# The kinds of output for which a teacher's logits are cached. Masked tokens differ in each pass.
_CACHED_OUTPUTS = ("text", "next-token", "labels", "embedding")
# Kinds of output of which a student has one teacher, and why.
_NOT_AVERAGED = {
    "embedding": "the embeddings of several teachers are not in the same space and cannot be averaged",
    "joint-embeddings": "the embeddings of several teachers are not in the same space and cannot be averaged",
    "spans": "the starts and ends of several teachers are not averaged",
}


class Distill(Stage[DistillSettings]):
    """Train a student to predict what a teacher predicts.

    With `student`, the model's layers are reduced first. Without it the model itself is the student;
    this recovers quality after pruning or factorization better than labels alone, because the
    teacher gives a probability for every token. The loss is
    logits * T^2 * KL(softmax(teacher / T) || softmax(student / T)) + labels * cross-entropy.
    Multi-label classifiers compare sigmoids for each class, regression models use mean squared
    errors. A sentence embedder learns the teacher's embeddings and their pairwise cosines, for
    which samples need no labels. Other terms compare inner states: hidden states, embeddings,
    attention scores, relations; `layer_map` maps their layers, `phases` trains in sequence.
    After `quantize` the student trains with quantized weights, which are calibrated again.

        - distill: {student: {decoder_layers: 1}, epochs: 2}
        - distill: {student: {layers: 3}, losses: {logits: 1.0, labels: 0.5}}
        # a student of another config, with random weights
        - distill: {student: {config: small.json}, epochs: 20}
        # on targets from the teacher's beam search, as Kim & Rush
        - distill: {sequence_level: {num_beams: 5}, losses: {logits: 0, labels: 1}}
        # inner losses first, as TinyBERT
        - distill:
            phases: [{losses: {hidden_states: 1}}, {losses: {logits: 1}}]
        # on more texts, as TinyBERT
        - distill: {student: {layers: 3}, augmentation: {model: models/bert}}
        # several teachers
        - distill: {teacher: [large, {model: other}], student: {layers: 3}}
        # sentence-similarity
        - distill: {losses: {sentence_embedding: 1.0, pairwise_similarity: 1.0}}
    """

    name: ClassVar[str] = "distill"
    may_need: ClassVar[frozenset[Need]] = frozenset({"train", "unlabeled", "validation"})
    source: ClassVar[str] = (
        "Hinton et al. 2015, arXiv:1503.02531; layers: Shleifer & Rush 2020, arXiv:2010.13002;"
        " masking: transformers-research-projects distillation/distiller.py; inside: TinyBERT,"
        " arXiv:1909.10351; DistilBERT, arXiv:1910.01108; MiniLMv2, arXiv:2012.15828;"
        " sequence_level: Kim & Rush 2016, arXiv:1606.07947"
    )
    version: ClassVar[int] = 9
    trains_weights: ClassVar[bool] = True
    settings_type: ClassVar[type[DistillSettings]] = DistillSettings

    @classmethod
    def provides(cls, settings: DistillSettings) -> frozenset[str]:
        """Return what later steps may lose: the training."""
        return provided_by_training(settings)

    @classmethod
    def invalidates(cls, settings: DistillSettings) -> Mapping[str, str]:
        """Return what this step loses of earlier steps: calibrated quantized weights.

        A student with fewer layers needs one part of each kind, which `drop-layers` may have removed.
        """
        drops_layers = settings.student is not None and not settings.student.is_external
        return {
            **invalidated_by_training(settings),
            **({"parts": LAYERS_AFTER_PARTS_ERROR} if drops_layers else {}),
        }

    @classmethod
    def poor_order(cls, settings: DistillSettings, earlier: Mapping[str, Settings]) -> str | None:
        """Return that the work of earlier stages on the layers that the student lacks is lost."""
        stages = " and ".join(sorted({"prune", "factorize"} & set(earlier)))
        if not stages or settings.student is None or settings.replaces_model:
            return None
        return (
            f"Selecting a student's layers after {stages} discards part of that work. Distill to fewer layers"
            " first."
        )

    @classmethod
    def quantized_input_error(cls, settings: DistillSettings, quantized: QuantizedInput) -> str | None:
        """Return why the quantized weights cannot be trained, and what to do; None where they can."""
        text = codebook_error(quantized, cls.name)
        return (
            f"{text} Or train adapters: `- {cls.name}: {{lora: {{}}}}`."
            if text and settings.lora is None
            else None
        )

    @classmethod
    def needs_with(cls, settings: DistillSettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return the data that the step needs with these settings."""
        needs: frozenset[Need] = frozenset()
        for training in settings.phase_settings():
            needs |= needed_by_training(training)
        return needs - {"train"} | needed_splits(settings)

    @classmethod
    def check_model(
        cls, settings: DistillSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], dict[str, Any]]:
        """Return the errors, by setting, for a model of this config, and the config of the result."""
        errors: list[Message] = []
        student_config = dict(config)
        if settings.student is not None:
            student_errors, student_config = check_student(settings.student, config)
            errors = [
                error_message(error.code, error.message, setting=f"student.{error.setting}")
                for error in student_errors
            ]
        errors += check_training(settings, config) + check_teacher_folders(settings, config)
        # an invalid student has no layers to count
        return errors + ([] if errors else check_losses(settings, student_config)), student_config

    @classmethod
    def check_teachers(
        cls, settings: DistillSettings, config: Mapping[str, Any], teachers: Mapping[str, Mapping[str, Any]]
    ) -> list[Message]:
        """Return the errors, by setting, of losses that cannot compare these configs."""
        teacher = teachers.get("teacher")
        if teacher is not None:
            return check_teacher(settings, config, teacher)
        return check_several_teachers(settings, config, teachers)

    @classmethod
    def check_rows(cls, settings: DistillSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return the errors, by setting, for this task and these samples."""
        settings = settings.resolve_for_task(task)
        errors = settings.losses.check_task(task) + training_task_errors(settings, task)
        if len(settings.all_teachers()) > 1 and (reason := _NOT_AVERAGED.get(task_traits(task).output)):
            errors.append(error_message("several-teachers", f"{reason}. Set one teacher.", setting="teacher"))
        if settings.sequence_level is not None and task_traits(task).output != "text":
            text = f"a teacher generates no targets for {task}; remove sequence_level."
            errors.append(error_message("does-not-fit-task", text, setting="sequence_level"))
        if settings.augmentation is not None and task not in UNLABELED_TASKS:
            tasks = " and ".join(sorted(UNLABELED_TASKS))
            text = f"words are replaced only in samples of {tasks}, not for {task}; remove it."
            errors.append(error_message("does-not-fit-task", text, setting="augmentation"))
        elif settings.augmentation is not None:
            errors += check_augmentation(settings.augmentation)
        for index, phase in enumerate(settings.phases or ()):
            errors += [
                error_message(error.code, error.message, setting=f"phases.{index}.{error.setting}")
                for error in phase.losses.check_task(task)
            ]
        if settings.cache_logits is not None and task_traits(task).output not in _CACHED_OUTPUTS:
            text = f"the outputs of a teacher for {task} are not cached; remove it."
            errors.append(error_message("does-not-fit-task", text, setting="cache_logits"))
        elif settings.cache_logits is not None and not any(
            t.needs_only_outputs(task) for t in settings.phase_settings()
        ):
            inner = ", ".join(INNER_LOSSES)
            errors.append(
                error_message(
                    "nothing-to-store",
                    "the cache would never be used: every training has losses on inner states"
                    f" ({inner}), for which the teacher runs each time. Remove cache_logits.",
                    setting="cache_logits",
                )
            )
        errors += check_unlabeled(settings, task, data)
        if settings.sampling == "balanced" and settings.train_on != "labeled":
            text = "samples without labels have no classes to draw by; remove it, or train_on."
            errors.append(error_message("missing-labels", text, setting="sampling"))
        errors += inner_loss_errors(settings, task)
        unscored = [data[n] for n in ("train", "validation") if n in data and not data[n].has_labels]
        if (
            task_traits(task).output == "embedding"
            and any(t.losses.vector_weights()["cosent"] for t in settings.phase_settings())
            and unscored
        ):
            setting = "losses.cosent" if settings.phases is None else "phases"
            text = f"the samples of {unscored[0].origin} have no scores (column 'label')."
            errors.append(error_message("missing-scores", text, setting=setting))
        return errors

    @classmethod
    def estimate_size(cls, settings: DistillSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step: those of the phase that holds most."""
        settings = settings.resolve_for_task(inputs.task)
        teachers = [size for setting, size in inputs.named.items() if setting.startswith("teacher")]
        teachers = teachers or [inputs.source]
        counts = [count for name in _split_names(settings) if (count := inputs.samples.get(name))]
        samples = counts[0] if len(counts) == 1 and settings.augmentation is None else None
        sizes = []
        for training in settings.phase_settings():
            cached = settings.cache_logits is not None and training.needs_only_outputs(inputs.task)
            present = teachers if training.losses.uses_teacher() and not cached else []
            sizes.append(estimate_training(training, inputs, teachers=present, samples=samples))
        works = [size.work for size in sizes if size.work is not None]
        largest = max(sizes, key=lambda size: size.memory_bytes)
        is_known = len(works) == len(sizes) and settings.augmentation is None  # how many copies differ?
        return replace(largest, work=sum(works) if is_known else None)

    @classmethod
    def lighter_settings(cls, settings: DistillSettings) -> Iterator[tuple[str, TrainingSettings]]:
        """Yield settings that need less memory, with their text."""
        return lighter_trainings(settings)

    def __call__(self, src: Artifact, settings: DistillSettings, ctx: Context) -> None:
        """Make the student from `src`, train it with the teacher, and write it to `ctx.out`."""
        from smelt.compress.distill.objective import make_cached_teacher
        from smelt.compress.distill.teachers import (
            align_vocabularies,
            check_outputs,
            combine_teachers,
            labels_by_teacher,
            load_teachers,
            teacher_identity,
        )
        from smelt.compress.quantize.qat import save_trained
        from smelt.compress.quantize.qat_extensions import split_before_training

        settings = settings.resolve_for_task(ctx.task)
        with tempfile.TemporaryDirectory(prefix="student-", dir=ctx.out.parent) as folder:
            workspace = Path(folder)
            teachers = load_teachers(settings, src, workspace / "teachers", ctx)
            (workspace / "student").mkdir()
            model, edits, weights_folder = _make_student(
                src, combine_teachers(teachers, None, settings, src), settings, workspace / "student", ctx
            )
            edits = split_before_training(model, edits, settings.qat, ctx)
            token_maps = align_vocabularies(teachers, model, weights_folder, ctx)
            for loaded in teachers:
                check_outputs(model, loaded.model, settings, several=len(teachers) > 1)
            teacher = combine_teachers(teachers, model, settings, src)
            ctx.details["teacher"] = ", ".join(teacher.name for teacher in teachers)
            if len(teachers) > 1 and ctx.traits.classifies:
                ctx.details["labels_by_teacher"] = labels_by_teacher(teachers)
            if settings.sequence_level is not None:
                generator = settings.sequence_level.generator or teachers[0].name
                train_split = generate_targets(ctx.ancestors[generator], settings.sequence_level, ctx)
                ctx = replace(ctx, data={**ctx.data, "train": train_split})
            ctx = with_training_samples(settings, model.config, ctx)
            if settings.augmentation is not None:
                ctx = augment_training_samples(settings.augmentation, ctx)
            cached_teacher = None
            if settings.cache_logits is not None:
                identity = teacher_identity(teachers, teacher, token_maps, model, settings, ctx)
                cached_teacher = make_cached_teacher(teacher, identity, model, settings, ctx)
            with contextlib.closing(cached_teacher) if cached_teacher else contextlib.nullcontext():
                _train_phases(
                    model,
                    teacher,
                    Artifact(weights_folder, src.manifest),
                    settings,
                    ctx,
                    edits,
                    cached_teacher,
                )
            save_trained(model, edits, weights_folder, settings.dtype, settings.qat, ctx)


def _split_names(settings: DistillSettings) -> tuple[str, ...]:
    """Return the splits that the training reads."""
    return {"labeled": ("train",), "unlabeled": ("unlabeled",)}.get(settings.train_on, ("train", "unlabeled"))


def _make_student(
    src: Artifact, teacher: Any, settings: DistillSettings, space: Path, ctx: Context
) -> tuple[Any, list[Edit], Path]:
    """Return the student, its edits, and the folder with the stored dtype of its weights.

    space: an empty folder for a student that is not cut from `src`.
    """
    from smelt.compress.quantize.qat import load_trainable
    from smelt.models.checkpoint import load_model

    student = settings.student
    if student is not None and student.is_external:
        make_external_student(student, src, teacher, space, ctx)
        try:
            return *load_model(space), space
        except InputError as error:
            student_name = str(student.model or student.config)
            raise InputError(str(error).replace(str(space), student_name), code=error.code) from error
    model, edits = load_trainable(src, ctx, settings.lora is not None)
    if student is not None:
        from smelt.compress.drop_layers.layer_selection import keep_layers

        for stack in STACK_NAMES:
            choice = getattr(student, stack)
            if choice is not None:
                edits, kept_indices = keep_layers(
                    model, edits, stack, choice, student.layer_selection, stage="distill", prefix="student."
                )
                ctx.details[f"kept_{stack}"] = kept_indices
    return model, edits, src.path


def _train_phases(
    model: Any,
    teacher: Any,
    src: Artifact,
    settings: DistillSettings,
    ctx: Context,
    edits: list[Edit],
    cached_teacher: CachedTeacher | None,
) -> None:
    """Train `model` in place, phase by phase; `cached_teacher` serves phases that use only outputs."""
    from smelt.compress.distill.objective import DistillObjective, make_inner_losses
    from smelt.training.extension import TrainingExtension

    phase_details: list[Any] = []
    warned: list[list[Message]] = []
    trainings = [training.without_default_dropout() for training in settings.phase_settings()]
    inners = [
        make_inner_losses(model, teacher, training, ctx.seed, src.path) for training in trainings
    ]  # raise before training
    for training, inner in zip(trainings, inners, strict=True):
        phase_cache = cached_teacher if training.needs_only_outputs(ctx.task) else None
        objective = DistillObjective(teacher, training, inner, phase_cache)
        num_warnings = len(ctx.warnings)
        extension = (
            TrainingExtension(modules=inner.modules, training_context=inner.capture)
            if inner
            else TrainingExtension()
        )
        if phase_cache is not None:
            extension = replace(extension, prepare_samples=phase_cache.prepare_samples)
        train_with_techniques(
            model,
            src,
            training,
            ctx,
            objective=objective,
            edits=edits,
            stage=Distill.name,
            extension=extension,
            random=_starts_random(settings, src, ctx)
            and not phase_details,  # only the first phase starts from random weights
        )
        phase_details.append(ctx.details["training"])
        warned.append(ctx.warnings[num_warnings:])
        del ctx.warnings[num_warnings:]
    if len(phase_details) > 1:
        ctx.details["phases"] = phase_details
    ctx.warnings.extend(_merge_phase_warnings(warned))


def _starts_random(settings: DistillSettings, src: Artifact, ctx: Context) -> bool:
    """Return whether the student starts with random weights, of its own config or of `src`."""
    from smelt.training.train import starts_random

    student = settings.student
    if student is not None and student.is_external:
        return student.config is not None
    return starts_random(src, ctx)


def _merge_phase_warnings(warned: Sequence[Sequence[Message]]) -> list[Message]:
    """Return the warnings of all phases: common ones once, others with the number of the phase."""
    merged: dict[Message, None] = {}
    for number, messages in enumerate(warned, 1):
        for message in messages:
            text = f"phase {number}: {message.message}"
            shared = all(message in phase_messages for phase_messages in warned)
            merged[message if shared else replace(message, message=text)] = None
    return list(merged)


GENERATION_VERSION = 1  # raise it whenever the same settings generate other texts


def generate_targets(teacher: Artifact, settings: SequenceSettings, ctx: Context) -> Split:
    """Return the training samples with generated targets; `original_ratio` of them keep their own target.

    `ctx.details["sequence_level"]` receives the counts of each.

    Args:
        teacher: generates, in the runtime of its format.
        settings: num_beams, best_of, original_ratio.
        ctx: the training samples; generated texts are cached in the store.
    """
    split = ctx.data["train"]
    texts = ctx.cached_value(
        {
            "what": "sequences",
            "version": GENERATION_VERSION,
            "artifact": teacher.key,
            "settings": settings.model_dump(mode="json", exclude={"original_ratio", "generator", "tokenize"}),
            "tokenize": _bleu_tokenizer(teacher, split, settings) if settings.best_of else None,
            "rows": split.fingerprint if settings.best_of else json_hash([e.text for e in split.examples]),
        },
        lambda: _generate(teacher, split, settings, ctx),
    )
    generated = [
        replace(e, references=(text,)) for e, text in zip(split.examples, texts, strict=True) if text
    ]
    num_original, num_generated = count_targets(len(split), len(generated), settings.original_ratio)
    rng = random.Random(ctx.seed)
    original_samples = [split.examples[i] for i in sorted(rng.sample(range(len(split)), num_original))]
    generated_samples = [generated[i] for i in sorted(rng.sample(range(len(generated)), num_generated))]
    ctx.details["sequence_level"] = {
        "written_by_the_teacher": num_generated,
        "with_their_own_target": num_original,
    }
    if num_empty := len(split) - len(generated):
        ctx.warn(
            "empty-teacher-outputs",
            f"sequence_level: the teacher generated an empty output for {num_empty} of {len(split)} samples;"
            " they are not used.",
        )
    return Split(split.origin, (*generated_samples, *original_samples))


def count_targets(rows: int, num_generated: int, original_ratio: float) -> tuple[int, int]:
    """Return the numbers of samples with their own target and with a generated one, as many as possible.

    Args:
        rows: number of samples.
        num_generated: number of samples with a generated target that is not empty.
        original_ratio: fraction of samples with their own target, below 1.
    """
    num_original = min(rows, round(num_generated * original_ratio / (1 - original_ratio)))
    return num_original, num_generated if original_ratio == 0 else min(
        num_generated, round(num_original * (1 - original_ratio) / original_ratio)
    )


def _bleu_tokenizer(teacher: Artifact, split: Split, settings: SequenceSettings) -> str:
    texts = (text for example in split.examples for text in example.references)
    return bleu_tokenizer(texts, settings.tokenize, read_text_rules(teacher.path).target_language)


def _generate(teacher: Artifact, split: Split, settings: SequenceSettings, ctx: Context) -> list[str]:
    from smelt.generation.config import GenerationSettings
    from smelt.runtimes.predict_texts import generate_candidates, generate_texts
    from smelt.runtimes.registry import open_runner

    options: dict[str, Any] = {"num_beams": settings.num_beams, "max_new_tokens": settings.max_new_tokens}
    if settings.num_beams > 1:
        options["length_penalty"] = settings.length_penalty
    generation, texts = GenerationSettings(**options), [e.text for e in split.examples]
    device = "cpu" if ctx.device == "cpu" else "auto"
    with open_runner(teacher, ctx.threads, device) as runner:
        if settings.best_of is None:
            return generate_texts(runner, texts, generation, settings.batch_size, ctx.progress)
        candidates_by_text = generate_candidates(
            runner, texts, generation, settings.best_of, settings.batch_size, ctx.progress
        )
    tokenize = _bleu_tokenizer(teacher, split, settings)
    return [
        closest_by_bleu(e.references, candidates, tokenize)
        for e, candidates in zip(split.examples, candidates_by_text, strict=True)
    ]


def closest_by_bleu(references: Sequence[str], candidates: Sequence[str], tokenize: str = "13a") -> str:
    """Return the candidate with the highest sentence BLEU; the first of equals."""
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(effective_order=True, tokenize=tokenize)
    return max(candidates, key=lambda text: bleu.sentence_score(text, list(references)).score)


def needed_splits(settings: DistillSettings) -> frozenset[Need]:
    """Return the data splits that the training needs."""
    needs: dict[str, frozenset[Need]] = {
        "labeled": frozenset({"train"}),
        "unlabeled": frozenset({"unlabeled"}),
        "both": frozenset({"train", "unlabeled"}),
    }
    return needs[settings.train_on]


def with_training_samples(settings: DistillSettings, config: Any, ctx: Context) -> Context:
    """Return `ctx` with the training samples that the settings select.

    Each sample without a label gets a dummy label that no loss uses; where a loss uses the labels of the
    others, `NO_LABEL`. If pairs and single texts are combined
    for a sentence embedder, the pairs are split into single texts.
    """
    if settings.train_on == "labeled":
        return ctx
    names = ("train", UNLABELED) if settings.train_on == "both" else (UNLABELED,)
    splits = [ctx.data[name] for name in names]
    examples = [example for split in splits for example in split.examples]
    if ctx.traits.output == "embedding":
        if len({example.text_pair is None for example in examples}) == 2:
            examples = [text_example for example in examples for text_example in _split_pair(example)]
        examples = [replace(example, label=None) for example in examples]
    else:
        keeps_labels = settings.uses_labels()
        placeholder = NO_LABEL if keeps_labels else _placeholder_label(config)
        labeled = ctx.data["train"].examples if keeps_labels else ()
        examples = examples[len(labeled) :]
        examples = [*labeled, *(replace(example, label=placeholder) for example in examples)]
    train_split = Split(" and ".join(split.origin for split in splits), tuple(examples))
    ctx.details["rows"] = {split.origin: len(split) for split in splits}
    return replace(ctx, data={**ctx.data, "train": train_split})


def _placeholder_label(config: Any) -> Label:
    problem = problem_type(config.to_dict())
    if problem == REGRESSION:
        return (0.0,) * int(config.num_labels)
    return () if problem == MULTI_LABEL else str(config.id2label[0])


def _split_pair(example: Example) -> list[Example]:
    """Return the texts of a pair as separate examples."""
    texts = [example.text] + ([] if example.text_pair is None else [example.text_pair])
    return [replace(example, text=text, text_pair=None) for text in texts]
