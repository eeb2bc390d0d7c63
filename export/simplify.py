"""onnxsim on an exported graph, verified: what does not compute the same is not kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# protobuf cannot hold more than 2 GB, and onnxsim passes whole models through it
_LARGEST = 1_800_000_000
# puts Reshape, Shape and Concat around every product of three dimensions: 85 nodes became 153
_SKIPPED = ["fuse_matmul_add_bias_into_gemm_batched"]


def simplify_file(path: Path) -> str | None:
    """Simplify the graph in `path` in place.

    Returns:
        None when it was simplified, else why the graph was left as it was.
    """
    import onnx
    import onnxsim

    from smelt.export.load_time import spell_out

    if path.stat().st_size > _LARGEST:
        return "it is larger than onnxsim can take"
    before = onnx.load(path)
    try:
        after, ok = onnxsim.simplify(before, skipped_optimizers=_SKIPPED)
    except Exception as error:  # a C++ extension: whatever it throws, the graph that we have is good
        return f"onnxsim failed: {error}"
    if not ok:
        return "onnxsim's own check failed"
    if after.ByteSize() > before.ByteSize() * 1.05:
        return f"onnxsim made it larger ({before.ByteSize():,} to {after.ByteSize():,} bytes)"
    candidate = path.with_suffix(".simplified")
    for model in (before, after):  # place-holders can be simplified around, but not run
        spell_out(model)
    onnx.save(before, path)
    onnx.save(after, candidate)
    try:
        if (difference := _difference(path, candidate)) > 1e-4:
            return f"the simplified graph computes something else (relative difference {difference:.2g})"
        candidate.replace(path)
    finally:
        candidate.unlink(missing_ok=True)
    return None


def _difference(first: Path, second: Path) -> float:
    """Run both graphs on the same inputs; return the largest difference relative to an output's spread."""
    from smelt.core.errors import InputError
    from smelt.runtime.onnx_runner import open_session

    try:
        sessions = [open_session(path, threads=1) for path in (first, second)]
        feeds = example_inputs(sessions[0])
        results = [session.run(None, feeds) for session in sessions]
    except (InputError, RuntimeError):
        return float("inf")
    worst = 0.0
    for a, b in zip(*results, strict=True):
        if a.shape != b.shape:
            return float("inf")
        spread = float(np.std(a, dtype=np.float64)) or 1.0
        worst = max(worst, float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) / spread)
    return worst


def example_inputs(session: Any, rows: int = 2, length: int = 6) -> dict[str, NDArray[Any]]:
    """Return inputs for `session`: whole numbers are 1, floats are drawn; dynamic sizes as given."""
    numbers = np.random.default_rng(0)
    # of a language model: one token on top of a past
    sizes = {"batch": rows, "sequence_length": 1, "past_sequence_length": length - 1}
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    feeds: dict[str, NDArray[Any]] = {}
    for item in session.get_inputs():
        shape = [size if isinstance(size, int) else sizes.get(size, length) for size in item.shape]
        kind = kinds.get(item.type)
        feeds[item.name] = (
            np.ones(shape, np.int64) if kind is None else numbers.normal(size=shape).astype(kind)
        )
    return feeds
