"""Which of the files that a user names is which split, and what their columns are, for `smelt init`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smelt.core.data import TEXT_TO_TEXT, Columns, Task
from smelt.core.errors import InputError
from smelt.core.rows import read_file
from smelt.core.text_files import file_kind

_KINDS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".txt")
# What people call the splits; the first word that a file's name holds decides.
_SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "calibration": ("calibration", "calib"),
    "test": ("test",),
}
# What people call the columns, by the word that smelt has for them; the first that is there is taken.
_NAMES = {
    "source": ("source", "src", "input", "document", "article", "dialogue", "text", "en"),
    "target": ("target", "tgt", "summary", "highlights", "abstract", "output", "de", "fr"),
    "text": ("text", "sentence", "sentence1", "premise", "question", "content", "review", "document"),
    "text_pair": ("text_b", "sentence2", "hypothesis", "answer"),
    "label": ("label", "labels", "category", "class", "intent", "sentiment", "stars", "score"),
}


@dataclass(frozen=True)
class DataLook:
    """The files of the splits, by split, and the columns that are not called as smelt calls them.

    notes: what was guessed or left out, for the user.
    """

    splits: Mapping[str, Path]
    columns: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def look_at_data(given: Sequence[Path], task: Task) -> DataLook:
    """Find the splits among `given`: files, or folders with files.

    Raises:
        InputError: no such file, no data in a folder, or two files for one split.
    """
    files: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = [p for p in sorted(path.iterdir()) if p.is_file() and _split_of(p) and _fits(p, task)]
            if not inside:
                raise InputError(f"{path}: no file in this folder is called train, validation or test.")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path}: no such file or folder (--data).")
    splits: dict[str, Path] = {}
    notes = []
    for path in files:
        name = _split_of(path) or ("test" if len(files) == 1 else None)
        if name is None:
            raise InputError(f"{path}: is it train, validation or test? Put the word into the file's name.")
        if name in splits:
            raise InputError(f"{path}: {splits[name]} is for {name} too. Name the right files one by one.")
        splits[name] = path
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits["validation"]
        notes.append(
            "there is no test file, so validation is scored; better keep rows that nothing else sees"
        )
    columns = _columns(next(iter(splits.values())), task)
    return DataLook(splits, columns, tuple(notes))


def _fits(path: Path, task: Task) -> bool:
    kind = file_kind(path)
    return kind in _KINDS and (kind != ".txt" or task == "language-modeling")


def _split_of(path: Path) -> str | None:
    if file_kind(path) not in _KINDS:
        return None
    name = path.name.lower()
    found = [(name.find(word), split) for split, words in _SPLITS.items() for word in words if word in name]
    return min(found)[1] if found else None


def guess_column(row: Mapping[str, Any], role: str, taken: Set[str] = frozenset()) -> str | None:
    """Return the column of `row` that probably is what smelt calls `role`; None where none looks like it."""
    return next((name for name in _NAMES[role] if name in row and name not in taken), None)


def _columns(path: Path, task: Task) -> dict[str, str]:
    """Return the names of the columns that the first row does not have under smelt's own names."""
    if file_kind(path) == ".txt":
        return {}
    row = next((row for _, row in itertools.islice(read_file(path), 1)), {})
    own = Columns()
    roles: tuple[str, ...] = ("source", "target") if task in TEXT_TO_TEXT else ("text",)
    roles += ("text_pair", "label") if task == "text-classification" else ()
    found: dict[str, str] = {}
    for role in roles:
        if getattr(own, role) in row or (role == "target" and own.references in row):
            continue
        name = guess_column(row, role, set(found.values()))
        if name is not None:
            found[role] = name
    return found
