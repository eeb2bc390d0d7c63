"""Files with a teacher's outputs for each sample: written once, in any order, and read per sample.

For tokens: the k largest logits of each position, relative to the largest, as float16, their token ids, and
in float32 the logarithm of the sum over all others at temperature T; if k is the size of the vocabulary, all
logits in order. For classes and embeddings: everything, in float32.

Shapes: N = positions of all samples (one for a classifier's sample, two for a pair of texts that are embedded
separately), W = cached values per position, B = samples of a batch, T = positions of its longest sample.
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

from smelt.compress.distill.losses.top_k import TopKLogits, top_k_logits
from smelt.compress.distill.teachers.npy_file import NpyFile, open_mapped
from smelt.compress.train.encoded_samples import EncodedSample
from smelt.core.errors import RunError
from smelt.core.readers.image_rows import image_hash

_VALUES_FILE, _IDS_FILE, _REST_FILE = "values.npy", "ids.npy", "rest.npy"
_MAX_UINT16_TOKENS = 2**16  # token ids that fit into 16 bits


def row_offsets(samples: Sequence[EncodedSample]) -> NDArray[np.int64]:
    """Return the first position of each sample, then the number of all positions, int64 [samples + 1]."""
    return np.cumsum([0, *map(_count_positions, samples)], dtype=np.int64)


def _count_positions(row: EncodedSample) -> int:
    if isinstance(row.target, list):
        return len(row.target)
    if row.target is None:
        return len(row.input_ids) - 1
    return 1 if row.second_ids is None else 2


def teacher_inputs_fingerprint(samples: Sequence[EncodedSample]) -> str:
    """Return a hash of the teacher's inputs in `samples`, token ids or images.

    Labels of classes and scores are not part of it.
    """
    found = hashlib.sha256()
    for row in samples:
        target = row.target if isinstance(row.target, list) else []
        parts = (row.input_ids, row.token_type_ids or [], target, row.second_ids or [])
        ids = [
            len(parts[0]),
            len(parts[1]),
            len(parts[2]),
            len(parts[3]),
            *(i for part in parts for i in part),
        ]
        found.update(np.asarray(ids, dtype=np.int64).tobytes())
        if row.image is not None:  # its bytes and its preprocessing
            found.update(f"{image_hash(row.image.reference)} {row.image.processor!r}".encode())
    return found.hexdigest()


class LogitCacheWriter:
    """Writes a teacher's outputs for samples into an empty folder.

    words: size of the vocabulary, of which the `top_k` largest logits are stored at a temperature; None for
    classes or embeddings.
    """

    def __init__(
        self, folder: Path, rows: Sequence[EncodedSample], words: int | None, top: int, temperature: float
    ) -> None:
        self.folder, self.starts = folder, row_offsets(rows)
        self.words, self.top, self.temperature = words, top, temperature
        self.files: dict[str, NpyFile] = {}
        self._stack = ExitStack()

    def write(self, places: Sequence[int], said: Tensor) -> None:
        """Write the outputs for the samples at `places`: float [B, T, V], [B, C], [B, D]; pairs [2 B, D]."""
        if self.words is None:
            parts = {_VALUES_FILE: said.cpu().numpy()}
            self._create_files(parts, {_VALUES_FILE: "<f4"})
            pairs = len(said) == 2 * len(places)
            for at, place in enumerate(places):
                rows = [at, len(places) + at] if pairs else [at]
                self.files[_VALUES_FILE].write(int(self.starts[place]), parts[_VALUES_FILE][rows])
            return
        parts, kinds = self._top_k_arrays(said)
        self._create_files(parts, kinds)
        for at, place in enumerate(places):
            start, end = (int(x) for x in self.starts[place : place + 2])
            for name, values in parts.items():
                self.files[name].write(start, values[at, : end - start])

    def _top_k_arrays(self, said: Tensor) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
        assert self.words is not None
        if self.top >= self.words:
            values = said - said.amax(dim=-1, keepdim=True)
            return {_VALUES_FILE: values.half().cpu().numpy()}, {_VALUES_FILE: "<f2"}
        found = top_k_logits(said, self.top, self.temperature)
        values, rest = found.logits[..., :-1] * self.temperature, found.logits[..., -1:]
        parts = {
            _VALUES_FILE: values.half().cpu().numpy(),
            _IDS_FILE: found.ids.cpu().numpy(),
            _REST_FILE: rest.cpu().numpy(),
        }
        return parts, {
            _VALUES_FILE: "<f2",
            _IDS_FILE: "<u2" if self.words <= _MAX_UINT16_TOKENS else "<i4",
            _REST_FILE: "<f4",
        }

    def _create_files(self, parts: dict[str, NDArray[Any]], kinds: dict[str, str]) -> None:
        """Create the files at their full size, when the first batch has defined their width.

        Raises:
            RunError: not enough space on the disk.
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
                f"distill: cache_logits: the teacher's outputs for {len(self.starts) - 1:,} samples"
                f" need {needed / 1e6:,.1f} MB in the store, but only {free / 1e6:,.1f} MB are"
                f" free. Use {less}another --store, or remove cache_logits; the teacher then"
                " runs in each epoch.",
                code="disk-full",
                setting="cache_logits",
            )
        for name, width in widths.items():
            file = NpyFile(self.folder / name, kinds[name], (count, width))
            self.files[name] = self._stack.enter_context(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class LogitCache:
    """Cached outputs in `folder`; memory-mapped, read from the disk on access."""

    def __init__(self, folder: Path, rows: Sequence[EncodedSample], temperature: float) -> None:
        self.starts, self.temperature = row_offsets(rows), temperature
        self.values = open_mapped(folder / _VALUES_FILE)
        self.ids = open_mapped(folder / _IDS_FILE) if (folder / _IDS_FILE).is_file() else None
        self.rest = open_mapped(folder / _REST_FILE) if (folder / _REST_FILE).is_file() else None

    @property
    def size_bytes(self) -> int:
        """The size of the arrays in bytes."""
        return sum(array.nbytes for array in (self.values, self.ids, self.rest) if array is not None)

    def read_outputs(self, places: Sequence[int]) -> Tensor:
        """Return float32 [B, C] of classes, or embeddings [B, D], or [2 B, D]: all first texts first."""
        starts = self.starts[list(places)]
        counts = self.starts[[place + 1 for place in places]] - starts
        every = [*starts, *(starts + 1)] if counts.min() == 2 else list(starts)
        return torch.from_numpy(self.values[every])

    def read_token_logits(self, places: Sequence[int], size: int) -> Tensor | TopKLogits:
        """Return the outputs at the positions of each sample, padded with zeros to `size`: see `TopKLogits`.

        If all logits are cached: the logits, float32 [B, T, V].
        """
        values = self._padded(self.values, places, size).float()
        if self.ids is None or self.rest is None:
            return values
        rest = self._padded(self.rest, places, size)
        ids = self._padded(self.ids, places, size)
        return TopKLogits(torch.cat([values / self.temperature, rest], dim=-1), ids)

    def _padded(self, array: NDArray[Any], places: Sequence[int], size: int) -> Tensor:
        kind = array.dtype if array.dtype.kind == "f" else np.dtype(np.int64)
        found = np.zeros((len(places), size, array.shape[1]), dtype=kind)
        for row, place in zip(found, places, strict=True):
            start, end = self.starts[place], self.starts[place + 1]
            row[: end - start] = array[start:end]
        return torch.from_numpy(found)
