"""Students with an own config and random weights, or from a checkpoint; not layers of the step's model.

The checks read the config only; torch is imported when a student is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.compress.distill.settings import StudentSettings
from smelt.compress.trim_vocabulary.kept_tokens import read_kept_tokens
from smelt.core.artifact import Artifact
from smelt.core.data import CLASSIFICATION_TASKS, IMAGE_CLASSIFICATION
from smelt.core.errors import DEFAULT_CODE, InputError
from smelt.core.files import path_exists, read_json_object
from smelt.core.messages import Message, error_message
from smelt.core.stage import Context
from smelt.families.registry import FAMILIES, find_family

# Config keys that define the outputs; the student gets the teacher's.
_OUTPUT_KEYS = ("id2label", "label2id", "problem_type")


def read_student_config(student: StudentSettings) -> dict[str, Any]:
    """Return the config of a student given by file or folder; empty if there is none."""
    path = Path(student.config or student.model or "")
    return read_json_object(path if path.is_file() else path / "config.json")


def check_external_student(
    student: StudentSettings, teacher_config: Mapping[str, Any]
) -> tuple[list[Message], dict[str, Any]]:
    """Check a student's config against that of the step's model.

    Returns:
        The mistakes, each with its setting, and the config of the student.
    """
    word = "config" if student.config else "model"
    if not path_exists(Path(student.config or student.model or "")):
        return [], {}  # the plan reports it
    try:
        own = read_student_config(student)
    except InputError as error:
        return [error_message(error.code or DEFAULT_CODE, str(error), setting=word)], {}
    words, said = teacher_config.get("vocab_size"), own.get("vocab_size")
    wrong = _incompatibility(own, teacher_config)
    if wrong is None and student.model and None not in (words, said) and words != said:
        text = f"the student's vocabulary has {said} tokens, but the model's has {words}; they must be equal."
        wrong = error_message("vocabulary-mismatch", text)
    if wrong is not None:
        return [error_message(wrong.code, wrong.message, setting=word)], {}
    outputs = {name: teacher_config[name] for name in _OUTPUT_KEYS if name in teacher_config}
    return [], {**own, **outputs} | ({} if (words or said) is None else {"vocab_size": words or said})


def _incompatibility(own: Mapping[str, Any], config: Mapping[str, Any]) -> Message | None:
    """Return why a model of the config `own` cannot be trained by one of `config`, None if it can."""
    kind, teacher = find_family(own), find_family(config)
    if kind is None:
        known = ", ".join(FAMILIES)
        text = f"'{own.get('model_type')}' is not a supported family; supported are {known}."
        return error_message("unsupported-family", text)
    if teacher is not None and (kind.architecture, kind.input_kind) != (
        teacher.architecture,
        teacher.input_kind,
    ):
        text = (
            f"a {kind.name} student cannot be trained by a {teacher.name} teacher. Use a student of"
            " the same kind."
        )
        return error_message("different-kind", text)
    sizes = image_size_difference(own, config)
    return None if sizes is None else error_message("image-size-mismatch", sizes)


def image_size_difference(own: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return the error text if the student's image size differs from the model's, else None."""
    ours, theirs = own.get("image_size"), config.get("image_size")
    if None in (ours, theirs) or ours == theirs:
        return None
    return f"the image size is {ours} pixels, but the model's is {theirs}; they must be equal."


def make_external_student(
    student: StudentSettings, src: Artifact, teacher: Any, folder: Path, ctx: Context
) -> None:
    """Write the student into the empty folder `folder`, with the tokenizer of `src`.

    Args:
        student: settings with a config (weights are initialized with the recipe's seed) or a checkpoint.
        src: the step's input.
        teacher: the model whose outputs the student learns.
        folder: becomes a model folder.
        ctx: task and seed; collects warnings.

    Raises:
        InputError: the model cannot be made, or its tokenizer differs.
    """
    from smelt.compress.train.losses.classification import model_problem_type
    from smelt.runtime.models.checkpoint import copy_tokenizer
    from smelt.runtime.models.create.new_model import create_model
    from smelt.runtime.models.import_model import import_model

    classifies = ctx.task in CLASSIFICATION_TASKS
    labels = list(teacher.config.id2label.values()) if classifies else []
    problem = model_problem_type(teacher.config) if classifies else None
    sentences = getattr(teacher, "sentence_rules", None)
    if student.config is not None:
        words = read_json_object(src.path / "config.json").get("vocab_size")
        notes = create_model(
            read_student_config(student) | ({} if words is None else {"vocab_size": words}), src.path, folder,
            task=ctx.task, seed=ctx.seed, labels=labels, problem=problem, sentences=sentences,
        )  # fmt: skip
        copy_tokenizer(src.path, folder)  # with the files next to it: shortlist, kept tokens
        ctx.warnings.extend(note.with_prefix("distill: student: ") for note in notes)
        return
    source = Path(student.model or "")
    if ctx.task != IMAGE_CLASSIFICATION:
        require_same_tokens(source, src.path, "student")
    notes = import_model(source, folder, labels or None, ctx.seed, problem, sentences)
    copy_tokenizer(src.path, folder)
    ctx.warnings.extend(note.with_prefix("distill: student: ") for note in notes)


def require_same_tokens(own: Path, other: Path, whose: str) -> None:
    """Require that the tokenizers of two folders have the same ids for the same tokens.

    If the vocabulary of `other` was trimmed, a teacher may have more tokens; the kept ones must have the
    ids that they had before (see `smelt.compress.trim_vocabulary.kept_tokens`).

    whose: role of the model in `own`, for the message; `other` is the step's input.

    Raises:
        InputError: the tokenizers differ.
    """
    from smelt.runtime.models.checkpoint import load_tokenizer

    ours, theirs = load_tokenizer(own).get_vocab(), load_tokenizer(other).get_vocab()
    kept = read_kept_tokens(other)
    if whose == "teacher" and kept is not None and read_kept_tokens(own) != kept:
        before = {word: kept.ids[at] for word, at in theirs.items() if at < len(kept.ids)}
        if all(ours.get(word) == at for word, at in before.items()):
            return
    strange = [word for word in ours if theirs.get(word) != ours[word]]
    if strange or len(ours) != len(theirs):
        word = strange[0] if strange else next(word for word in theirs if word not in ours)
        raise InputError(
            f"distill: the tokenizer of the {whose} {own} differs from the model's: the id of '{word}'"
            f" is {ours.get(word)} instead of {theirs.get(word)}. Both models must have the same"
            " tokenizer.",
            code="tokenizer-mismatch",
        )
