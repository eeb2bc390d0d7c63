"""What a trimmed artifact tells of the vocabulary that it came from: `vocabulary.json`.

A teacher that was not trimmed, or otherwise, finds there which of its words are the student's. The file
travels with the tokenizer's files from stage to stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import read_json, write_json

FILE = "vocabulary.json"


@dataclass(frozen=True)
class Kept:
    """words: of the vocabulary before any was trimmed. ids: of the ones that stayed, rising."""

    words: int
    ids: list[int]


def read_kept(folder: Path) -> Kept | None:
    """Return what stayed of the vocabulary of the model in `folder`; None where nothing was trimmed.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    data: Any = read_json(path)
    words, ids = data.get("words"), data.get("kept")
    whole = isinstance(words, int) and isinstance(ids, list) and all(isinstance(at, int) for at in ids)
    if not whole or not ids or sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < words:
        raise InputError(
            f"{path}: not a list of words that this version of smelt reads; run the stage again.",
            code="damaged-file",
            file=str(path),
        )
    return Kept(words, ids)


def write_kept(kept: Kept, folder: Path) -> None:
    """Store `kept` in `folder`."""
    write_json(folder / FILE, {"schema": 1, "words": kept.words, "kept": kept.ids})


def trimmed_further(before: Kept | None, ids: list[int], words: int) -> Kept:
    """Return what stays where of a vocabulary of `words`, which may have been trimmed, `ids` stay."""
    return Kept(words, ids) if before is None else Kept(before.words, [before.ids[at] for at in ids])


def same_words(student: Path, teacher: Path, student_words: int, teacher_words: int) -> list[int] | None:
    """Return for each word of the student which word of the teacher it is; None where all are the same.

    Args:
        student: the folder of a model.
        teacher: the folder of another, from which the student was made by trimming, or both from a third.
        student_words: of how many words the student knows.
        teacher_words: the same.

    Raises:
        InputError: the vocabularies have nothing to do with each other, or the teacher lacks words.
    """
    mine, theirs = read_kept(student), read_kept(teacher)
    if mine == theirs:
        return None
    whole = mine.words if mine is not None else student_words
    root = theirs.words if theirs is not None else teacher_words
    of_teacher = theirs.ids if theirs is not None else list(range(root))
    places = {word: at for at, word in enumerate(of_teacher)}
    wanted = mine.ids if mine is not None else list(range(student_words))
    if whole != root or not places.keys() >= set(wanted):
        lacking = len(set(wanted) - places.keys())
        raise InputError(
            f"distill: the student knows {student_words} words and the teacher {teacher_words}, of which"
            f" {lacking} of the student's are none. A teacher knows all words of its student: name one from"
            " before 'trim-vocabulary', or with the same vocabulary.",
            code="vocabulary-mismatch",
            setting="teacher",
        )
    return [places[word] for word in wanted]
