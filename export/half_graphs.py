"""Convert the graphs of a model to half precision, and choose the nodes that remain float32.

Norms remain float32 in both float16 and bfloat16; for ONNX Runtime on CUDA only where their inputs are large,
because a norm of one operator computes in float32 inside, and each Cast is a node. In float16 so do nodes
whose outputs, inputs or sums come close to its range: an FFN's last layer and the residual stream after it,
attention with very large scores; and nodes that need values which float16 does not have (`fp16_range`).

Their ranges are measured on real samples in the float32 graphs: every tensor, and sums inside operators. A
copy of each graph has an additional output for every floating value: the largest magnitude. Partial sums of
a matrix multiplication or a mean are not visible, so their bound is used: the sum of the magnitudes of the
terms. Graphs are run as a runner would, a decoder step by step on the outputs of its encoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from smelt.export.convert_to_half import convert_to_half
from smelt.export.cuda_kernels import nodes_without_bf16_kernel
from smelt.export.fp16_range import FP16_MAX, nodes_outside_fp16
from smelt.export.graph_files import read_graph, write_graph
from smelt.export.parity.operator_checks import open_with_outputs, run_graph_calls
from smelt.export.parity.references import TorchReference, run_as_deployed
from smelt.export.value_types import is_control_flow, node_key, values_of_type
from smelt.generation.backend import Batch, FeedBatch
from smelt.runtimes.graph_walk import iter_graphs, normalized_domain, opset_versions, subgraphs
from smelt.runtimes.images import PIXEL_VALUES, ImageBatch

if TYPE_CHECKING:
    from smelt.export.graphs.attention import GraphSpec
    from smelt.stage import Context


MAX_OUTPUT_PREFIX, SUM_PREFIX = "smelt.largest.", "smelt.sum."
# whose inputs are summed; of the last one, their squares
_SUMMING_OPS = ("MatMul", "Gemm", "Conv", "ReduceSum", "ReduceMean", "ReduceL2")
# half of it: other samples have larger values than the calibration samples, and masks are 20,000
FP16_SAFE_MAX = FP16_MAX / 2
_BATCH_SIZE = 4  # rows
_SUBGRAPH_MARK = "@"
_SUM_AXES = 13  # since this opset the axes of ReduceSum are an input


class ValueRanges(NamedTuple):
    """For one graph: the largest magnitude of each value, and of the sums of each node.

    values: by the value's name, weights too. sums: by the name of the node's first output.
    """

    values: dict[str, float]
    sums: dict[str, float]

    def update(self, outputs: Mapping[str, Any]) -> None:
        """Add the outputs of a call of `open_with_measurements`; NaN counts as infinite."""
        for output_prefix, target_values in ((MAX_OUTPUT_PREFIX, self.values), (SUM_PREFIX, self.sums)):
            for output in (o for o in outputs if o.startswith(output_prefix)):
                name, value = output[len(output_prefix) :], float(outputs[output])
                target_values[name] = max(
                    target_values.get(name, 0.0), float("inf") if np.isnan(value) else value
                )

    def overflows(self, node: Any) -> list[float]:
        """Return the inputs, outputs and sums of a node that are close to or above float16's maximum."""
        names = (*node.input, *node.output)
        overflowing = [self.values[name] for name in names if not self.values.get(name, 0.0) <= FP16_SAFE_MAX]
        return overflowing + [
            self.sums[name] for name in node.output if not self.sums.get(name, 0.0) <= FP16_MAX
        ]


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
    ranges = ValueRanges(weight_magnitudes(model), {})
    session = open_with_measurements(model, folder, name, threads)
    for reference in references:
        for _, call_outputs in run_graph_calls(session, folder, name, reference):
            ranges.update(call_outputs)
    return ranges


def split_batch(batch: Batch | FeedBatch) -> Iterator[Batch | FeedBatch]:
    """Yield a few rows of `batch` at a time, without columns that are padding in all of them."""
    if not isinstance(batch, Batch):
        assert isinstance(batch, ImageBatch)  # graphs of arrays are float32
        for start in range(0, len(batch.pixel_values), _BATCH_SIZE):
            yield ImageBatch(batch.pixel_values[start : start + _BATCH_SIZE])
        return
    for start in range(0, len(batch.input_ids), _BATCH_SIZE):
        yield batch.select(range(len(batch.input_ids))[start : start + _BATCH_SIZE])


def weight_magnitudes(model: Any) -> dict[str, float]:
    """Return the largest magnitude of each float32 weight of an onnx.ModelProto, by its name."""
    from onnx import TensorProto, numpy_helper

    weights = [tensor for graph in iter_graphs(model.graph) for tensor in graph.initializer]
    floats = [tensor for tensor in weights if tensor.data_type == TensorProto.FLOAT]
    return {t.name: float(np.abs(numpy_helper.to_array(t)).max(initial=0.0)) for t in floats}


def open_with_measurements(model: Any, folder: Path, name: str, threads: int | None) -> Any:
    """Open `model` with an additional output for every floating value of its nodes."""
    floats = values_of_type(model)
    model = read_graph(folder / f"{name}.onnx", values=False)
    measured_outputs = _add_measurements(model.graph, floats, opset_versions(model)[""])
    return open_with_outputs(model, folder, name, measured_outputs, threads, optimized=False)


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
    measured_outputs: list[str] = []
    for node in list(graph.node):
        outputs = [value for value in node.output if value in floats]
        if is_control_flow(node):
            bodies = subgraphs(node)
            body_outputs = [
                _add_measurements(body, floats, opset, f"{inside}{_SUBGRAPH_MARK}") for body in bodies
            ]
            measured_outputs += (
                _measure_branches(node, body_outputs)
                if node.op_type == "If"
                else _measure_loop(graph, node, body_outputs[0])
            )
        measured_outputs += [
            _max_magnitude(graph, value, f"{MAX_OUTPUT_PREFIX}{value}{inside}") for value in outputs
        ]
        if node.op_type in _SUMMING_OPS and not normalized_domain(node.domain) and node.input[0] in floats:
            measured_outputs.append(
                _sum_magnitudes(graph, node, opset, f"{SUM_PREFIX}{node_key(node)}{inside}")
            )
    return measured_outputs


def _measure_branches(node: Any, names_by_branch: Sequence[Sequence[str]]) -> list[str]:
    """Make an If return the measurements of each branch, and 0 for the branch that is not executed."""
    from onnx import TensorProto, helper

    for body, body_names in zip(subgraphs(node), names_by_branch, strict=True):
        for name in (name for names in names_by_branch for name in names):
            if name not in body_names:
                body.node.append(helper.make_node("Constant", [], [name], value=_zero_node(name, [])))
            body.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
    outer = [name.removesuffix(_SUBGRAPH_MARK) for names in names_by_branch for name in names]
    node.output.extend(outer)
    return outer


def _measure_loop(graph: Any, node: Any, output_names: Sequence[str]) -> list[str]:
    """Make a Loop or Scan return the measurements of its body: the maximum of all iterations, or 0."""
    from onnx import TensorProto, helper

    body = subgraphs(node)[0]
    num_unnamed = len(body.output) - (node.op_type == "Loop") - len(node.output)
    node.output.extend([""] * num_unnamed)
    outer = []
    for name in output_names:
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

    magnitude_node = NodeProto()
    magnitude_node.CopyFrom(node)
    magnitude_node.op_type = {"ReduceMean": "ReduceSum", "ReduceL2": "ReduceSumSquare"}.get(
        node.op_type, node.op_type
    )
    if node.op_type == "ReduceMean" and opset >= _SUM_AXES:
        _axes_to_input(graph, magnitude_node, f"{output}.axes")
    magnitude_node.name, magnitude_node.output[0] = output, f"{output}.bound"
    summed = (
        len(node.input) if node.op_type in ("MatMul", "Gemm", "Conv") else 1
    )  # the second input of a sum are its axes
    for input_index in range(summed):
        if not node.input[input_index]:  # an optional bias
            continue
        magnitude_node.input[input_index] = f"{output}.{input_index}"
        graph.node.append(
            helper.make_node("Abs", [node.input[input_index]], [magnitude_node.input[input_index]])
        )
    graph.node.append(magnitude_node)
    return _max_magnitude(graph, magnitude_node.output[0], output)


_NORM_OPS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
# Of these ONNX Runtime's kernels compute in float32 whatever their inputs are. With float16 inputs up to this
# value a LayerNormalization was within 0.002 of a float32 one.
_NORM_SAFE_MAX = 22976.0
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"


@dataclass
class Fp32Selection:
    """The parts of a graph that remain float32.

    nodes: by the name of their first output. half_norms: norms that do not remain float32, likewise. blocks:
    names of modules with the largest value of their outputs, inputs or sums. norms: names of modules. values:
    those that are too large.
    """

    nodes: set[str] = field(default_factory=set)
    half_norms: set[str] = field(default_factory=set)
    blocks: dict[str, float] = field(default_factory=dict)
    norms: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)


def module_of_nodes(model: Any, module: nn.Module) -> dict[str, str]:
    """Return the innermost module of `module` that each node of an onnx.ModelProto was exported from.

    It is found by the names of the node and of its outputs: simplifying preserves only these.
    """
    module_by_node: dict[str, str] = {}
    for node in model.graph.node:
        scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES_KEY), "[]")
        module_name = ""
        for scope in re.findall(r"'([^']*)'", scopes):
            name = ".".join(part for part in scope.split(".") if not part.startswith("slice("))
            # calls of a replaced forward are named after the caller
            candidate_names = (candidate for candidate in (name, f"{module_name}.{name}") if name)
            module_name = next(
                (candidate for candidate in candidate_names if _submodule(module, candidate) is not None),
                module_name,
            )
        if module_name:
            module_by_node.update(dict.fromkeys((node.name, *node.output), module_name))
    return module_by_node


def select_fp32(
    model: Any,
    module: nn.Module,
    homes: Mapping[str, str],
    ranges: ValueRanges | None,
    half_norms: bool = False,
) -> Fp32Selection:
    """Return the parts of the float32 graph `model` that remain float32.

    Args:
        model: an onnx.ModelProto.
        module: the exported module.
        homes: the module of each node, by `module_of_nodes`.
        ranges: of its values; None if the other precision has the range of float32.
        half_norms: whether norms of one operator may have half-precision inputs and outputs.
    """
    selection = Fp32Selection()
    values = {} if ranges is None else ranges.values
    selection.values = {name for name, value in values.items() if not value <= FP16_SAFE_MAX}
    # a computed weight (Gemma's 1 + w) would be rounded after the sum, and the model's before it
    weights = {name for name, _ in module.named_parameters(remove_duplicate=False)} if half_norms else set()
    block_by_value: dict[str, str] = {}
    for node in model.graph.node:
        block = homes.get(node.name) or homes.get(node.output[0]) or ""
        is_norm = node.op_type in _NORM_OPS
        if is_norm and node.input[1] in weights and values.get(node.input[0], 0.0) <= _NORM_SAFE_MAX:
            selection.half_norms.add(node.output[0])
        elif is_norm or is_norm_module(module, block):
            selection.nodes.add(node.output[0])
            selection.norms.add(block)
        # an optimizer's own nodes are assigned to the module of their inputs
        block = block or next((block_by_value[name] for name in node.input if name in block_by_value), "")
        block_by_value.update(dict.fromkeys(node.output, block))
        largest = [] if ranges is None else ranges.overflows(node)
        if largest and node.output[0] not in selection.nodes:
            selection.nodes.add(node.output[0])
            selection.half_norms.discard(node.output[0])
            selection.blocks[block] = max(*largest, selection.blocks.get(block, 0.0))
    return selection


def is_norm_module(module: nn.Module, block: str) -> bool:
    """Return whether the block is a norm: its weight is a vector."""
    weight = getattr(_submodule(module, block), "weight", None) if block else None
    return isinstance(weight, Tensor) and weight.dim() == 1


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


# of the texts that ranges are measured on: rows, and tokens of the longest
OVERFLOW_ROWS, OVERFLOW_LENGTH = 32, 128
_MAX_NAMED = 5  # blocks in a warning
_PAST, _PRESENT = "past_key_values.", "present."


def overflow_samples(parent: Any, folder: Path, ctx: Context) -> list[TorchReference]:
    """Return samples for measuring overflow, with the tokens of a decoder.

    Args:
        parent: a runner of the torch model, before it is prepared for an export.
        folder: of its tokenizer.
        ctx: with the data; gets a warning if there are none.
    """
    from smelt.export.parity.parity_samples import parity_samples

    batch, is_real = parity_samples(parent, folder, ctx.data, ctx.task, OVERFLOW_ROWS, OVERFLOW_LENGTH)
    if not is_real:
        ctx.warn(
            "made-up-inputs",
            "fp16 overflow was checked on random token ids, where activations may be smaller than on real"
            " texts. Add data: {calibration: FILE}.",
        )
    return [run_as_deployed(parent, sub_batch) for sub_batch in split_batch(batch)]


def convert_graphs_to_half(
    graphs: Sequence[GraphSpec],
    homes: Mapping[str, Mapping[str, str]],
    target: str,
    dtype: str,
    references: Sequence[TorchReference],
    ctx: Context,
) -> dict[str, set[str]]:
    """Convert the finished float32 graphs in `ctx.out` to `dtype`, in place.

    Args:
        graphs: of the model, as they were exported.
        homes: by graph the modules of its nodes (`module_of_nodes`).
        target: of the export.
        dtype: fp16 or bf16.
        references: of `overflow_samples`, for fp16.
        ctx: gets details, and a warning about overflow.

    Returns:
        By graph the modules that remain float32.
    """
    ranges = _collect_ranges(ctx.out, graphs, references, ctx.threads) if dtype == "fp16" else {}
    selections: dict[str, Fp32Selection] = {}
    for graph in graphs:
        path = ctx.out / f"{graph.name}.onnx"
        model = read_graph(path)
        on_cuda = target == "ort-cuda"
        selection = select_fp32(model, graph.module, homes[graph.name], ranges.get(graph.name), on_cuda)
        # those of ort-tensorrt are split into parts of rows as numpy arrays, which have no bf16
        all_caches = dtype == "bf16" and target == "ort-tensorrt"
        nodes = set(selection.nodes)
        if dtype == "fp16":  # the epsilon of a norm is a float32 attribute
            nodes |= nodes_outside_fp16(model) - selection.half_norms
        if dtype == "bf16" and on_cuda:
            nodes |= nodes_without_bf16_kernel(model)
        convert_to_half(model, graph.name, dtype, nodes, _fp32_inputs_outputs(model, selection, all_caches))
        write_graph(model, path)
        selections[graph.name] = selection
    ctx.details["float32"] = _manifest_details(selections)
    if (text := overflow_warning(selections)) is not None:
        ctx.warn("kept-float32", text)
    return {name: {*selection.norms, *selection.blocks} for name, selection in selections.items()}


def _collect_ranges(
    folder: Path, graphs: Sequence[GraphSpec], references: Sequence[TorchReference], threads: int | None
) -> dict[str, ValueRanges]:
    ranges_by_graph = {
        graph.name: measure_ranges(folder, graph.name, references, threads) for graph in graphs
    }
    all_values = [(name, value) for r in ranges_by_graph.values() for name, value in r.values.items()]
    caches = {_PAST + name[len(_PRESENT) :]: value for name, value in all_values if name.startswith(_PRESENT)}
    for ranges in ranges_by_graph.values():
        ranges.values.update(caches)  # the output caches of one call are the inputs of the next
    return ranges_by_graph


def _fp32_inputs_outputs(model: Any, wide: Fp32Selection, all_caches: bool) -> set[str]:
    """Return the inputs and outputs of a graph that remain float32: images, overflows, or `all_caches`."""
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    caches = {name for name in ends if name.startswith((_PAST, _PRESENT))}
    return (ends & (wide.values | {PIXEL_VALUES})) | (caches if all_caches else set())


def _manifest_details(chosen: Mapping[str, Fp32Selection]) -> dict[str, Any]:
    """Return the manifest's details: by graph the blocks with their maxima, and the number of norms."""
    return {
        name: {
            "blocks": {block: float(f"{value:.4g}") for block, value in selection.blocks.items()},
            "norms": len(selection.norms),
        }
        for name, selection in chosen.items()
    }


def overflow_warning(chosen: Mapping[str, Fp32Selection]) -> str | None:
    """Return a sentence about the blocks that would overflow in float16, or None."""
    largest: dict[str, float] = {}
    for selection in chosen.values():
        for block, value in selection.blocks.items():
            largest[block] = max(value, largest.get(block, 0.0))
    if not largest:
        return None
    worst = sorted(largest, key=lambda block: -largest[block])
    block_texts = ", ".join(
        f"{block or 'the whole model'} ({largest[block]:,.0f})" for block in worst[:_MAX_NAMED]
    )
    more_text = f" and {len(worst) - _MAX_NAMED} more" if len(worst) > _MAX_NAMED else ""
    blocks = "1 block remains" if len(worst) == 1 else f"{len(worst)} blocks remain"
    return (
        f"fp16: {blocks} float32, because values or sums are close to or above float16's maximum (65,504;"
        f" limit {FP16_SAFE_MAX:,.0f}): {block_texts}{more_text}."
    )
