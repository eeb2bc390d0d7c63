"""Statistics of inputs that are kept in the store: steps that look at one model on the same rows do it once.

A ratio, a rank or an energy that is tried again needs no second pass. What is kept are the sums in float64,
so that a step computes from them to the bit what it would from a pass of its own.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from smelt.compress.calibration.observe import Layers
from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.calibration.statistics import MEMORY_BYTES, InputStatistics, collected, width_of
from smelt.core.files import hash_of
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device

VERSION = 1  # raised whenever the same layers on the same rows give other sums
_FILE = "statistics.safetensors"
_SUMS = ("sums", "squares", "magnitudes", "lowest", "highest")  # of every layer, beside `second`


class _NoRoomError(Exception):
    pass


@contextmanager
def kept_statistics(
    model: Any,
    rows: CalibrationRows,
    layers: Layers,
    ctx: Context,
    *,
    of: str,
    second: bool = True,
    limit_bytes: int = MEMORY_BYTES,
) -> Iterator[dict[str, InputStatistics]]:
    """Give the statistics of what `layers` are fed, as `collected` does, from the store where they are there.

    Args:
        model: as it was stored under `of`: float32, in eval mode, on the CPU.
        rows: what it reads.
        layers: by a key of the caller's, which says which layers of the model they are.
        ctx: the store, device, threads, progress.
        of: the key of the artifact that the model was read from.
        second: whether second moments are taken.
        limit_bytes: what takes more is not kept, nor what does not fit on the disk.
    """
    widths = {key: width_of(found[0]) for key, found in layers.items()}
    needed = sum(8 * (width**2 if second else 0) + 40 * width for width in widths.values())
    what = {
        "what": f"statistics of {len(layers)} layers on {rows.rows:,} rows",
        "version": VERSION,
        "artifacts": [of],
        "rows": fingerprint_of(rows),
        "layers": hash_of(widths),
        "second": second,
        "device": torch_device(ctx.device),
    }

    def make(folder: Path) -> None:
        if 2 * needed > shutil.disk_usage(folder).free:
            raise _NoRoomError
        with collected(model, rows, layers, ctx, second=second, limit_bytes=limit_bytes) as found:
            _write(found, folder / _FILE)

    with ExitStack() as stack:
        try:
            if needed > limit_bytes:
                raise _NoRoomError
            folder, _ = stack.enter_context(ctx.files(what, make))
        except _NoRoomError:
            yield stack.enter_context(
                collected(model, rows, layers, ctx, second=second, limit_bytes=limit_bytes)
            )
            return
        yield _read(folder / _FILE, widths)


def fingerprint_of(rows: CalibrationRows) -> str:
    """Return a hash of all that a model reads of `rows`, batch by batch."""
    found = hashlib.sha256()
    for batch in rows.batches:
        for name, tensor in sorted(batch.items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _write(found: dict[str, InputStatistics], path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for key, seen in found.items():
        parts = {name: getattr(seen, name) for name in _SUMS}
        parts["tokens"] = torch.tensor(seen.tokens)
        if seen.second is not None:
            parts["second"] = seen.second
        tensors |= {f"{key}|{name}": tensor.contiguous() for name, tensor in parts.items()}
    save_file(tensors, path)


def _read(path: Path, widths: dict[str, int]) -> dict[str, InputStatistics]:
    tensors = load_file(path)
    found = {}
    for key in widths:
        sums, squares, magnitudes, lowest, highest = (tensors[f"{key}|{name}"] for name in _SUMS)
        tokens, second = int(tensors[f"{key}|tokens"]), tensors.get(f"{key}|second")
        found[key] = InputStatistics(tokens, sums, squares, magnitudes, lowest, highest, second)
    return found
