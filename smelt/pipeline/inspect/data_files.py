"""Assign data files to splits and infer their columns, for `smelt init`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.data.conll_rows import CONLL_SUFFIXES
from smelt.data.dataset_rows import ARROW_SUFFIXES, arrow_files, folder_splits
from smelt.data.images import ARCHIVE_SUFFIX
from smelt.data.json_rows import data_suffix
from smelt.data.media_rows import metadata_file, read_media_rows
from smelt.data.prompt_rows import row_layout
from smelt.data.read_rows import read_file_rows
from smelt.data.splits import Columns, column_options, columns_hint
from smelt.data.tasks import Task, task_traits, tasks_with
from smelt.tasks.read_split import is_plain_text
from smelt.tasks.registry import task_spec
from smelt.tasks.spec import TaskSpec

# Fraction of a single file for each split that is taken from it.
HELD_OUT_FRACTION = 0.1
_DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", *CONLL_SUFFIXES, *ARROW_SUFFIXES, ".txt")
# Fraction of a single file of arrays for the test split; the rest is for calibration.
ARRAY_TEST_FRACTION = 0.8
# Usual names of splits; the first one in a file's name decides.
_SPLIT_WORDS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "calibration": ("calibration", "calib", "unlabeled", "unlabeled"),
    "test": ("test",),
}


@dataclass(frozen=True)
class DataInfo:
    """Files by split, and columns that do not have smelt's default names.

    fractions: fractions of train for splits without a file. notes: notes for the user on what was inferred.
    """

    splits: Mapping[str, Path]
    columns: Mapping[str, str] = field(default_factory=dict)
    fractions: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def inspect_data(
    paths: Sequence[Path], task: Task, columns: Mapping[str, str] | None = None, trains: bool = True
) -> DataInfo:
    """Return the splits and columns of the files and folders in `paths`.

    Args:
        paths: files or folders; a single file without the name of a split is divided.
        task: task of the samples.
        columns: column names from the user by role; the others are inferred.
        trains: whether the model can be trained; if not, most samples of a single file are for test.

    Raises:
        InputError: no such file, no data in a folder, two files for one split, or a required column is
        missing.
    """
    splits = _splits_of_folder(paths[0], task) if len(paths) == 1 else None
    if splits is None:
        splits = _assign_splits(*_data_files(paths, task), task)
    first_path = next(
        (path for name, path in splits.items() if name != "calibration"), next(iter(splits.values()))
    )
    renamed_columns = _renamed_columns(first_path, task, columns or {})  # calibration samples may lack labels
    shares, messages = {}, []
    if "test" not in splits and "train" in splits:
        shares = {name: HELD_OUT_FRACTION for name in ("test", "validation") if name not in splits}
        if not trains:
            shares = {"test": ARRAY_TEST_FRACTION}
            messages.append("no file for test, so most samples are used for it; stages use the others")
        else:
            split_names = " and ".join(shares)
            messages.append(f"no file for {split_names}, so a tenth of train is used for each")
    elif "test" not in splits:
        if "validation" not in splits:
            raise InputError(
                f"--data: no file for test among {', '.join(p.name for p in splits.values())}. Add one.",
                code="missing-data",
            )
        splits["test"] = splits["validation"]
        messages.append("no file for test, so validation is scored; separate test samples are better")
    return DataInfo(splits, renamed_columns, shares, tuple(messages))


def _splits_of_folder(folder: Path, task: Task) -> dict[str, Path] | None:
    """Return the splits of a folder of a data set of texts; None if it is none, or has a file for each split.

    A split of `save_to_disk` is a folder; one of several Parquet or Arrow files is the folder of all.
    """
    names = folder_splits(folder) if task_traits(task).modality == "text" else None
    files = arrow_files(folder) if names is not None else []
    if names is None or (files and len(files) in (1, len(names))):
        return None
    if files:
        return {name: folder for name in names if name in _SPLIT_WORDS} or {"train": folder}
    return {split: folder / name for name in names if (split := _split_in_name(name))} or {"train": folder}


def _data_files(paths: Sequence[Path], task: Task) -> tuple[list[Path], set[Path]]:
    """Return the data files, and subfolders of the given folders, which may have the names of splits."""
    files: list[Path] = []
    subfolders: set[Path] = set()
    for path in paths:
        if task_traits(task).reads_images and path.is_dir():
            files += _image_splits_in_folder(path, task)
        elif path.is_dir() and task_traits(task).modality == "arrays" and (folders := _call_folders(path)):
            files += folders
        elif path.is_dir():
            folder_files = _files_in_folder(path, task)
            files += folder_files
            subfolders |= {file.parent for file in folder_files} - {path}
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"--data {path}: no such file or folder.", code="missing-file", file=str(path))
    if task_traits(task).modality == "arrays":
        _require_arrays(files)
    return files, subfolders


def _assign_splits(files: Sequence[Path], split_folders: Set[Path], task: Task) -> dict[str, Path]:
    """Return the file of each split."""
    splits: dict[str, Path] = {}
    for path in files:
        name = _split_of_path(path, task) or (
            _split_in_name(path.parent.name) if path.parent in split_folders else None
        )
        if len(files) == 1 and (name is None or task_traits(task).modality == "arrays"):
            name = "train"  # a graph is not trained, so one file is divided for calibration and test
        if (
            name is None
            and task_traits(task).modality == "arrays"
            and "test" not in map(_split_of_path, files, repeat(task))
        ):
            name = "test"
        if name is None:
            raise InputError(
                f"{path}: the file name contains no split. Add train, validation or test to the name.",
                code="unclear-split",
                file=str(path),
            )
        if name in splits:
            raise InputError(
                f"{path}: second file for {name}, after {splits[name]}. Pass one file per split with --data.",
                code="duplicate-split",
                file=str(path),
            )
        splits[name] = path
    return splits


def _require_arrays(files: Sequence[Path]) -> None:
    archives = (path for path in files if not path.is_dir())
    invalid_path = next((path for path in archives if data_suffix(path) != ARCHIVE_SUFFIX), None)
    if invalid_path is not None:
        raise InputError(
            f"--data {invalid_path}: expected an {ARCHIVE_SUFFIX} file with the graph's inputs. Write it with"
            " numpy.savez(FILE, **arrays), one array per input. For a graph with text input set --task.",
            code="wrong-format",
            file=str(invalid_path),
        )


def _files_in_folder(folder: Path, task: Task) -> list[Path]:
    """Return the files of a folder that are named after a split, or its only data file.

    Without any, the files in its subfolder `data`, or in subfolders named after splits.
    """
    data = [path for path in sorted(folder.iterdir()) if path.is_file() and _is_readable_for(path, task)]
    if not data:
        data = [
            path
            for subfolder in sorted(folder.iterdir())
            if subfolder.is_dir() and (subfolder.name == "data" or _split_in_name(subfolder.name))
            for path in sorted(subfolder.iterdir())
            if path.is_file() and _is_readable_for(path, task)
        ]
    split_files = [
        path
        for path in data
        if _split_of_path(path, task) or (path.parent != folder and _split_in_name(path.parent.name))
    ]
    if not split_files and len(data) != 1:
        if data:
            remedy = "Rename the files, or pass each with --data."
        elif task_traits(task).modality == "arrays":
            remedy = f"Write files of arrays ({ARCHIVE_SUFFIX}), or pass them with --data."
        else:
            remedy = f"Write files of rows such as {task_spec(task).row_example}, or pass them with --data."
        raise InputError(
            f"{folder}: no data file named train, validation or test. {remedy}",
            code="missing-data",
            file=str(folder),
        )
    return split_files or data


def _call_folders(folder: Path) -> list[Path]:
    """Return the folders in which each `.npz` file is a sample: those named after splits, or the folder."""
    splits = [path for path in sorted(folder.iterdir()) if path.is_dir() and _split_in_name(path.name)]
    arrays = {path: [*path.glob(f"*{ARCHIVE_SUFFIX}")] for path in (folder, *splits)}
    if any(len(arrays[path]) > 1 for path in splits):
        return [path for path in splits if arrays[path]]
    is_one_split = len(arrays[folder]) > 1 and not any(_split_in_name(p.name) for p in arrays[folder])
    return [folder] if is_one_split else []


def _image_splits_in_folder(folder: Path, task: Task) -> list[Path]:
    """Return the entries of a folder named after a split: tables, archives, folders of classes.

    Without any, the folder itself is one with a subfolder per class.
    """
    entries = [
        path
        for path in sorted(folder.iterdir())
        if _split_of_path(path, task) and (path.is_dir() or _is_readable_for(path, task))
    ]
    with_file = {_split_of_path(path, task) for path in entries if path.is_file()}
    # a folder next to a file for the same split has the images of that file
    entries = [path for path in entries if path.is_file() or _split_of_path(path, task) not in with_file]
    return entries or [folder]


def parse_columns(items: Sequence[str]) -> Columns:
    """Return the columns set by `--column ROLE=NAME`.

    Raises:
        InputError: unknown role, or no name.
    """
    values = {}
    for item in items:
        role, sign, name = item.partition("=")
        if not sign or not name or role not in Columns.model_fields:
            role_names = ", ".join(Columns.model_fields)
            hint = did_you_mean(role, Columns.model_fields)
            raise InputError(
                f"--column {item}: expected ROLE=NAME, where ROLE is one of {role_names}.{hint}",
                code="wrong-value",
                setting="--column",
            )
        values[role] = name
    return Columns(**values)


def _is_readable_for(path: Path, task: Task) -> bool:
    kind = data_suffix(path)
    if task_traits(task).modality == "arrays":
        return kind == ARCHIVE_SUFFIX
    if task_traits(task).reads_images and kind == ARCHIVE_SUFFIX:
        return True
    if kind == ".txt" and task_traits(task).samples != "running-text":
        return is_plain_text(path.name, task) and _split_in_name(path.name) == "calibration"
    return kind in _DATA_SUFFIXES


def _split_of_path(path: Path, task: Task | None = None) -> str | None:
    is_data_file = data_suffix(path) in (
        *_DATA_SUFFIXES,
        *(
            (ARCHIVE_SUFFIX,)
            if task in (*tasks_with(reads_images=True), *tasks_with(modality="arrays"))
            else ()
        ),
    )
    folder_tasks = (*tasks_with(reads_images=True), *tasks_with(modality="arrays"))
    if not is_data_file and not (task in folder_tasks and path.is_dir()):
        return None
    return _split_in_name(path.name)


def _split_in_name(name: str) -> str | None:
    """Return the split whose name is contained in `name`; None if there is none."""
    name = name.lower()
    # whole words first: `intervals_test` is test, not validation
    name_words = re.split("[^a-z]+", name)
    matches = [
        (keyword not in name_words, name.find(keyword), split)
        for split, words in _SPLIT_WORDS.items()
        for keyword in words
        if keyword in name
    ]
    return min(matches)[2] if matches else None


def guess_column(row: Mapping[str, Any], role: str, taken: Set[str] = frozenset()) -> str | None:
    """Return the column of `row` that probably has the role `role`; None if there is none."""
    usual_names = Columns.model_fields[role].examples or ()
    return next((str(name) for name in usual_names if name in row and name not in taken), None)


def _renamed_columns(path: Path, task: Task, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the columns, by role, that do not have smelt's default names in the first sample."""
    if task_traits(task).modality == "arrays" or (
        data_suffix(path) == ".txt" and task_traits(task).samples == "running-text"
    ):
        return {}
    if task_traits(task).reads_images and path.suffix == ARCHIVE_SUFFIX:
        return {}
    if task_traits(task).reads_images and path.is_dir():
        if metadata_file(path) is None:
            return {}
        row = next((row for _, row in read_media_rows(path, Columns().image)), {})
    else:
        row = next((row for _, row in read_file_rows(path)), {})
    if task_traits(task).samples == "prompts" and row_layout(row, Columns(**columns)) is not None:
        return dict(columns)
    return _guess_columns(path, row, task_spec(task), columns)


def _guess_columns(
    path: Path, row: Mapping[str, Any], spec: TaskSpec, given_columns: Mapping[str, str]
) -> dict[str, str]:
    default_columns, column_names = Columns(), dict(given_columns)
    missing: list[str] = []
    for role in spec.column_roles:
        several = {"target": default_columns.references, "response": default_columns.responses}.get(role)
        if role in column_names or getattr(default_columns, role) in row or several in row:
            continue
        name = guess_column(row, role, set(column_names.values()))
        if name is not None:
            column_names[role] = name
        elif role not in spec.optional_roles:
            missing.append(role)
    if missing:
        columns = ", ".join(map(str, row)) or "none"
        with column_options():
            hint = columns_hint(dict.fromkeys(missing, "NAME"))
        raise InputError(
            f"{path}: no column found for {' and '.join(missing)}. Columns: {columns}. {hint}",
            code="missing-column",
            file=str(path),
        )
    return column_names
