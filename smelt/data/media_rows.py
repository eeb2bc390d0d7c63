"""Rows that name files of images or audio, whose paths are relative to the file of rows.

A folder of `datasets` (its layouts `imagefolder` and `audiofolder`) has the rows in `metadata.csv`, `.jsonl`
or `.parquet`, with the column `file_name`.
"""

from __future__ import annotations

from pathlib import Path

from smelt.core.errors import InputError
from smelt.data.read_rows import RowIterator, read_file_rows

_METADATA_FILES = tuple(f"metadata{suffix}" for suffix in (".csv", ".jsonl", ".parquet"))
_FILE_NAME = "file_name"  # the column with the path in such a file


def metadata_file(folder: Path) -> Path | None:
    """Return the file of rows of a folder of images or audio, None without one."""
    return next((folder / name for name in _METADATA_FILES if (folder / name).is_file()), None)


def read_media_rows(path: Path, column: str) -> RowIterator:
    """Yield the rows of a file, or of a folder with metadata, each with its position.

    Args:
        path: the file or folder.
        column: with the path of an image or of audio; it is made absolute.

    Raises:
        InputError: it cannot be read (`not-a-file`: a folder without metadata).
    """
    rows_file = metadata_file(path) if path.is_dir() else path
    if rows_file is None:
        raise InputError(
            f"{path}: this is a folder without {', '.join(_METADATA_FILES)}. Pass a file of rows, or write"
            f" one of these with a column '{_FILE_NAME}'.",
            code="not-a-file",
            file=str(path),
        )
    for location, row in read_file_rows(rows_file):
        values = {**row, column: row.get(_FILE_NAME)} if rows_file != path else row
        name = values.get(column)
        if isinstance(name, str) and name and "\0" not in name:
            yield location, {**values, column: str((rows_file.parent / Path(name).expanduser()).absolute())}
        else:
            yield location, values
