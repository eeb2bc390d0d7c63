"""Which of the files that a user names is which split, and what their columns are, for `smelt init`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

from smelt.core.data import CUSTOM, IMAGES, SIMILARITY, TEXT_TO_TEXT, Columns, Task
from smelt.core.errors import InputError, nearest
from smelt.core.rows.images import ARCHIVE
from smelt.core.rows.reading import read_file
from smelt.core.rows.text_files import file_kind

# Of the rows of one file, for each split that is taken out of it.
SHARE = 0.1
_KINDS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".txt")
# Of the rows of one file of arrays, for the test split: what is left is calibrated on.
SHARE_OF_ARRAYS = 0.8
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
    "image": ("image", "file_name", "filename", "image_path", "path", "file", "img"),
    "label": ("label", "labels", "category", "class", "intent", "sentiment", "stars", "score", "similarity"),
}


@dataclass(frozen=True)
class DataLook:
    """The files of the splits, by split, and the columns that are not called as smelt calls them.

    shares: of the rows of train, for the splits that have no file. notes: what was guessed or left out, for
    the user.
    """

    splits: Mapping[str, Path]
    columns: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def look_at_data(
    given: Sequence[Path], task: Task, columns: Mapping[str, str] | None = None, trains: bool = True
) -> DataLook:
    """Find the splits among `given`: files, or folders with files.

    Args:
        given: one file that is called after no split is divided.
        task: what the rows are for.
        columns: names that the user gives, by role; the others are guessed.
        trains: whether the model can be trained; a graph cannot, so most rows of one file are for test.

    Raises:
        InputError: no such file, no data in a folder, two files for one split, or a column that is needed and
            not found.
    """
    files, within = _files(given, task)
    splits = _splits(files, within, task)
    named = _columns(next(iter(splits.values())), task, columns or {})
    shares, notes = {}, []
    if "test" not in splits and "train" in splits:
        shares = {name: SHARE for name in ("test", "validation") if name not in splits}
        if not trains:
            shares = {"test": SHARE_OF_ARRAYS}
            notes.append("there is no file for test, so most rows are kept for it; stages see the others")
        else:
            parts = " and ".join(shares)
            notes.append(f"there is no file for {parts}, so a tenth of the rows of train is kept for each")
    elif "test" not in splits:
        if "validation" not in splits:
            raise InputError(
                f"there is no file for test among {', '.join(p.name for p in files)} (--data).",
                code="missing-data",
            )
        splits["test"] = splits["validation"]
        notes.append(
            "there is no test file, so validation is scored; better keep rows that nothing else sees"
        )
    return DataLook(splits, named, shares, tuple(notes))


def _files(given: Sequence[Path], task: Task) -> tuple[list[Path], set[Path]]:
    """Return the files with rows, and folders of a given folder, which may be called after splits."""
    files: list[Path] = []
    within: set[Path] = set()
    for path in given:
        if task == IMAGES and path.is_dir():
            files += _images_inside(path)
        elif path.is_dir():
            found = _inside(path, task)
            files += found
            within |= {file.parent for file in found} - {path}
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path}: no such file or folder (--data).", code="missing-file", file=str(path))
    if task == CUSTOM:
        _require_arrays(files)
    return files, within


def _splits(files: Sequence[Path], within: Set[Path], task: Task) -> dict[str, Path]:
    """Return the file of each split."""
    splits: dict[str, Path] = {}
    for path in files:
        name = _split_of(path, task) or (_word_of(path.parent.name) if path.parent in within else None)
        if len(files) == 1 and (name is None or task == CUSTOM):
            name = "train"  # a graph learns nothing, so one file is enough for all that is done with it
        if name is None and task == CUSTOM and "test" not in map(_split_of, files, repeat(task)):
            name = "test"
        if name is None:
            raise InputError(
                f"{path}: is it train, validation or test? Put the word into the file's name.",
                code="unclear-split",
                file=str(path),
            )
        if name in splits:
            raise InputError(
                f"{path}: {splits[name]} is for {name} too. Name the right files one by one.",
                code="duplicate-split",
                file=str(path),
            )
        splits[name] = path
    return splits


def _require_arrays(files: Sequence[Path]) -> None:
    wrong = next((path for path in files if file_kind(path) != ARCHIVE), None)
    if wrong is not None:
        raise InputError(
            f"{wrong}: expected an {ARCHIVE} file of the graph's inputs (--data). Write it with"
            " numpy.savez(FILE, **arrays), an array for each input. For a graph of texts give --task.",
            code="wrong-format",
            file=str(wrong),
        )


def _inside(folder: Path, task: Task) -> list[Path]:
    """Return the files of a folder that are called after a split, or its only file with data.

    Where there are none, those of the folder `data` in it, or of folders that are called after splits.
    """
    data = [path for path in sorted(folder.iterdir()) if path.is_file() and _fits(path, task)]
    if not data:
        data = [
            path
            for below in sorted(folder.iterdir())
            if below.is_dir() and (below.name == "data" or _word_of(below.name))
            for path in sorted(below.iterdir())
            if path.is_file() and _fits(path, task)
        ]
    named = [
        path
        for path in data
        if _split_of(path, task) or (path.parent != folder and _word_of(path.parent.name))
    ]
    if not named and len(data) != 1:
        raise InputError(
            f"{folder}: no file in this folder is called train, validation or test.",
            code="missing-data",
            file=str(folder),
        )
    return named or data


def _images_inside(folder: Path) -> list[Path]:
    """Return what in a folder is called after a split: files of rows, archives, folders of classes.

    A folder that is none of that is one of classes itself.
    """
    there = [
        path
        for path in sorted(folder.iterdir())
        if _split_of(path, task=IMAGES) and (path.is_dir() or _fits(path, IMAGES))
    ]
    return there or [folder]


def parse_columns(given: Sequence[str]) -> Columns:
    """Return the columns that `--column ROLE=NAME` names.

    Raises:
        InputError: no such role, or no name.
    """
    values = {}
    for item in given:
        role, sign, name = item.partition("=")
        if not sign or not name or role not in Columns.model_fields:
            known = ", ".join(Columns.model_fields)
            hint = nearest(role, Columns.model_fields)
            raise InputError(
                f"--column {item}: expected ROLE=NAME with a role of {known}.{hint}",
                code="wrong-value",
                setting="--column",
            )
        values[role] = name
    return Columns(**values)


def _fits(path: Path, task: Task) -> bool:
    kind = file_kind(path)
    if task == CUSTOM:
        return kind == ARCHIVE
    if task == IMAGES and kind == ARCHIVE:
        return True
    return kind in _KINDS and (kind != ".txt" or task == "language-modeling")


def _split_of(path: Path, task: Task | None = None) -> str | None:
    known = file_kind(path) in (*_KINDS, *((ARCHIVE,) if task in (IMAGES, CUSTOM) else ()))
    if not known and not (task == IMAGES and path.is_dir()):
        return None
    return _word_of(path.name)


def _word_of(name: str) -> str | None:
    """Return the split that a name holds a word of."""
    name = name.lower()
    # a whole word before a part of one: `intervals_test` is of test
    parts = re.split("[^a-z]+", name)
    found = [
        (word not in parts, name.find(word), split)
        for split, words in _SPLITS.items()
        for word in words
        if word in name
    ]
    return min(found)[2] if found else None


def guess_column(row: Mapping[str, Any], role: str, taken: Set[str] = frozenset()) -> str | None:
    """Return the column of `row` that probably is what smelt calls `role`; None where none looks like it."""
    return next((name for name in _NAMES[role] if name in row and name not in taken), None)


def _columns(path: Path, task: Task, given: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the columns that the first row does not have under smelt's own names."""
    if task == CUSTOM or (file_kind(path) == ".txt" and task == "language-modeling"):
        return {}
    if task == IMAGES and (path.is_dir() or path.suffix == ARCHIVE):
        return {}
    row = next((row for _, row in read_file(path)), {})
    if task == IMAGES:
        return _guessed(path, row, ("image", "label"), task, given)
    roles: tuple[str, ...] = ("source", "target") if task in TEXT_TO_TEXT else ("text",)
    roles += ("text_pair", "label") if task in ("text-classification", SIMILARITY) else ()
    return _guessed(path, row, roles, task, given)


def _guessed(
    path: Path, row: Mapping[str, Any], roles: Sequence[str], task: Task, given: Mapping[str, str]
) -> dict[str, str]:
    own, found = Columns(), dict(given)
    for role in roles:
        if role in found or getattr(own, role) in row or (role == "target" and own.references in row):
            continue
        name = guess_column(row, role, set(found.values()))
        if name is not None:
            found[role] = name
        elif role != "text_pair" and not (role == "label" and task == SIMILARITY):
            there = ", ".join(map(str, row)) or "none"
            raise InputError(
                f"{path}: no column looks like the {role}; there are: {there}."
                f" Name it with --column {role}=NAME.",
                code="missing-column",
                file=str(path),
            )
    return found
