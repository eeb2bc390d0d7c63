"""What a teacher said of each row, in files: written once, in any order, and read row by row.

Of words the k largest logits of each position, relative to the largest, as float16, with the numbers of those
words, and in float32 the logarithm of the sum over all others at the temperature T; where k is the whole
vocabulary, all logits in order. Of classes and vectors everything, in float32.

Shapes: N = positions of all rows (a classifier's rows have one, a pair of texts that are read one by one has
two), W = kept values of each, B = rows of a batch, T = positions of its longest row.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smelt.compress.distill.losses.buckets import Buckets, buckets_of
from smelt.compress.distill.teachers.arrays import ArrayFile, mapped
from smelt.compress.train.data import Row
from smelt.core.errors import RunError
from smelt.core.rows.images import content_hash

_VALUES, _IDS, _REST = "values.npy", "ids.npy", "rest.npy"
_SHORT = 2**16  # words that fit 16 bits


def starts_of(rows: Sequence[Row]) -> NDArray[np.int64]:
    """Return each row's first position, and behind the last row how many there are, int64 [rows + 1]."""
    return np.cumsum([0, *map(_positions, rows)], dtype=np.int64)


def _positions(row: Row) -> int:
    if isinstance(row.target, list):
        return len(row.target)
    if row.target is None:
        return len(row.source) - 1
    return 1 if row.second is None else 2


def fingerprint_of(rows: Sequence[Row]) -> str:
    """Return a hash of all that a teacher reads of `rows`, which are token ids or images.

    No label of a class or a score is in it.
    """
    found = hashlib.sha256()
    for row in rows:
        target = row.target if isinstance(row.target, list) else []
        parts = (row.source, row.types or [], target, row.second or [])
        ids = [
            len(parts[0]),
            len(parts[1]),
            len(parts[2]),
            len(parts[3]),
            *(i for part in parts for i in part),
        ]
        found.update(np.asarray(ids, dtype=np.int64).tobytes())
        if row.image is not None:  # its bytes, and what is made of them
            found.update(f"{content_hash(row.image.reference)} {row.image.processor!r}".encode())
    return found.hexdigest()


class Writer:
    """Puts what a teacher says of `train_on` into an empty folder.

    words: of the vocabulary, of which `top_k` are kept, at a temperature; None: classes or vectors.
    """

    def __init__(
        self, folder: Path, rows: Sequence[Row], words: int | None, top: int, temperature: float
    ) -> None:
        self.folder, self.starts = folder, starts_of(rows)
        self.words, self.top, self.temperature = words, top, temperature
        self.files: dict[str, ArrayFile] = {}
        self._stack = ExitStack()

    def put(self, places: Sequence[int], said: Tensor) -> None:
        """Write what was said of the rows at `places`: float [B, T, V], [B, C], [B, D]; [2 B, D] of pairs."""
        if self.words is None:
            parts = {_VALUES: said.cpu().numpy()}
            self._require_files(parts, {_VALUES: "<f4"})
            pairs = len(said) == 2 * len(places)
            for at, place in enumerate(places):
                rows = [at, len(places) + at] if pairs else [at]
                self.files[_VALUES].put(int(self.starts[place]), parts[_VALUES][rows])
            return
        parts, kinds = self._of_words(said)
        self._require_files(parts, kinds)
        for at, place in enumerate(places):
            start, end = (int(x) for x in self.starts[place : place + 2])
            for name, values in parts.items():
                self.files[name].put(start, values[at, : end - start])

    def _of_words(self, said: Tensor) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
        assert self.words is not None
        if self.top >= self.words:
            values = said - said.amax(dim=-1, keepdim=True)
            return {_VALUES: values.half().cpu().numpy()}, {_VALUES: "<f2"}
        found = buckets_of(said, self.top, self.temperature)
        values, rest = found.logits[..., :-1] * self.temperature, found.logits[..., -1:]
        parts = {
            _VALUES: values.half().cpu().numpy(), _IDS: found.ids.cpu().numpy(), _REST: rest.cpu().numpy()
        }  # fmt: skip
        return parts, {_VALUES: "<f2", _IDS: "<u2" if self.words <= _SHORT else "<i4", _REST: "<f4"}

    def _require_files(self, parts: dict[str, NDArray[Any]], kinds: dict[str, str]) -> None:
        """Make the files, of their full size, when the first batch says how wide they are.

        Raises:
            RunError: they do not fit on the disk.
        """
        if self.files:
            return
        count = int(self.starts[-1])
        widths = {name: values.shape[-1] for name, values in parts.items()}
        needed = sum(count * width * np.dtype(kinds[name]).itemsize for name, width in widths.items())
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            less = "a smaller top_k or " if self.words is not None else ""
            raise RunError(
                f"distill: cache_logits: what the teacher says of {len(self.starts) - 1:,} rows takes"
                f" {needed / 1e6:,.1f} MB in the store, and {free / 1e6:,.1f} MB are free there. Take"
                f" {less}another --store, or leave cache_logits out, which runs the teacher in each epoch.",
                code="disk-full",
                setting="cache_logits",
            )
        for name, width in widths.items():
            file = ArrayFile(self.folder / name, kinds[name], (count, width))
            self.files[name] = self._stack.enter_context(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Said:
    """What was kept in `folder` of `train_on`; it stays on the disk until it is asked for."""

    def __init__(self, folder: Path, rows: Sequence[Row], temperature: float) -> None:
        self.starts, self.temperature = starts_of(rows), temperature
        self.values = mapped(folder / _VALUES)
        self.ids = mapped(folder / _IDS) if (folder / _IDS).is_file() else None
        self.rest = mapped(folder / _REST) if (folder / _REST).is_file() else None

    @property
    def size_bytes(self) -> int:
        """Of the arrays."""
        return sum(array.nbytes for array in (self.values, self.ids, self.rest) if array is not None)

    def of_texts(self, places: Sequence[int]) -> Tensor:
        """Return float32 [B, C] of classes or [B, D], [2 B, D] of vectors: first all first texts'."""
        starts = self.starts[list(places)]
        counts = self.starts[[place + 1 for place in places]] - starts
        every = [*starts, *(starts + 1)] if counts.min() == 2 else list(starts)
        return torch.from_numpy(self.values[every])

    def of_words(self, places: Sequence[int], size: int) -> Tensor | Buckets:
        """Return what was said at the positions of each row, with zeros up to `size`: see `Buckets`.

        Where all words were kept, their logits, float32 [B, T, V].
        """
        values = self._padded(self.values, places, size).float()
        if self.ids is None or self.rest is None:
            return values
        rest = self._padded(self.rest, places, size)
        ids = self._padded(self.ids, places, size)
        return Buckets(torch.cat([values / self.temperature, rest], dim=-1), ids)

    def _padded(self, array: NDArray[Any], places: Sequence[int], size: int) -> Tensor:
        kind = array.dtype if array.dtype.kind == "f" else np.dtype(np.int64)
        found = np.zeros((len(places), size, array.shape[1]), dtype=kind)
        for row, place in zip(found, places, strict=True):
            start, end = self.starts[place], self.starts[place + 1]
            row[: end - start] = array[start:end]
        return torch.from_numpy(found)
