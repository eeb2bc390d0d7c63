"""Cache input statistics in the store: steps that calibrate one model on the same samples do it once.

Another keep_ratio, rank or energy needs no second pass. The sums are stored in float64, so a step computes
exactly the same result from them as from a pass of its own.
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

from smelt.compress.calibration.input_hooks import LayersByKey
from smelt.compress.calibration.samples import CalibrationSamples
from smelt.compress.calibration.statistics import (
    STATISTICS_MEMORY_BYTES,
    InputStatistics,
    collect_statistics,
    input_width,
)
from smelt.core.files import json_hash
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device

STATISTICS_VERSION = 1  # raise it whenever the same layers and samples give other sums
_STATISTICS_FILE = "statistics.safetensors"
_STORED_SUMS = ("sums", "squares", "magnitudes", "lowest", "highest")  # of every layer, without `second`


class _NoRoomError(Exception):
    pass


@contextmanager
def cached_statistics(
    model: Any,
    samples: CalibrationSamples,
    layers: LayersByKey,
    ctx: Context,
    *,
    artifact_key: str,
    second: bool = True,
    limit_bytes: int = STATISTICS_MEMORY_BYTES,
) -> Iterator[dict[str, InputStatistics]]:
    """Yield the statistics of the inputs of `layers`, like `collect_statistics`, cached in the store.

    Args:
        model: as stored under `artifact_key`: float32, in eval mode, on the CPU.
        samples: calibration samples.
        layers: by a key that identifies the layers in the model.
        ctx: the store, device, threads, progress.
        artifact_key: the key of the artifact that the model was loaded from.
        second: whether to collect second moments.
        limit_bytes: larger statistics are not cached, nor those that do not fit on the disk.
    """
    widths = {key: input_width(found[0]) for key, found in layers.items()}
    needed = sum(8 * (width**2 if second else 0) + 40 * width for width in widths.values())
    what = {
        "what": f"statistics of {len(layers)} layers on {samples.num_samples:,} samples",
        "version": STATISTICS_VERSION,
        "artifacts": [artifact_key],
        "rows": batches_fingerprint(samples),
        "layers": json_hash(widths),
        "second": second,
        "device": torch_device(ctx.device),
    }

    def make(folder: Path) -> None:
        if 2 * needed > shutil.disk_usage(folder).free:
            raise _NoRoomError
        with collect_statistics(model, samples, layers, ctx, second=second, limit_bytes=limit_bytes) as found:
            _write_statistics(found, folder / _STATISTICS_FILE)

    with ExitStack() as stack:
        try:
            if needed > limit_bytes:
                raise _NoRoomError
            folder, _ = stack.enter_context(ctx.cached_files(what, make))
        except _NoRoomError:
            yield stack.enter_context(
                collect_statistics(model, samples, layers, ctx, second=second, limit_bytes=limit_bytes)
            )
            return
        yield _read_statistics(folder / _STATISTICS_FILE, widths)


def batches_fingerprint(samples: CalibrationSamples) -> str:
    """Return a hash of all model inputs in `samples`, batch by batch."""
    found = hashlib.sha256()
    for batch in samples.batches:
        for name, tensor in sorted(batch.items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _write_statistics(found: dict[str, InputStatistics], path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for key, seen in found.items():
        parts = {name: getattr(seen, name) for name in _STORED_SUMS}
        parts["tokens"] = torch.tensor(seen.tokens)
        if seen.second_moment is not None:
            parts["second"] = seen.second_moment
        tensors |= {f"{key}|{name}": tensor.contiguous() for name, tensor in parts.items()}
    save_file(tensors, path)


def _read_statistics(path: Path, widths: dict[str, int]) -> dict[str, InputStatistics]:
    tensors = load_file(path)
    found = {}
    for key in widths:
        sums, squares, magnitudes, lowest, highest = (tensors[f"{key}|{name}"] for name in _STORED_SUMS)
        tokens, second = int(tensors[f"{key}|tokens"]), tensors.get(f"{key}|second")
        found[key] = InputStatistics(tokens, sums, squares, magnitudes, lowest, highest, second)
    return found
