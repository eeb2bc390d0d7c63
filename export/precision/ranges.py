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
from smelt.export.precision.types import graphs_of, is_control, key_of, opsets_of
from smelt.runtime.batch import Batch
from smelt.runtime.foreign.structure import domain_of, inner_graphs
from smelt.runtime.images.batch import ImageBatch

MARK, SUM = "smelt.largest.", "smelt.sum."
# whose inputs are added up; of the last one, their squares
_SUMMED = ("MatMul", "Gemm", "Conv", "ReduceSum", "ReduceMean", "ReduceL2")
_AT_ONCE = 4  # rows
_INSIDE = "@"
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

    weights = [tensor for graph in graphs_of(model.graph) for tensor in graph.initializer]
    floats = [tensor for tensor in weights if tensor.data_type == TensorProto.FLOAT]
    return {t.name: float(np.abs(numpy_helper.to_array(t)).max(initial=0.0)) for t in floats}


def probe(model: Any, folder: Path, name: str, threads: int | None) -> Any:
    """Open `model` with a number more for every floating value that a node gives."""
    import onnx
    from onnx import TensorProto, helper

    from smelt.runtime.backends.onnx_session import open_session

    floats = float_values(model)
    path = folder / f"{name}.onnx"
    model = read_graph(path, values=False)
    for found in _measure(model.graph, floats, opsets_of(model)[""]):
        model.graph.output.append(helper.make_tensor_value_info(found, TensorProto.FLOAT, []))
    with TemporaryDirectory(dir=folder) as beside:
        for data in data_names(model):
            Path(beside, data).hardlink_to(folder / data)
        onnx.save(model, Path(beside, path.name))
        return open_session(Path(beside, path.name), threads, optimized=False)


def _measure(graph: Any, floats: set[str], opset: int, inside: str = "") -> list[str]:
    """Add nodes that give the largest magnitude of every float in a graph, and in those inside of it.

    Args:
        graph: of a model, or of a node.
        floats: the names of values.
        opset: of the model.
        inside: what names end with here: no value may have the name of one in a graph around it.

    Returns:
        The names of these numbers, float32 scalars of the graph.
    """
    found: list[str] = []
    for node in list(graph.node):
        outputs = [value for value in node.output if value in floats]
        if is_control(node):
            bodies = inner_graphs(node)
            given = [_measure(body, floats, opset, f"{inside}{_INSIDE}") for body in bodies]
            found += _of_branches(node, given) if node.op_type == "If" else _of_rounds(graph, node, given[0])
        found += [_largest(graph, value, f"{MARK}{value}{inside}") for value in outputs]
        if node.op_type in _SUMMED and not domain_of(node.domain) and node.input[0] in floats:
            found.append(_sum(graph, node, opset, f"{SUM}{key_of(node)}{inside}"))
    return found


def _of_branches(node: Any, given: Sequence[Sequence[str]]) -> list[str]:
    """Let an If give what was measured in each branch; of the one that is not taken 0."""
    from onnx import TensorProto, helper

    for body, own in zip(inner_graphs(node), given, strict=True):
        for name in (name for names in given for name in names):
            if name not in own:
                body.node.append(helper.make_node("Constant", [], [name], value=_zero(name, [])))
            body.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
    outer = [name.removesuffix(_INSIDE) for names in given for name in names]
    node.output.extend(outer)
    return outer


def _of_rounds(graph: Any, node: Any, given: Sequence[str]) -> list[str]:
    """Let a Loop or Scan give what was measured in its body: of all rounds the largest, of none 0."""
    from onnx import TensorProto, helper

    body = inner_graphs(node)[0]
    unnamed = len(body.output) - (node.op_type == "Loop") - len(node.output)
    node.output.extend([""] * unnamed)
    outer = []
    for name in given:
        result = name.removesuffix(_INSIDE)
        body.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
        node.output.append(f"{result}.rounds")
        padded = [f"{result}.none", f"{result}.rounds"]
        graph.node.append(helper.make_node("Constant", [], padded[:1], value=_zero(result, [1])))
        graph.node.append(helper.make_node("Concat", padded, [f"{result}.padded"], axis=0))
        graph.node.append(helper.make_node("ReduceMax", [f"{result}.padded"], [result], keepdims=0))
        outer.append(result)
    for attribute in node.attribute:
        if attribute.name in ("scan_output_axes", "scan_output_directions"):
            attribute.ints.extend([0] * len(outer))
    return outer


def _zero(name: str, shape: Sequence[int]) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.zeros(shape, np.float32), name)


def _largest(graph: Any, value: str, output: str) -> str:
    from onnx import helper

    graph.node.append(helper.make_node("Abs", [value], [f"{output}.abs"]))
    graph.node.append(helper.make_node("ReduceMax", [f"{output}.abs"], [output], keepdims=0))
    return output


def _axes_as_input(graph: Any, node: Any, name: str) -> None:
    """Make an input of the attribute `axes`: a sum has it from opset 13 on, a mean from 18 on."""
    from onnx import TensorProto, helper

    axes = next((one for one in node.attribute if one.name == "axes"), None)
    if axes is not None:
        node.attribute.remove(axes)
        tensor = helper.make_tensor(name, TensorProto.INT64, [len(axes.ints)], list(axes.ints))
        graph.initializer.append(tensor)
        node.input.append(name)


def _sum(graph: Any, node: Any, opset: int, output: str) -> str:
    """Add the same node over the magnitudes of what it adds up; a mean as the sum that it is before."""
    from onnx import NodeProto, helper

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
    return _largest(graph, bound.output[0], output)
