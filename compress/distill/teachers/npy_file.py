"""Arrays in .npy files, written row by row in any order and read without loading them into memory.

Written with `write` calls (a full disk raises OSError, where a page of a mapped file would end the process)
and memory-mapped for reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray


class NpyFile:
    """A .npy file of shape `shape`, whose rows can be written in any order."""

    def __init__(self, path: Path, dtype: str, shape: Sequence[int]) -> None:
        self._stream: BinaryIO = path.open("wb")
        self.dtype = np.dtype(dtype)
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": tuple(shape),
        }
        np.lib.format.write_array_header_1_0(self._stream, header)
        self._start = self._stream.tell()
        self._row_bytes = self.dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))

    def write(self, at: int, rows: NDArray[Any]) -> None:
        """Write `rows`, [n, ...], starting at row `at`."""
        self._stream.seek(self._start + at * self._row_bytes)
        self._stream.write(np.ascontiguousarray(rows, dtype=self.dtype).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def open_mapped(path: Path) -> NDArray[Any]:
    """Return the array in `path`, memory-mapped; nothing is unpickled."""
    found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return found
