"""`vocabulary.json` in a trimmed artifact: the token ids that were kept of the original vocabulary.

It maps a student's tokens to those of a teacher that was trimmed differently or not at all. The file is
copied from stage to stage with the tokenizer's files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json

VOCABULARY_FILE = "vocabulary.json"


@dataclass(frozen=True)
class KeptTokens:
    """original_size: of the vocabulary before any trimming. ids: of the kept tokens, rising."""

    original_size: int
    ids: list[int]


def read_kept_tokens(folder: Path) -> KeptTokens | None:
    """Return the kept tokens of the model in `folder`; None if it was not trimmed.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / VOCABULARY_FILE
    if not path.is_file():
        return None
    data: Any = read_json_object(path)
    words, ids = data.get("words"), data.get("kept")
    whole = isinstance(words, int) and isinstance(ids, list) and all(isinstance(at, int) for at in ids)
    if not whole or not ids or sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < words:
        raise InputError(
            f"{path}: this version of smelt cannot read this list of tokens. Run the stage"
            " trim-vocabulary again.",
            code="damaged-file",
            file=str(path),
        )
    return KeptTokens(words, ids)


def write_kept_tokens(kept: KeptTokens, folder: Path) -> None:
    """Store `kept` in `folder`."""
    write_json(folder / VOCABULARY_FILE, {"schema": 1, "words": kept.original_size, "kept": kept.ids})


def compose_kept_tokens(before: KeptTokens | None, ids: list[int], vocabulary_size: int) -> KeptTokens:
    """Return the kept tokens after keeping `ids` of `vocabulary_size` tokens, trimmed before or not."""
    return (
        KeptTokens(vocabulary_size, ids)
        if before is None
        else KeptTokens(before.original_size, [before.ids[at] for at in ids])
    )


def map_to_teacher_tokens(
    student: Path, teacher: Path, student_size: int, teacher_size: int
) -> list[int] | None:
    """Return the teacher's token id for each of the student's tokens; None if they are the same.

    Args:
        student: folder of a model.
        teacher: folder of another; the student was trimmed from it, or both from a third.
        student_size: size of the student's vocabulary.
        teacher_size: size of the teacher's vocabulary.

    Raises:
        InputError: the vocabularies are unrelated, or the teacher lacks tokens.
    """
    mine, theirs = read_kept_tokens(student), read_kept_tokens(teacher)
    if mine == theirs:
        return None
    whole = mine.original_size if mine is not None else student_size
    root = theirs.original_size if theirs is not None else teacher_size
    of_teacher = theirs.ids if theirs is not None else list(range(root))
    places = {word: at for at, word in enumerate(of_teacher)}
    wanted = mine.ids if mine is not None else list(range(student_size))
    if whole != root or not places.keys() >= set(wanted):
        lacking = len(set(wanted) - places.keys())
        raise InputError(
            f"distill: the teacher ({teacher_size} tokens) lacks {lacking} of the student's"
            f" {student_size} tokens. Use a teacher from a step before 'trim-vocabulary', or with"
            " the same vocabulary.",
            code="vocabulary-mismatch",
            setting="teacher",
        )
    return [places[word] for word in wanted]
