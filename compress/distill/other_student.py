"""Students that are not cut out of the model: of any config with new weights, or a checkpoint.

The config alone is read before any work; nothing here imports torch before a student is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.compress.distill.settings import StudentSettings
from smelt.compress.vocabulary.kept import read_kept
from smelt.core.artifact import Artifact
from smelt.core.data import CLASSIFICATION, IMAGES
from smelt.core.errors import UNNAMED, InputError
from smelt.core.files import is_there, read_json
from smelt.core.messages import Message, mistake
from smelt.core.stage import Context
from smelt.families.registry import FAMILIES, find_family

# What a student's outputs mean is what its teacher's mean.
_OUTPUTS = ("id2label", "label2id", "problem_type")


def config_of(student: StudentSettings) -> dict[str, Any]:
    """Return the config of a student that is told by a file or folder; empty where it has none."""
    path = Path(student.config or student.model or "")
    return read_json(path if path.is_file() else path / "config.json")


def check_other(student: StudentSettings, config: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
    """Compare a student's config with that of the model that the step gets.

    Returns:
        Each mistake with its setting, and the config of the student.
    """
    word = "config" if student.config else "model"
    if not is_there(Path(student.config or student.model or "")):
        return [], {}  # the plan says so
    try:
        own = config_of(student)
    except InputError as error:
        return [mistake(error.code or UNNAMED, str(error), setting=word)], {}
    words, said = config.get("vocab_size"), own.get("vocab_size")
    wrong = _misfit(own, config)
    if wrong is None and student.model and None not in (words, said) and words != said:
        text = f"its vocabulary has {said} tokens, the model's {words}; both are given the same tokens."
        wrong = mistake("vocabulary-mismatch", text)
    if wrong is not None:
        return [mistake(wrong.code, wrong.message, setting=word)], {}
    outputs = {name: config[name] for name in _OUTPUTS if name in config}
    return [], {**own, **outputs} | ({} if (words or said) is None else {"vocab_size": words or said})


def _misfit(own: Mapping[str, Any], config: Mapping[str, Any]) -> Message | None:
    """Return why a model of the config `own` cannot learn from one of `config`, None where it can."""
    kind, teacher = find_family(own), find_family(config)
    if kind is None:
        known = ", ".join(FAMILIES)
        text = f"'{own.get('model_type')}' is no family that smelt knows; those are {known}."
        return mistake("unsupported-family", text)
    if teacher is not None and (kind.kind, kind.reads) != (teacher.kind, teacher.reads):
        text = f"a {kind.name} model is of another kind than the {teacher.name} model that it learns from."
        return mistake("different-kind", text)
    sizes = other_images(own, config)
    return None if sizes is None else mistake("image-size-mismatch", sizes)


def other_images(own: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Say where a model takes images of another size than the one that it is trained with."""
    ours, theirs = own.get("image_size"), config.get("image_size")
    if None in (ours, theirs) or ours == theirs:
        return None
    return f"it takes images of {ours} pixels, the model {theirs}; both are given the same images."


def make_other(student: StudentSettings, src: Artifact, teacher: Any, space: Path, ctx: Context) -> None:
    """Write the student into the empty folder `space`, with the tokenizer of `src`.

    Args:
        student: of a config (weights are drawn by the seed) or a checkpoint.
        src: what the step gets.
        teacher: whose outputs it has.
        space: becomes a model folder.
        ctx: task and seed; gets warnings.

    Raises:
        InputError: no such model can be made, or its tokenizer is another one.
    """
    from smelt.compress.train.losses.of_classes import problem_of
    from smelt.runtime.models.checkpoint import copy_tokenizer
    from smelt.runtime.models.import_model import import_model
    from smelt.runtime.models.making.new_model import make_model

    classifies = ctx.task in CLASSIFICATION
    labels = list(teacher.config.id2label.values()) if classifies else []
    problem = problem_of(teacher.config) if classifies else None
    sentences = getattr(teacher, "sentence_rules", None)
    if student.config is not None:
        words = read_json(src.path / "config.json").get("vocab_size")
        notes = make_model(
            config_of(student) | ({} if words is None else {"vocab_size": words}), src.path, space,
            task=ctx.task, seed=ctx.seed, labels=labels, problem=problem, sentences=sentences,
        )  # fmt: skip
        copy_tokenizer(src.path, space)  # what lies beside it too: shortlist, words that stayed
        ctx.warnings.extend(note.prefixed("distill: student: ") for note in notes)
        return
    source = Path(student.model or "")
    if ctx.task != IMAGES:
        require_same_words(source, src.path, "student")
    notes = import_model(source, space, labels or None, ctx.seed, problem, sentences)
    copy_tokenizer(src.path, space)
    ctx.warnings.extend(note.prefixed("distill: student: ") for note in notes)


def require_same_words(own: Path, other: Path, whose: str) -> None:
    """Require that two folders' tokenizers know the same tokens by the same numbers.

    A teacher may know more, where the words of `other` were trimmed: those that stayed it must call by the
    numbers that they had before (see `smelt.compress.vocabulary.kept`).

    whose: what the model in `own` is, for the message; `other` is what the step gets.

    Raises:
        InputError: they do not.
    """
    from smelt.runtime.models.checkpoint import load_tokenizer

    ours, theirs = load_tokenizer(own).get_vocab(), load_tokenizer(other).get_vocab()
    kept = read_kept(other)
    if whose == "teacher" and kept is not None and read_kept(own) != kept:
        before = {word: kept.ids[at] for word, at in theirs.items() if at < len(kept.ids)}
        if all(ours.get(word) == at for word, at in before.items()):
            return
    strange = [word for word in ours if theirs.get(word) != ours[word]]
    if strange or len(ours) != len(theirs):
        word = strange[0] if strange else next(word for word in theirs if word not in ours)
        raise InputError(
            f"distill: the tokenizer of the {whose} {own} is another one than the model's: '{word}' is"
            f" {ours.get(word)} there and {theirs.get(word)} here. Both are given the same tokens.",
            code="tokenizer-mismatch",
        )
