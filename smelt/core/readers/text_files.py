"""Read UTF-8 text files, with or without gzip, whole or as a stream."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smelt.core.errors import InputError


def data_suffix(path: Path) -> str:
    """Return the suffix of the data format: the one before .gz, if there is one."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes[-1:] == [".gz"] and len(suffixes) > 1:
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def read_text_file(path: Path) -> str:
    """Return the text of a UTF-8 file, decompressed if its name ends in .gz.

    Raises:
        InputError: it cannot be read.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
        return raw.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path}: cannot be read: {error}", code="unreadable-file", file=str(path)
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text at byte {error.start}. Convert the file to UTF-8.",
            code="not-utf8",
            file=str(path),
        ) from error


@contextmanager
def open_text(path: Path, newline: str) -> Iterator[io.TextIOBase]:
    r"""Open a UTF-8 file as a text stream, decompressed if its name ends in .gz.

    newline: as for `open`; line ends are never translated with "" and "\n".

    Raises:
        InputError: it cannot be read; also raised while reading inside the context.
    """
    packed = path.suffix.lower() == ".gz"
    try:
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig", newline=newline) as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path}: cannot be read: {error}", code="unreadable-file", file=str(path)
        ) from error
    except UnicodeDecodeError:
        read_text_file(path)  # raises, and names the byte
        raise
