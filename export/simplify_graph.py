"""Simplify exported graphs with onnxsim, and keep the result only if it computes the same."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.messages import Message, warning

# surrounds every 3-D matrix multiplication with Reshape, Shape and Concat: 85 nodes became 153
_SKIPPED_PASSES = ["fuse_matmul_add_bias_into_gemm_batched"]
_TOLERANCE = 1e-4  # largest difference, of an output's standard deviation
_MAX_VALUE_FACTOR = 0.1  # same, of the largest value: many outputs are near 0 except for a few
# memory of onnxsim 0.8.1 for a graph of 2.4 GB
_COPIES_OUTSIDE = 3


def simplify_file(path: Path, tokens: NDArray[np.int64] | None) -> Message | None:
    """Simplify the graph in `path` in place; its placeholders are expanded in either case.

    Args:
        path: of the graph, whose weights may be external.
        tokens: int64 [n], real tokens for the comparison; None for a graph without token inputs.

    Returns:
        None if it was simplified, else a warning with the reason why the graph was not changed.
    """
    from smelt.export.expand_placeholders import expand_placeholders, expand_placeholders_in_file
    from smelt.export.graph_files import external_data_path, write_graph

    with TemporaryDirectory(dir=path.parent, prefix=".simplify-") as folder:
        after = run_onnxsim(path, Path(folder))
        expand_placeholders_in_file(path)  # placeholders can be simplified around, but not run
        if isinstance(after, Message):
            return after
        expand_placeholders(after)
        candidate = Path(folder, path.name)
        write_graph(after, candidate)
        before_bytes, after_bytes = _file_size(path), _file_size(candidate)
        if after_bytes > before_bytes * 1.05:
            return warning(
                "larger-graph", f"onnxsim made the graph larger ({before_bytes:,} to {after_bytes:,} bytes)"
            )
        if not (difference := _float_difference(path, candidate, tokens)) <= _TOLERANCE:
            text = f"the simplified graph computes different outputs (relative difference {difference:.2g})"
            return warning("outputs-changed", text)
        candidate.replace(path)
        if external_data_path(candidate).is_file():
            external_data_path(candidate).replace(external_data_path(path))
        else:
            external_data_path(path).unlink(missing_ok=True)
    return None


def _file_size(path: Path) -> int:
    from smelt.export.graph_files import external_data_path

    return sum(file.stat().st_size for file in (path, external_data_path(path)) if file.is_file())


def run_onnxsim(path: Path, folder: Path) -> Any:
    """Return the graph in `path` after onnxsim, with its weights, or a warning if onnxsim failed."""
    import onnxsim

    from smelt.core.errors import RunError
    from smelt.core.memory import available_bytes
    from smelt.export.graph_files import has_external_data, read_graph

    before = read_graph(path, values=False)
    if not (outside := has_external_data(before)):
        source, more = before, {}
    elif "output_path" not in inspect.signature(onnxsim.simplify).parameters:
        text = "the installed onnxsim does not support external weights. Install version 0.8 or newer"
        return warning("outdated-package", text)
    elif (needed := _COPIES_OUTSIDE * _file_size(path)) > (free := available_bytes()):
        text = f"onnxsim needs about {needed / 1e9:.1f} GB of memory, but {free / 1e9:.1f} GB are free"
        return warning("out-of-memory", text)
    else:
        source, more = str(path), {"output_path": str(folder / "onnxsim.onnx")}
    try:
        after, good = onnxsim.simplify(source, skipped_optimizers=list(_SKIPPED_PASSES), **more)
        if good and outside:
            after = read_graph(folder / "onnxsim.onnx")
    except Exception as error:  # a C++ extension: whatever it raises, the unsimplified graph is valid
        words = str(error) if not isinstance(error, RunError) else f"its result cannot be read: {error}"
        return warning("onnxsim-failed", f"onnxsim failed: {words}")
    return after if good else warning("onnxsim-check-failed", "onnxsim's check of its result failed")


def _float_difference(first: Path, second: Path, tokens: NDArray[np.int64] | None) -> float:
    """Compare two graphs; where they differ, compare them again without activation quantization.

    Quantizing activations turns a difference in the last digit of a sum, which a simplifier may reorder, into
    a different int8 value. Both graphs must quantize activations in the same way for the second comparison.
    """
    from smelt.export.parity.dequantized_copy import make_dequantized_copy

    difference = _max_difference(first, second, tokens)
    if (
        difference <= _TOLERANCE
        or not (rounding := _rounding_signature(first))
        or rounding != _rounding_signature(second)
    ):
        return difference
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(make_dequantized_copy(path.parent, [path.stem], widen=False)) / path.name
            for path in (first, second)
        )
        return _max_difference(one, other, tokens)


def _rounding_signature(path: Path) -> list[tuple[str, ...]]:
    """Return how a graph quantizes activations: operator attributes and constants of QuantizeLinear."""
    from onnx import numpy_helper

    from smelt.export.graph_files import read_graph
    from smelt.runtime.schemes.registry import replace_with_float_nodes

    graph = read_graph(path).graph
    values = {tensor.name: tensor for tensor in graph.initializer}
    found = []
    for node in graph.node:
        said = [str(attribute) for attribute in node.attribute]
        if node.op_type == "QuantizeLinear" or replace_with_float_nodes(node) is not None:
            grid = node.input[1:] if node.op_type == "QuantizeLinear" else ()
            said += [str(numpy_helper.to_array(values[name]).tolist()) for name in grid if name in values]
            found.append((node.op_type, *sorted(said)))
    return sorted(found)


def _max_difference(first: Path, second: Path, tokens: NDArray[np.int64] | None) -> float:
    """Run both graphs on the same inputs; return the largest difference relative to an output's spread.

    Batches of two sizes are run, because a simplifier may have fixed one of them in the graph.
    """
    from smelt.export.parity.example_feeds import (
        EXAMPLE_LENGTHS,
        OTHER_EXAMPLE_LENGTHS,
        example_feeds,
        without_padding,
    )
    from smelt.runtime.backends.onnx_session import open_onnx_session

    worst = 0.0
    try:
        sessions = [open_onnx_session(path, threads=1) for path in (first, second)]
        batches = (
            example_feeds(sessions[0], tokens, lengths)
            for lengths in (EXAMPLE_LENGTHS, OTHER_EXAMPLE_LENGTHS)
        )
        for feeds in chain.from_iterable(batches):
            names = [output.name for output in sessions[0].get_outputs()]
            for name, a, b in zip(names, *(s.run(names, feeds) for s in sessions), strict=True):
                worst = max(
                    worst,
                    _relative_difference(without_padding(name, a, feeds), without_padding(name, b, feeds)),
                )
    except Exception:  # it does not load or has other inputs; ONNX Runtime's errors share no other base class
        return float("inf")
    return worst


def _relative_difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the largest difference of two outputs of one graph, infinite if they are not comparable."""
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    spread = float(np.std(a, dtype=np.float64)) or 1.0
    scale = max(spread, _MAX_VALUE_FACTOR * float(np.abs(a).max(initial=0.0)))
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) / scale
