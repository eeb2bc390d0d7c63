"""How large the values of float32 graphs become on real rows: every tensor, and the sums inside of products.

A probe of each graph gives, beside its outputs, one number for every floating value: the largest magnitude.
Partial sums of a product or a mean are seen nowhere, so their bound is taken instead: what they would be
if all terms had one sign. Graphs are run as a runner would, a decoder step by step on what its encoder gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from smelt.export.graph_files import data_names, read_graph
from smelt.export.parity.calls import calls
from smelt.export.parity.reference import Reference
from smelt.export.precision.narrow import float_values
from smelt.runtime.batch import Batch
from smelt.runtime.images.batch import ImageBatch

MARK, SUM = "smelt.largest.", "smelt.sum."
# whose inputs are added up; of the last one, their squares
_SUMMED = ("MatMul", "Gemm", "Conv", "ReduceSum", "ReduceMean", "ReduceL2")
_AT_ONCE = 4  # rows
_SUM_AXES = 13  # the opset from which on ReduceSum has its axes as an input


class Ranges(NamedTuple):
    """Of one graph: the largest magnitude of each value, and of what each product or mean adds up.

    values: by the value's name, weights too. sums: by the name of the node's first output.
    """

    values: dict[str, float]
    sums: dict[str, float]


def ranges_of(folder: Path, name: str, references: Sequence[Reference], threads: int | None) -> Ranges:
    """Run the float32 graph `name` on all `references` and return how large its values became.

    Args:
        folder: with all graphs of the model, and nothing else that may be overwritten.
        name: of the graph.
        references: batches, and the tokens that a decoder is fed.
        threads: of ONNX Runtime.
    """
    model = read_graph(folder / f"{name}.onnx")
    found = Ranges(weights(model), {})
    session = probe(model, folder, name, threads)
    for reference in references:
        for _, got in calls(session, folder, name, reference):
            for mark, into in ((MARK, found.values), (SUM, found.sums)):
                for output in (o for o in got if o.startswith(mark)):
                    value = float(got[output])
                    value = float("inf") if np.isnan(value) else value
                    into[output[len(mark) :]] = max(into.get(output[len(mark) :], 0.0), value)
    return found


def pieces(batch: Batch | ImageBatch) -> Iterator[Batch | ImageBatch]:
    """Yield a few rows of `batch` at a time, without columns that are padding in all of them."""
    if isinstance(batch, ImageBatch):
        for at in range(0, len(batch.pixel_values), _AT_ONCE):
            yield ImageBatch(batch.pixel_values[at : at + _AT_ONCE])
        return
    for at in range(0, len(batch.input_ids), _AT_ONCE):
        rows = slice(at, at + _AT_ONCE)
        kept = batch.attention_mask[rows].any(axis=0)
        types = batch.token_type_ids
        yield Batch(
            batch.input_ids[rows][:, kept],
            batch.attention_mask[rows][:, kept],
            None if types is None else types[rows][:, kept],
        )


def weights(model: Any) -> dict[str, float]:
    """Return the largest magnitude of each float32 weight of an onnx.ModelProto, by its name."""
    from onnx import TensorProto, numpy_helper

    floats = [tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT]
    return {t.name: float(np.abs(numpy_helper.to_array(t)).max(initial=0.0)) for t in floats}


def probe(model: Any, folder: Path, name: str, threads: int | None) -> Any:
    """Open `model` with a number more for every floating value that a node gives."""
    import onnx

    from smelt.runtime.backends.onnx_session import open_session

    floats = float_values(model)
    path = folder / f"{name}.onnx"
    model = read_graph(path, values=False)
    graph = model.graph
    opset = next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx"))
    for node in list(graph.node):
        for value in (v for v in node.output if v in floats):
            _largest(graph, value, f"{MARK}{value}")
        if node.op_type in _SUMMED and node.input[0] in floats:
            _sum(graph, node, opset)
    with TemporaryDirectory(dir=folder) as beside:
        for data in data_names(model):
            Path(beside, data).hardlink_to(folder / data)
        onnx.save(model, Path(beside, path.name))
        return open_session(Path(beside, path.name), threads, optimized=False)


def _largest(graph: Any, value: str, output: str) -> None:
    from onnx import TensorProto, helper

    graph.node.append(helper.make_node("Abs", [value], [f"{output}.abs"]))
    graph.node.append(helper.make_node("ReduceMax", [f"{output}.abs"], [output], keepdims=0))
    graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, []))


def _axes_as_input(graph: Any, node: Any, name: str) -> None:
    """Make an input of the attribute `axes`: a sum has it from opset 13 on, a mean from 18 on."""
    from onnx import TensorProto, helper

    axes = next((one for one in node.attribute if one.name == "axes"), None)
    if axes is not None:
        node.attribute.remove(axes)
        tensor = helper.make_tensor(name, TensorProto.INT64, [len(axes.ints)], list(axes.ints))
        graph.initializer.append(tensor)
        node.input.append(name)


def _sum(graph: Any, node: Any, opset: int) -> None:
    """Add the same node over the magnitudes of what it adds up; a mean as the sum that it is before."""
    from onnx import NodeProto, helper

    output = f"{SUM}{node.output[0]}"
    bound = NodeProto()
    bound.CopyFrom(node)
    bound.op_type = {"ReduceMean": "ReduceSum", "ReduceL2": "ReduceSumSquare"}.get(node.op_type, node.op_type)
    if node.op_type == "ReduceMean" and opset >= _SUM_AXES:
        _axes_as_input(graph, bound, f"{output}.axes")
    bound.name, bound.output[0] = output, f"{output}.bound"
    summed = (
        len(node.input) if node.op_type in ("MatMul", "Gemm", "Conv") else 1
    )  # the second of a sum are its axes
    for place in range(summed):
        bound.input[place] = f"{output}.{place}"
        graph.node.append(helper.make_node("Abs", [node.input[place]], [bound.input[place]]))
    graph.node.append(bound)
    _largest(graph, bound.output[0], output)
