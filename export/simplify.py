"""onnxsim on an exported graph, verified: what does not compute the same is not kept."""

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

# puts Reshape, Shape and Concat around every product of three dimensions: 85 nodes became 153
_SKIPPED = ["fuse_matmul_add_bias_into_gemm_batched"]
_ALLOWED = 1e-4  # largest difference, of an output's standard deviation
_OF_LARGEST = 0.1  # of the same difference, of its largest value: many outputs are near 0 but for a few
# what onnxsim 0.8.1 took of a graph of 2.4 GB
_COPIES_OUTSIDE = 3


def simplify_file(path: Path, tokens: NDArray[np.int64] | None) -> Message | None:
    """Simplify the graph in `path` in place; its place-holders are spelled out either way.

    Args:
        path: of the graph, whose weights may lie outside.
        tokens: int64 [n], real tokens that the comparison feeds; None of a graph that reads none.

    Returns:
        None when it was simplified, else a warning that says why the graph was left as it was.
    """
    from smelt.export.graph_files import data_file, write_graph
    from smelt.export.load_time import spell_out, spell_out_file

    with TemporaryDirectory(dir=path.parent, prefix=".simplify-") as folder:
        after = simplified(path, Path(folder))
        spell_out_file(path)  # place-holders can be simplified around, but not run
        if isinstance(after, Message):
            return after
        spell_out(after)
        candidate = Path(folder, path.name)
        write_graph(after, candidate)
        before_bytes, after_bytes = _size(path), _size(candidate)
        if after_bytes > before_bytes * 1.05:
            return warning(
                "larger-graph", f"onnxsim made it larger ({before_bytes:,} to {after_bytes:,} bytes)"
            )
        if not (difference := _difference_without_rounding(path, candidate, tokens)) <= _ALLOWED:
            text = f"the simplified graph computes something else (relative difference {difference:.2g})"
            return warning("outputs-changed", text)
        candidate.replace(path)
        if data_file(candidate).is_file():
            data_file(candidate).replace(data_file(path))
        else:
            data_file(path).unlink(missing_ok=True)
    return None


def _size(path: Path) -> int:
    from smelt.export.graph_files import data_file

    return sum(file.stat().st_size for file in (path, data_file(path)) if file.is_file())


def simplified(path: Path, folder: Path) -> Any:
    """Return what onnxsim makes of the graph in `path`, with its weights, or why there is nothing."""
    import onnxsim

    from smelt.core.errors import RunError
    from smelt.core.memory import available_bytes
    from smelt.export.graph_files import has_data_file, read_graph

    before = read_graph(path, values=False)
    if not (outside := has_data_file(before)):
        source, more = before, {}
    elif "output_path" not in inspect.signature(onnxsim.simplify).parameters:
        text = "this onnxsim cannot take graphs whose weights lie outside; version 0.8 can"
        return warning("outdated-package", text)
    elif (needed := _COPIES_OUTSIDE * _size(path)) > (free := available_bytes()):
        text = f"onnxsim would need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        return warning("out-of-memory", text)
    else:
        source, more = str(path), {"output_path": str(folder / "onnxsim.onnx")}
    try:
        after, good = onnxsim.simplify(source, skipped_optimizers=list(_SKIPPED), **more)
        if good and outside:
            after = read_graph(folder / "onnxsim.onnx")
    except Exception as error:  # a C++ extension: whatever it throws, the graph that we have is good
        words = str(error) if not isinstance(error, RunError) else f"its result cannot be read: {error}"
        return warning("onnxsim-failed", f"onnxsim failed: {words}")
    return after if good else warning("onnxsim-check-failed", "onnxsim's own check failed")


def _difference_without_rounding(first: Path, second: Path, tokens: NDArray[np.int64] | None) -> float:
    """Compare two graphs as they are, and where they differ with their activations left whole.

    Products that round activations to codes turn the last digit of a sum, which a simplifier may order anew,
    into another code. Both must round alike for that.
    """
    from smelt.export.parity.twin import exact_twin

    difference = _difference(first, second, tokens)
    if difference <= _ALLOWED or not (rounding := _rounding(first)) or rounding != _rounding(second):
        return difference
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(exact_twin(path.parent, [path.stem], half=False)) / path.name
            for path in (first, second)
        )
        return _difference(one, other, tokens)


def _rounding(path: Path) -> list[tuple[str, ...]]:
    """Return how a graph rounds activations: attributes of its operators, constants of QuantizeLinear."""
    from onnx import numpy_helper

    from smelt.export.graph_files import read_graph
    from smelt.runtime.schemes.registry import exact_nodes

    graph = read_graph(path).graph
    values = {tensor.name: tensor for tensor in graph.initializer}
    found = []
    for node in graph.node:
        said = [str(attribute) for attribute in node.attribute]
        if node.op_type == "QuantizeLinear" or exact_nodes(node) is not None:
            grid = node.input[1:] if node.op_type == "QuantizeLinear" else ()
            said += [str(numpy_helper.to_array(values[name]).tolist()) for name in grid if name in values]
            found.append((node.op_type, *sorted(said)))
    return sorted(found)


def _difference(first: Path, second: Path, tokens: NDArray[np.int64] | None) -> float:
    """Run both graphs on the same inputs; return the largest difference relative to an output's spread.

    There are batches of two sizes: a simplifier may have written one of them into the graph.
    """
    from smelt.export.parity.example_feeds import LENGTHS, OTHER_LENGTHS, example_feeds, of_text
    from smelt.runtime.backends.onnx_session import open_session

    worst = 0.0
    try:
        sessions = [open_session(path, threads=1) for path in (first, second)]
        batches = (example_feeds(sessions[0], tokens, lengths) for lengths in (LENGTHS, OTHER_LENGTHS))
        for feeds in chain.from_iterable(batches):
            names = [output.name for output in sessions[0].get_outputs()]
            for name, a, b in zip(names, *(s.run(names, feeds) for s in sessions), strict=True):
                worst = max(worst, _off(of_text(name, a, feeds), of_text(name, b, feeds)))
    except Exception:  # it does not load, or has other inputs; ONNX Runtime's errors share no other base
        return float("inf")
    return worst


def _off(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the largest difference of two outputs of one graph, infinite where they cannot be compared."""
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    spread = float(np.std(a, dtype=np.float64)) or 1.0
    scale = max(spread, _OF_LARGEST * float(np.abs(a).max(initial=0.0)))
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) / scale
