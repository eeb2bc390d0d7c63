"""Load the teachers: one step, several steps, or models in folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.compress.distill.external_student import require_same_tokens
from smelt.compress.distill.settings import DistillSettings, TeacherSettings
from smelt.compress.distill.teachers.ensemble import make_ensemble
from smelt.compress.distill.teachers.token_mapping import map_teacher_tokens
from smelt.core.artifact import Artifact
from smelt.core.data import IMAGE_CLASSIFICATION, SENTENCE_SIMILARITY
from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import json_hash, sha256_of
from smelt.core.stage import Context
from smelt.core.text import with_article


@dataclass(frozen=True)
class Teacher:
    """A teacher model, in eval mode, on the CPU.

    name: of its step, or its folder. folder: where it was loaded from. key: of its artifact; None for a
    folder, which `identity` identifies.
    """

    name: str
    model: Any
    folder: Path
    key: str | None
    identity: str


def load_teachers(settings: DistillSettings, src: Artifact, workspace: Path, ctx: Context) -> list[Teacher]:
    """Return all teachers that the settings name.

    Args:
        settings: of the step.
        src: the step's input; the tokenizer of a teacher in a folder must be the same.
        workspace: an empty folder for converted models.
        ctx: the earlier steps; collects warnings.

    Raises:
        InputError: unknown step, wrong format, random weights or another tokenizer.
    """
    return [
        _teacher_of_step(one, ctx)
        if isinstance(one, str)
        else _teacher_of_folder(one, src, workspace / str(number), ctx)
        for number, one in enumerate(settings.all_teachers())
    ]


def _teacher_of_step(name: str, ctx: Context) -> Teacher:
    from smelt.runtime.models.checkpoint import load_model

    artifact = ctx.ancestors.get(name)
    if artifact is None:
        known = ", ".join(ctx.ancestors)
        raise InputError(
            f"distill: the teacher '{name}' is not an earlier step. Available: {known}."
            f"{did_you_mean(name, ctx.ancestors)}",
            code="unknown-step",
            setting="teacher",
        )
    if artifact.format != "torch":
        raise InputError(
            f"distill: the teacher '{name}' is stored as {artifact.format}. Use a step with a torch model.",
            code="wrong-format",
            setting="teacher",
        )
    details = artifact.manifest.details
    if details.get("untrained") or details.get("new_head"):
        what = "weights" if details.get("untrained") else "classifier"
        trained = [n for n, a in ctx.ancestors.items() if a.manifest.stage in ("finetune", "distill")]
        how = f"set teacher: {trained[0]}" if trained else "add a finetune step and set it as teacher"
        raise InputError(
            f"distill: the {what} of the teacher '{name}' is not trained. Use a trained teacher: {how}.",
            code="untrained-teacher",
            setting="teacher",
        )
    model, _ = load_model(artifact.path)
    return Teacher(name, model.requires_grad_(False), artifact.path, artifact.key, artifact.key)


def _teacher_of_folder(said: TeacherSettings, src: Artifact, space: Path, ctx: Context) -> Teacher:
    from smelt.runtime.models.checkpoint import load_model
    from smelt.runtime.models.import_model import import_model, source_files
    from smelt.runtime.text.sentence_files import read_sentence_rules

    folder = Path(said.model)
    if ctx.task != IMAGE_CLASSIFICATION:
        require_same_tokens(folder, src.path, "teacher")
    space.mkdir(parents=True)
    rules = (
        read_sentence_rules(folder) or read_sentence_rules(src.path)
        if ctx.task == SENTENCE_SIMILARITY
        else None
    )
    notes = import_model(folder, space, sentences=rules)
    ctx.warnings.extend(note.with_prefix(f"distill: teacher {folder.name}: ") for note in notes)
    try:
        model, _ = load_model(space)
    except InputError as error:  # report the folder that the settings name
        raise InputError(str(error).replace(str(space), str(folder)), code=error.code) from error
    if ctx.task == "text-classification" and not hasattr(model, "num_labels"):
        raise InputError(
            f"distill: the teacher {folder} is {with_article(type(model).__name__)}, not a classifier."
            " Use a classifier as teacher.",
            code="different-kind",
            setting="teacher",
        )
    identity = json_hash({path.name: sha256_of(path) for path in source_files(folder)})
    return Teacher(str(folder), model.requires_grad_(False), space, None, identity)


def combine_teachers(teachers: Sequence[Teacher], student: Any, settings: DistillSettings) -> Any:
    """Return the only teacher, or all combined into one (`student`: None if there is none yet).

    Raises:
        InputError: they cannot be combined.
    """
    if len(teachers) == 1:
        return teachers[0].model
    names = [teacher.name for teacher in teachers]
    return make_ensemble([teacher.model for teacher in teachers], names, student, settings.temperature)


def align_vocabularies(
    teachers: Sequence[Teacher], student: Any, student_folder: Path, ctx: Context
) -> list[list[int] | None]:
    """Map each teacher's tokens to those of `student`, loaded from `student_folder`, and return the maps.

    The report gets the number of common tokens if a teacher has more.
    """
    if ctx.task == IMAGE_CLASSIFICATION:
        return [None] * len(teachers)
    found = [
        map_teacher_tokens(teacher.model, teacher.folder, student, student_folder) for teacher in teachers
    ]
    common = [len(words) for words in found if words is not None]
    if common:
        ctx.details["words_of_teacher"] = max(common)
    return found


def teacher_identity(
    teachers: Sequence[Teacher],
    token_maps: Sequence[Sequence[int] | None],
    student: Any,
    settings: DistillSettings,
    ctx: Context,
) -> dict[str, Any]:
    """Return everything that the cached outputs of the teachers depend on, for the cache key."""
    keys = [teacher.key for teacher in teachers if teacher.key is not None]
    found: dict[str, Any] = {
        # outputs of teachers in folders are removed together with the original model
        "artifacts": keys or [artifact.key for artifact in list(ctx.ancestors.values())[:1]],
        "teachers": [teacher.identity for teacher in teachers],
        "words": [None if own is None else json_hash(list(own)) for own in token_maps],
    }
    if len(teachers) > 1:
        labels = getattr(student.config, "id2label", None)
        found |= {"averaged_at": settings.temperature, "labels": labels and list(labels.values())}
    return found


def check_outputs(model: Any, teacher: Any, settings: DistillSettings, several: bool) -> None:
    """Require that outputs of `teacher` can be compared with those of the student, `model`.

    several: it is one of several teachers; their labels are checked together.

    Raises:
        InputError: vocabulary, labels or kind of model differ.
    """
    from smelt.families.registry import family_of
    from smelt.runtime.causal import is_causal
    from smelt.runtime.models.sentence_model import is_sentence_model

    ours, theirs = model.config, teacher.config
    reads = [family.input_kind if (family := family_of(one)) else "texts" for one in (model, teacher)]
    if reads[0] != reads[1]:
        raise InputError(
            f"distill: the teacher's inputs are {reads[1]}, but the student's are {reads[0]}. Use a"
            " teacher with the same inputs.",
            code="different-kind",
            setting="teacher",
        )
    if reads[0] == "texts" and ours.vocab_size != theirs.vocab_size:
        raise InputError(
            f"distill: the teacher's vocabulary has {theirs.vocab_size} tokens, but the student's has"
            f" {ours.vocab_size}. Both models read the same tokens; use a teacher with the same"
            " vocabulary.",
            code="vocabulary-mismatch",
            setting="teacher",
        )
    if is_sentence_model(model):
        from smelt.compress.distill.vector_losses import require_comparable_vectors

        for training in settings.phase_settings():
            require_comparable_vectors(model, teacher, training.losses)
        return
    if ours.is_encoder_decoder != theirs.is_encoder_decoder:
        raise InputError(
            f"distill: {with_article(theirs.model_type)} model cannot be the teacher of"
            f" {with_article(ours.model_type)} model: only one of them is an encoder-decoder. Use"
            " a teacher of the same kind.",
            code="different-kind",
            setting="teacher",
        )
    words, known = (
        getattr(c, "decoder_vocab_size", None) or getattr(c, "vocab_size", None) for c in (ours, theirs)
    )
    generates = ours.is_encoder_decoder or is_causal(ours.to_dict())
    if generates and words != known:
        raise InputError(
            f"distill: the teacher's vocabulary has {known} tokens, but the student's has {words}."
            " Logits can be compared only over the same vocabulary; use a teacher with the same"
            " vocabulary.",
            code="vocabulary-mismatch",
            setting="teacher",
        )
    if not ours.is_encoder_decoder and not several:
        _require_same_labels(ours, theirs)


def _require_same_labels(ours: Any, theirs: Any) -> None:
    from smelt.compress.train.losses.classification import model_problem_type

    if ours.id2label != theirs.id2label:
        raise InputError(
            f"distill: the teacher's labels are {theirs.id2label}, but the student's are"
            f" {ours.id2label}. Use a teacher with the same labels.",
            code="labels-mismatch",
            setting="teacher",
        )
    if model_problem_type(ours) != model_problem_type(theirs):
        raise InputError(
            f"distill: the teacher's problem type is {model_problem_type(theirs)}, but the student's"
            f" is {model_problem_type(ours)}. Use a teacher with the same problem type.",
            code="problem-type-mismatch",
            setting="teacher",
        )
