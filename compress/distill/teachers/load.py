"""Who teaches: one step, several of them, or models in folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.compress.distill.other_student import require_same_words
from smelt.compress.distill.settings import DistillSettings, TeacherSettings
from smelt.compress.distill.teachers.ensemble import joined
from smelt.compress.distill.teachers.words import speak_as
from smelt.core.artifact import Artifact
from smelt.core.data import IMAGES, SIMILARITY
from smelt.core.errors import InputError, nearest
from smelt.core.files import hash_of, sha256_of
from smelt.core.stage import Context
from smelt.core.text import article


@dataclass(frozen=True)
class Teacher:
    """A model that teaches, in eval mode, on the CPU.

    name: of its step, or its folder. folder: where it was read from. key: of its artifact; None: of a folder,
    which `identity` then tells from others.
    """

    name: str
    model: Any
    folder: Path
    key: str | None
    identity: str


def load_teachers(settings: DistillSettings, src: Artifact, space: Path, ctx: Context) -> list[Teacher]:
    """Load all that are named.

    Args:
        settings: of the step.
        src: what the step gets; a folder's tokenizer must be as its.
        space: an empty folder for models that come from elsewhere.
        ctx: the earlier steps; gets warnings.

    Raises:
        InputError: one cannot teach: no such step, another format, random weights, another tokenizer.
    """
    return [
        _of_step(one, ctx) if isinstance(one, str) else _of_folder(one, src, space / str(number), ctx)
        for number, one in enumerate(settings.teachers())
    ]


def _of_step(name: str, ctx: Context) -> Teacher:
    from smelt.runtime.models.checkpoint import load_model

    artifact = ctx.ancestors.get(name)
    if artifact is None:
        known = ", ".join(ctx.ancestors)
        raise InputError(
            f"distill: the teacher '{name}' is no step before this one. There are: {known}."
            f"{nearest(name, ctx.ancestors)}",
            code="unknown-step",
            setting="teacher",
        )
    if artifact.format != "torch":
        raise InputError(
            f"distill: the teacher '{name}' is stored as {artifact.format}; it must be a torch step.",
            code="wrong-format",
            setting="teacher",
        )
    details = artifact.manifest.details
    if details.get("untrained") or details.get("new_head"):
        what = "weights" if details.get("untrained") else "classifier"
        trained = [n for n, a in ctx.ancestors.items() if a.manifest.stage in ("finetune", "distill")]
        how = (
            f"teacher: {trained[0]}" if trained else "put a finetune before it, and name that as the teacher"
        )
        raise InputError(
            f"distill: the {what} of the teacher '{name}' is random; name a trained step: {how}.",
            code="untrained-teacher",
            setting="teacher",
        )
    model, _ = load_model(artifact.path)
    return Teacher(name, model.requires_grad_(False), artifact.path, artifact.key, artifact.key)


def _of_folder(said: TeacherSettings, src: Artifact, space: Path, ctx: Context) -> Teacher:
    from smelt.runtime.models.checkpoint import load_model
    from smelt.runtime.models.import_model import import_model, source_files
    from smelt.runtime.text.sentence_files import read_sentence_rules

    folder = Path(said.model)
    if ctx.task != IMAGES:
        require_same_words(folder, src.path, "teacher")
    space.mkdir(parents=True)
    rules = read_sentence_rules(folder) or read_sentence_rules(src.path) if ctx.task == SIMILARITY else None
    notes = import_model(folder, space, sentences=rules)
    ctx.warnings.extend(note.prefixed(f"distill: teacher {folder.name}: ") for note in notes)
    try:
        model, _ = load_model(space)
    except InputError as error:  # under the name that was given
        raise InputError(str(error).replace(str(space), str(folder)), code=error.code) from error
    if ctx.task == "text-classification" and not hasattr(model, "num_labels"):
        raise InputError(
            f"distill: the teacher {folder} is {article(type(model).__name__)}, no classifier.",
            code="different-kind",
            setting="teacher",
        )
    identity = hash_of({path.name: sha256_of(path) for path in source_files(folder)})
    return Teacher(str(folder), model.requires_grad_(False), space, None, identity)


def as_one(teachers: Sequence[Teacher], student: Any, settings: DistillSettings) -> Any:
    """Return the model that teaches: the only one, or all together (`student`: None where there is none yet).

    Raises:
        InputError: they cannot teach together.
    """
    if len(teachers) == 1:
        return teachers[0].model
    names = [teacher.name for teacher in teachers]
    return joined([teacher.model for teacher in teachers], names, student, settings.temperature)


def agree_on_words(
    teachers: Sequence[Teacher], student: Any, home: Path, ctx: Context
) -> list[list[int] | None]:
    """Let each teacher speak in the words of the student, which was read from `home`; return which those are.

    The report is told how many there are, where a teacher knows more.
    """
    if ctx.task == IMAGES:
        return [None] * len(teachers)
    found = [speak_as(teacher.model, teacher.folder, student, home) for teacher in teachers]
    common = [len(words) for words in found if words is not None]
    if common:
        ctx.details["words_of_teacher"] = max(common)
    return found


def identity_of(
    teachers: Sequence[Teacher],
    words: Sequence[Sequence[int] | None],
    student: Any,
    settings: DistillSettings,
    ctx: Context,
) -> dict[str, Any]:
    """Return what says which teacher this is, for what is kept of it: its answers depend on nothing else."""
    keys = [teacher.key for teacher in teachers if teacher.key is not None]
    found: dict[str, Any] = {
        # what is made of folders alone goes when the untouched model goes
        "artifacts": keys or [artifact.key for artifact in list(ctx.ancestors.values())[:1]],
        "teachers": [teacher.identity for teacher in teachers],
        "words": [None if own is None else hash_of(list(own)) for own in words],
    }
    if len(teachers) > 1:
        labels = getattr(student.config, "id2label", None)
        found |= {"averaged_at": settings.temperature, "labels": labels and list(labels.values())}
    return found


def check_outputs(model: Any, teacher: Any, settings: DistillSettings, several: bool) -> None:
    """Require that what `teacher` gives can be compared with what `model`, the student, gives.

    several: it is one of several teachers, whose labels are looked at together.

    Raises:
        InputError: they have other words or labels, or are of another kind.
    """
    from smelt.families.registry import family_of
    from smelt.runtime.causal import is_causal
    from smelt.runtime.models.sentence_model import is_sentence_model

    ours, theirs = model.config, teacher.config
    reads = [family.reads if (family := family_of(one)) else "texts" for one in (model, teacher)]
    if reads[0] != reads[1]:
        raise InputError(
            f"distill: the teacher reads {reads[1]}, the student {reads[0]}. They must agree.",
            code="different-kind",
            setting="teacher",
        )
    if reads[0] == "texts" and ours.vocab_size != theirs.vocab_size:
        raise InputError(
            f"distill: the teacher's vocabulary has {theirs.vocab_size} tokens, the student's"
            f" {ours.vocab_size}. Both are given the same tokens, so the vocabulary must be the same.",
            code="vocabulary-mismatch",
            setting="teacher",
        )
    if is_sentence_model(model):
        from smelt.compress.distill.sentences import require_fit

        for training in settings.trainings():
            require_fit(model, teacher, training.losses)
        return
    if ours.is_encoder_decoder != theirs.is_encoder_decoder:
        raise InputError(
            f"distill: {article(theirs.model_type)} teacher cannot teach {article(ours.model_type)} student.",
            code="different-kind",
            setting="teacher",
        )
    words, known = (
        getattr(c, "decoder_vocab_size", None) or getattr(c, "vocab_size", None) for c in (ours, theirs)
    )
    generates = ours.is_encoder_decoder or is_causal(ours.to_dict())
    if generates and words != known:
        raise InputError(
            f"distill: the teacher's vocabulary has {known} tokens, the student's"
            f" {words}. Logits can be compared only over the same vocabulary.",
            code="vocabulary-mismatch",
            setting="teacher",
        )
    if not ours.is_encoder_decoder and not several:
        _require_same_labels(ours, theirs)


def _require_same_labels(ours: Any, theirs: Any) -> None:
    from smelt.compress.train.losses.of_classes import problem_of

    if ours.id2label != theirs.id2label:
        raise InputError(
            f"distill: the teacher's labels are {theirs.id2label}, the student's {ours.id2label}."
            " They must agree.",
            code="labels-mismatch",
            setting="teacher",
        )
    if problem_of(ours) != problem_of(theirs):
        raise InputError(
            f"distill: the teacher's problem type is {problem_of(theirs)}, the student's {problem_of(ours)}."
            " They must agree.",
            code="problem-type-mismatch",
            setting="teacher",
        )
