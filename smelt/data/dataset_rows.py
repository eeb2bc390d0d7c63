"""Read the rows of data sets as `datasets` stores them: Parquet and Arrow files, folders, and hub ids.

Folders are those of `save_to_disk`, and those with Parquet or Arrow files. Rows have the names of classes
that the features of the data set contain.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.core.hub import hub_cache_only, hub_unreachable_reason

_Row = tuple[str, Mapping[str, Any]]
ARROW_SUFFIXES = (".parquet", ".arrow")


class ClassIndices(list[int]):
    """Indices of classes in a column of lists, with the names of the classes, as `datasets` stores them."""

    def __init__(self, indices: Iterable[int], names: Sequence[str]) -> None:
        super().__init__(indices)
        self.names = names


def _class_lists(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the classes of each column with lists of them, from `Features.to_dict`."""
    names_by_column = {}
    for column, feature in features.items():
        inner = feature[0] if isinstance(feature, list) and feature else None
        inner = feature.get("feature") if isinstance(feature, Mapping) else inner
        if isinstance(inner, Mapping) and inner.get("_type") == "ClassLabel":
            names_by_column[column] = list(map(str, inner["names"]))
    return names_by_column


def _with_class_names(row: dict[str, Any], names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    named = {
        column: ClassIndices(row[column], class_names)
        for column, class_names in names.items()
        if isinstance(row.get(column), list)
    }
    return row | named


def read_arrow_table(path: Path) -> Iterator[_Row]:
    """Yield the rows of a Parquet file or an Arrow file (stream or file format), one record batch at a time.

    Raises:
        InputError: the file cannot be read, or several columns have the same name (`duplicate-column`).
    """
    number = 0
    try:
        with ExitStack() as stack:
            schema, batches = _open_table(path, stack)
            names = schema.names
            if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise InputError(
                    f"{path}: several columns are named '{repeated[0][:80]}'. Rename or remove all but one.",
                    code="duplicate-column",
                    file=str(path),
                )
            stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
            class_names = _class_lists(stored.get("info", {}).get("features") or {})
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", _with_class_names(row, class_names)
    except InputError:
        raise
    except Exception as error:  # pyarrow raises many types of errors
        raise InputError(
            f"{path}: not a readable {'Arrow' if path.suffix.lower() == '.arrow' else 'Parquet'} file:"
            f" {error}",
            code="damaged-file",
            file=str(path),
        ) from error


def _open_table(path: Path, stack: ExitStack) -> tuple[Any, Iterable[Any]]:
    """Return schema and record batches of a file, which `stack` closes."""
    import pyarrow as pa
    import pyarrow.parquet

    if path.suffix.lower() != ".arrow":
        parquet = stack.enter_context(pyarrow.parquet.ParquetFile(path))
        return parquet.schema_arrow, parquet.iter_batches()
    source = stack.enter_context(pa.memory_map(str(path)))
    try:  # `datasets` writes the stream format
        stream = stack.enter_context(pa.ipc.open_stream(source))
    except pa.ArrowInvalid:
        source.seek(0)
        file = stack.enter_context(pa.ipc.open_file(source))
        return file.schema, map(file.get_batch, range(file.num_record_batches))
    return stream.schema, stream


_DICT_FILE, _STATE_FILE = "dataset_dict.json", "state.json"
_SHARD = re.compile(r"(?P<split>[^/]+)-\d{5}-of-\d{5}")


def folder_splits(folder: Path) -> list[str] | None:
    """Return the splits of a folder of a data set, empty if it is one split; None if it is no such folder.

    Such folders are those of `save_to_disk` of a Dataset or DatasetDict, and those with Parquet or Arrow
    files, of one split, or named after splits as hub data sets (`train-00000-of-00002.parquet`,
    `test.parquet`).

    Raises:
        InputError: its list of splits cannot be read.
    """
    if not folder.is_dir():
        return None
    if (listing := folder / _DICT_FILE).is_file():
        try:
            return [str(name) for name in json.loads(listing.read_text(encoding="utf-8"))["splits"]]
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged_folder(folder, listing, error) from error
    if (folder / _STATE_FILE).is_file():
        return []
    names = [path.stem for path in arrow_files(folder)]
    if not names:
        return None
    splits = [match["split"] if (match := _SHARD.fullmatch(name)) else name for name in names]
    return list(dict.fromkeys(splits)) if _SPLIT_NAMES.intersection(splits) else []


_SPLIT_NAMES = {"train", "validation", "test"}


def _damaged_folder(folder: Path, file: Path, error: Exception) -> InputError:
    return InputError(
        f"{file}: {folder} is not a readable data set of save_to_disk: {error!r}. Save it again.",
        code="damaged-file",
        file=str(file),
    )


def arrow_files(folder: Path) -> list[Path]:
    """Return the Parquet and Arrow files of a folder, by name; none of one that `save_to_disk` wrote."""
    if (folder / _STATE_FILE).is_file():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in ARROW_SUFFIXES)


def read_folder_rows(folder: Path, split: str) -> Iterator[_Row]:
    """Yield the rows of a split of a folder of a data set.

    Raises:
        InputError: it is no such folder, or lacks the split.
    """
    splits = folder_splits(folder)
    if splits is None:
        raise InputError(
            f"{folder}: this is a folder without Parquet or Arrow files or a data set of save_to_disk.",
            code="not-a-file",
            file=str(folder),
        )
    if splits and split not in splits:
        raise InputError(
            f"{folder}: this data set has the splits {', '.join(splits)}, not '{split}'."
            f"{did_you_mean(split, splits)} Give the file, or the folder, of another split.",
            code="missing-split",
            file=str(folder),
        )
    if (folder / _DICT_FILE).is_file():
        return _read_saved(folder / split)
    if (folder / _STATE_FILE).is_file():
        return _read_saved(folder)
    files = [
        path
        for path in arrow_files(folder)
        if not splits or split in (path.stem, (_SHARD.fullmatch(path.stem) or {"split": None})["split"])
    ]
    return itertools.chain.from_iterable(map(read_arrow_table, files))


def _read_saved(folder: Path) -> Iterator[_Row]:
    import datasets

    try:
        dataset: Any = datasets.load_from_disk(str(folder))
        class_names = _class_lists(dataset.features.to_dict())
        for number, row in enumerate(dataset, start=1):
            yield f"{folder} row {number}", _with_class_names(row, class_names)
    except InputError:
        raise
    except Exception as error:  # datasets and pyarrow raise many types of errors
        raise _damaged_folder(folder, folder / _STATE_FILE, error) from error


def read_hub_rows(origin: str, name: str, streaming: bool = False) -> Iterator[_Row]:
    """Yield the rows of a hub data set; `owner/name:config@split` selects configuration and split.

    name: the default split. streaming: read the rows one by one, without a download of the data set.

    Raises:
        InputError: it cannot be loaded.
    """
    import datasets

    repository, _, split = origin.partition("@")
    repository, _, config = repository.partition(":")
    hub_failure = hub_unreachable_reason()
    try:
        with hub_cache_only(hub_failure):
            dataset: Any = datasets.load_dataset(
                repository, config or None, split=split or name, streaming=streaming
            )
    except Exception as error:  # the hub client raises many types of errors
        reason = (
            f"nor cached on this machine; {hub_failure}."
            if hub_failure
            else f"nor a usable data set of the hub: {error}"
        )
        raise InputError(f"{origin}: neither a local file, {reason}", code="missing-data") from error
    features = getattr(dataset, "features", None)
    class_names = _class_lists(features.to_dict()) if features is not None else {}
    for number, row in enumerate(dataset, start=1):
        yield f"{origin} row {number}", _with_class_names(row, class_names)
