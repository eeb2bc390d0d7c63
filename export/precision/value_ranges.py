"""Measure the ranges of values of float32 graphs on real samples: every tensor, and sums inside operators.

A copy of each graph has an additional output for every floating value: the largest magnitude. Partial sums of
a matrix multiplication or a mean are not visible, so their bound is used: the sum of the magnitudes of the
terms. Graphs are run as a runner would, a decoder step by step on the outputs of its encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from smelt.data.batch import Batch
from smelt.export.graph_files import external_data_names, read_graph
from smelt.export.parity.operator_checks import run_graph_calls
from smelt.export.parity.torch_reference import TorchReference
from smelt.export.precision.convert_to_half import values_of_type
from smelt.export.precision.value_types import is_control_flow, iter_graphs, node_key, opset_versions
from smelt.runtimes.images import ImageBatch
from smelt.runtimes.third_party.graph_structure import normalized_domain, subgraphs

MAX_OUTPUT_PREFIX, SUM_PREFIX = "smelt.largest.", "smelt.sum."
# whose inputs are summed; of the last one, their squares
_SUMMING_OPS = ("MatMul", "Gemm", "Conv", "ReduceSum", "ReduceMean", "ReduceL2")
_BATCH_SIZE = 4  # rows
_SUBGRAPH_MARK = "@"
_SUM_AXES = 13  # since this opset the axes of ReduceSum are an input


class ValueRanges(NamedTuple):
    """For one graph: the largest magnitude of each value, and of the sums of each node.

    values: by the value's name, weights too. sums: by the name of the node's first output.
    """

    values: dict[str, float]
    sums: dict[str, float]


def measure_ranges(
    folder: Path, name: str, references: Sequence[TorchReference], threads: int | None
) -> ValueRanges:
    """Run the float32 graph `name` on all `references` and return the ranges of its values.

    Args:
        folder: with all graphs of the model, and no other files that must not be overwritten.
        name: of the graph.
        references: batches, and the input tokens of a decoder.
        threads: of ONNX Runtime.
    """
    model = read_graph(folder / f"{name}.onnx")
    found = ValueRanges(weight_magnitudes(model), {})
    session = open_with_measurements(model, folder, name, threads)
    for reference in references:
        for _, got in run_graph_calls(session, folder, name, reference):
            for mark, into in ((MAX_OUTPUT_PREFIX, found.values), (SUM_PREFIX, found.sums)):
                for output in (o for o in got if o.startswith(mark)):
                    value = float(got[output])
                    value = float("inf") if np.isnan(value) else value
                    into[output[len(mark) :]] = max(into.get(output[len(mark) :], 0.0), value)
    return found


def split_batch(batch: Batch | ImageBatch) -> Iterator[Batch | ImageBatch]:
    """Yield a few rows of `batch` at a time, without columns that are padding in all of them."""
    if isinstance(batch, ImageBatch):
        for at in range(0, len(batch.pixel_values), _BATCH_SIZE):
            yield ImageBatch(batch.pixel_values[at : at + _BATCH_SIZE])
        return
    for at in range(0, len(batch.input_ids), _BATCH_SIZE):
        rows = slice(at, at + _BATCH_SIZE)
        kept = batch.attention_mask[rows].any(axis=0)
        types = batch.token_type_ids
        yield Batch(
            batch.input_ids[rows][:, kept],
            batch.attention_mask[rows][:, kept],
            None if types is None else types[rows][:, kept],
        )


def weight_magnitudes(model: Any) -> dict[str, float]:
    """Return the largest magnitude of each float32 weight of an onnx.ModelProto, by its name."""
    from onnx import TensorProto, numpy_helper

    weights = [tensor for graph in iter_graphs(model.graph) for tensor in graph.initializer]
    floats = [tensor for tensor in weights if tensor.data_type == TensorProto.FLOAT]
    return {t.name: float(np.abs(numpy_helper.to_array(t)).max(initial=0.0)) for t in floats}


def open_with_measurements(model: Any, folder: Path, name: str, threads: int | None) -> Any:
    """Open `model` with an additional output for every floating value of its nodes."""
    import onnx
    from onnx import TensorProto, helper

    from smelt.runtimes.onnx_session import open_onnx_session

    floats = values_of_type(model)
    path = folder / f"{name}.onnx"
    model = read_graph(path, values=False)
    for found in _add_measurements(model.graph, floats, opset_versions(model)[""]):
        model.graph.output.append(helper.make_tensor_value_info(found, TensorProto.FLOAT, []))
    with TemporaryDirectory(dir=folder) as temporary:
        for data in external_data_names(model):
            Path(temporary, data).hardlink_to(folder / data)
        onnx.save(model, Path(temporary, path.name))
        return open_onnx_session(Path(temporary, path.name), threads, optimized=False)


def _add_measurements(graph: Any, floats: set[str], opset: int, inside: str = "") -> list[str]:
    """Add nodes that compute the largest magnitude of every float in a graph, and in its inner graphs.

    Args:
        graph: of a model, or of a node.
        floats: the names of values.
        opset: of the model.
        inside: suffix of new names, which must not be names of an outer graph.

    Returns:
        The names of these numbers, float32 scalars of the graph.
    """
    found: list[str] = []
    for node in list(graph.node):
        outputs = [value for value in node.output if value in floats]
        if is_control_flow(node):
            bodies = subgraphs(node)
            given = [_add_measurements(body, floats, opset, f"{inside}{_SUBGRAPH_MARK}") for body in bodies]
            found += (
                _measure_branches(node, given)
                if node.op_type == "If"
                else _measure_loop(graph, node, given[0])
            )
        found += [_max_magnitude(graph, value, f"{MAX_OUTPUT_PREFIX}{value}{inside}") for value in outputs]
        if node.op_type in _SUMMING_OPS and not normalized_domain(node.domain) and node.input[0] in floats:
            found.append(_sum_magnitudes(graph, node, opset, f"{SUM_PREFIX}{node_key(node)}{inside}"))
    return found


def _measure_branches(node: Any, given: Sequence[Sequence[str]]) -> list[str]:
    """Make an If return the measurements of each branch, and 0 for the branch that is not executed."""
    from onnx import TensorProto, helper

    for body, own in zip(subgraphs(node), given, strict=True):
        for name in (name for names in given for name in names):
            if name not in own:
                body.node.append(helper.make_node("Constant", [], [name], value=_zero_node(name, [])))
            body.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
    outer = [name.removesuffix(_SUBGRAPH_MARK) for names in given for name in names]
    node.output.extend(outer)
    return outer


def _measure_loop(graph: Any, node: Any, given: Sequence[str]) -> list[str]:
    """Make a Loop or Scan return the measurements of its body: the maximum of all iterations, or 0."""
    from onnx import TensorProto, helper

    body = subgraphs(node)[0]
    unnamed = len(body.output) - (node.op_type == "Loop") - len(node.output)
    node.output.extend([""] * unnamed)
    outer = []
    for name in given:
        result = name.removesuffix(_SUBGRAPH_MARK)
        body.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
        node.output.append(f"{result}.rounds")
        padded = [f"{result}.none", f"{result}.rounds"]
        graph.node.append(helper.make_node("Constant", [], padded[:1], value=_zero_node(result, [1])))
        graph.node.append(helper.make_node("Concat", padded, [f"{result}.padded"], axis=0))
        graph.node.append(helper.make_node("ReduceMax", [f"{result}.padded"], [result], keepdims=0))
        outer.append(result)
    for attribute in node.attribute:
        if attribute.name in ("scan_output_axes", "scan_output_directions"):
            attribute.ints.extend([0] * len(outer))
    return outer


def _zero_node(name: str, shape: Sequence[int]) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.zeros(shape, np.float32), name)


def _max_magnitude(graph: Any, value: str, output: str) -> str:
    from onnx import helper

    graph.node.append(helper.make_node("Abs", [value], [f"{output}.abs"]))
    graph.node.append(helper.make_node("ReduceMax", [f"{output}.abs"], [output], keepdims=0))
    return output


def _axes_to_input(graph: Any, node: Any, name: str) -> None:
    """Convert the attribute `axes` to an input: ReduceSum has it from opset 13 on, ReduceMean from 18 on."""
    from onnx import TensorProto, helper

    axes = next((attribute for attribute in node.attribute if attribute.name == "axes"), None)
    if axes is not None:
        node.attribute.remove(axes)
        tensor = helper.make_tensor(name, TensorProto.INT64, [len(axes.ints)], list(axes.ints))
        graph.initializer.append(tensor)
        node.input.append(name)


def _sum_magnitudes(graph: Any, node: Any, opset: int, output: str) -> str:
    """Add the same node for the magnitudes of the terms; a mean as the sum before its division."""
    from onnx import NodeProto, helper

    bound = NodeProto()
    bound.CopyFrom(node)
    bound.op_type = {"ReduceMean": "ReduceSum", "ReduceL2": "ReduceSumSquare"}.get(node.op_type, node.op_type)
    if node.op_type == "ReduceMean" and opset >= _SUM_AXES:
        _axes_to_input(graph, bound, f"{output}.axes")
    bound.name, bound.output[0] = output, f"{output}.bound"
    summed = (
        len(node.input) if node.op_type in ("MatMul", "Gemm", "Conv") else 1
    )  # the second input of a sum are its axes
    for place in range(summed):
        bound.input[place] = f"{output}.{place}"
        graph.node.append(helper.make_node("Abs", [node.input[place]], [bound.input[place]]))
    graph.node.append(bound)
    return _max_magnitude(graph, bound.output[0], output)
