"""Simplify exported graphs with onnxsim, and expand their placeholder operators into standard ONNX operators.

A simplified graph is kept only if it computes the same.

Layers emit placeholders of the domain `smelt.load` (smelt/quantization/emit.py) to unpack quantized weights
with a table of their scheme, to widen scales, to transpose a matrix and to dequantize. torch's optimizer and
onnxsim would fold standard operators and store the result, a file 16 times as large for 1-bit weights. So
placeholders are expanded last. ONNX Runtime folds the operators when a session is opened.

    stored uint8 [N, G, n] -- Cast int32 -- Gather of a table [256, t] -- Reshape -- codes uint8 [N, G, t n]

Group-wise weights become a blocked DequantizeLinear that uses the stored bytes of the matrix:

    weights uint4 [N, G g], zeros uint4 [N, G], scales float16 [N, G] -- Cast -- DequantizeLinear float32

OpenVINO multiplies such weights without converting them to float. float16 scales are cast first, because the
operator would return float16 weights. The midpoint is written as zero points. Weights with other readers, as
bytes, are stored a second time: a tensor of ONNX has one type.

TensorRT reads signed weights, and scales of its compute type:

    weights int4 [G g, N], scales float32 [G, N] -- DequantizeLinear float32, axis 0
    weights int4 [N, G g], scales float32 [N, G] -- DequantizeLinear float32, axis 1, for tables

Shapes: N = outputs, G = groups of a row, g = group size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError
from smelt.core.messages import Message, warning
from smelt.export.graph_files import (
    external_data_path,
    has_external_data,
    inline_weight_bytes,
    link_external_data,
    read_graph,
    write_graph,
)
from smelt.quantization.emit import (
    BLOCKWISE_OP,
    DEQUANTIZE_OPS,
    LOAD_TIME_DOMAIN,
    SIGNED_BLOCK_OPS,
)
from smelt.quantization.scheme import NVIDIA_DOMAIN, Expansion, QuantizedGraph
from smelt.quantization.schemes.registry import placeholder_expansions, replace_with_float_nodes
from smelt.runtimes.float4 import has_float4
from smelt.runtimes.openvino_backend import ACTIVATION_BLOCKS

# a byte of midpoints, two of them for 4 bits
_ZERO_BYTES = {4: 0x88, 8: 0x80}


def _expand_blocks(graph: QuantizedGraph, node: Any) -> list[Any]:
    """Return the nodes that dequantize unsigned weights with a scale for each block of inputs."""
    from onnx import TensorProto, helper

    result = node.output[0]
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    bits, size = attributes["bits"], attributes["block_size"]
    codes, scales, *zeros = node.input
    num_rows, groups = graph.shapes[scales]
    kind = TensorProto.UINT4 if bits == 4 else TensorProto.UINT8
    graph.reinterpret_constant(codes, f"{result}.codes", kind, (num_rows, groups * size))
    if zeros:
        graph.reinterpret_constant(zeros[0], f"{result}.zeros", kind, (num_rows, groups))
    else:
        middle = bytes([_ZERO_BYTES[bits]]) * -(-num_rows * groups * bits // 8)
        graph.add_tensor(helper.make_tensor(f"{result}.zeros", kind, (num_rows, groups), middle, raw=True))
    scale_name = f"{result}.scales"
    inputs = [f"{result}.codes", scale_name, f"{result}.zeros"]
    return [
        helper.make_node("Cast", [scales], [scale_name], f"{result}.cast", to=TensorProto.FLOAT),
        helper.make_node(
            "DequantizeLinear", inputs, [result], f"{result}.dequantize", axis=1, block_size=size
        ),
    ]


def drop_unused_constants(graph: Any, names: set[str]) -> None:
    """Remove the constants `names` from a graph if none of its nodes reads them."""
    used_names = {name for node in graph.node for name in node.input} | {
        output.name for output in graph.output
    }
    used_tensors = [
        tensor for tensor in graph.initializer if tensor.name not in names or tensor.name in used_names
    ]
    del graph.initializer[:]
    graph.initializer.extend(used_tensors)


def _expand_signed_blocks(graph: QuantizedGraph, node: Any) -> list[Any]:
    """Return the node that dequantizes signed 4-bit weights with a scale for each block of inputs."""
    from onnx import TensorProto, helper

    axis = SIGNED_BLOCK_OPS[node.op_type]
    result, (codes, scales) = node.output[0], node.input
    size = next(attribute.i for attribute in node.attribute if attribute.name == "block_size")
    first, second = graph.shapes[scales]
    shape = (first * size, second) if axis == 0 else (first, second * size)
    graph.reinterpret_constant(codes, f"{result}.codes", TensorProto.INT4, shape)
    inputs, name = [f"{result}.codes", scales], f"{result}.dequantize"
    return [helper.make_node("DequantizeLinear", inputs, [result], name, axis=axis, block_size=size)]


def _record_rounding(model: Any, node: Any) -> None:
    """Record in which blocks OpenVINO is to round the activations of a graph.

    Raises:
        InputError: other layers of this graph round their activations in another way.
    """
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    blocks = attributes["block_size"] if attributes["rounds"] else 0
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    previous_blocks = metadata.get(ACTIVATION_BLOCKS)
    if previous_blocks is None:
        model.metadata_props.add(key=ACTIVATION_BLOCKS, value=str(blocks))
    elif previous_blocks != str(blocks):
        raise InputError(
            "onnx: target openvino: OpenVINO quantizes all activations of a graph in the same way, but layers"
            f" of this model need {_element_name(previous_blocks)} and {_element_name(str(blocks))}. "
            "Quantize all"
            " layers with the same group_size and accuracy_level.",
            code="mixed-group-sizes",
        )


def _element_name(blocks: str) -> str:
    return "float activations" if blocks == "0" else f"activations in blocks of {blocks}"


# surrounds every 3-D matrix multiplication with Reshape, Shape and Concat: 85 nodes became 153
_SKIPPED_PASSES = ["fuse_matmul_add_bias_into_gemm_batched"]
_TOLERANCE = 1e-4  # largest difference, of an output's standard deviation
_MAX_VALUE_FACTOR = 0.1  # same, of the largest value: many outputs are near 0 except for a few
# memory of onnxsim 0.8.1 for a graph of 2.4 GB
_COPIES_OUTSIDE = 3
_LARGE_WEIGHT_BYTES = 2**20  # norms, whose values may fold, are smaller
_WHOLE_GRAPH_BYTES = 2**27  # onnxsim gets a smaller graph with all weights, and holds five copies of them


def simplify_file(path: Path, tokens: NDArray[np.int64] | None) -> Message | None:
    """Simplify the graph in `path` in place; its placeholders are expanded in either case.

    Args:
        path: of the graph, whose weights may be external.
        tokens: int64 [n], real tokens for the comparison; None for a graph without token inputs.

    Returns:
        None if it was simplified, else a warning with the reason why the graph was not changed.
    """
    with TemporaryDirectory(dir=path.parent, prefix=".simplify-") as folder:
        candidate = Path(folder, path.name)
        failed = _write_simplified(path, candidate)
        expand_placeholders_in_file(path)
        if failed is not None:
            return failed
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


def _write_simplified(path: Path, candidate: Path) -> Message | None:
    """Write the simplified graph of `path` to `candidate`, without placeholders; return why it failed.

    No graph stays in memory: the next one is read with its weights.
    """
    simplified = _run_on_structure(path, candidate.parent)
    if isinstance(simplified, Message):
        return simplified
    expand_placeholders(simplified)  # they can be simplified around, but not run
    write_graph(simplified, candidate)
    return None


def _file_size(path: Path) -> int:

    return sum(file.stat().st_size for file in (path, external_data_path(path)) if file.is_file())


def _run_on_structure(path: Path, folder: Path) -> Any:
    """Return the graph in `path` after onnxsim, or a warning; onnxsim does not get large weights.

    External ones are not read. torch's exporter has folded what depends on weights only: they are inputs
    here. `folder` gets links.
    """
    from onnx import helper
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data
    from onnx.external_data_helper import load_external_data_for_tensor as load_values

    model = read_graph(path, values=False)
    if not has_external_data(model) and inline_weight_bytes(model) < _WHOLE_GRAPH_BYTES:
        return run_onnxsim(path, folder)
    large, small = [], []
    for tensor in model.graph.initializer:
        size = ExternalDataInfo(tensor).length if uses_external_data(tensor) else len(tensor.raw_data)
        if (size or 0) >= _LARGE_WEIGHT_BYTES:
            large.append(tensor)
            continue
        if uses_external_data(tensor):
            load_values(tensor, str(path.parent))
            tensor.data_location = tensor.DEFAULT
            del tensor.external_data[:]
        small.append(tensor)
    del model.graph.initializer[:]
    model.graph.initializer.extend(small)
    names = {tensor.name for tensor in large}
    model.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in large)
    simplified = _simplify(model)
    if isinstance(simplified, Message):
        return simplified
    inputs = [value for value in simplified.graph.input if value.name not in names]
    del simplified.graph.input[:]
    simplified.graph.input.extend(inputs)
    simplified.graph.initializer.extend(large)
    drop_unused_constants(simplified.graph, names)
    link_external_data(simplified, path.parent, folder)
    return simplified


def _simplify(source: Any, **more: Any) -> Any:
    """Return the result of onnxsim for a graph, or a warning if it failed."""
    import onnxsim

    try:
        simplified, is_valid = onnxsim.simplify(source, skipped_optimizers=list(_SKIPPED_PASSES), **more)
    except Exception as error:  # a C++ extension: whatever it raises, the unsimplified graph is valid
        return warning("onnxsim-failed", f"onnxsim failed: {error}")
    return simplified if is_valid else warning("onnxsim-check-failed", "onnxsim's check of its result failed")


def run_onnxsim(path: Path, folder: Path) -> Any:
    """Return the graph in `path` after onnxsim, with its weights, or a warning if onnxsim failed."""
    import onnxsim

    from smelt.core.system import available_bytes

    structure = read_graph(path, values=False)
    if not (is_external := has_external_data(structure)):
        source, options = structure, {}
    elif "output_path" not in inspect.signature(onnxsim.simplify).parameters:
        text = "the installed onnxsim does not support external weights. Install version 0.8 or newer"
        return warning("outdated-package", text)
    elif (needed_bytes := _COPIES_OUTSIDE * _file_size(path)) > (free_bytes := available_bytes()):
        text = (
            f"onnxsim needs about {needed_bytes / 1e9:.1f} GB of memory, but "
            f"{free_bytes / 1e9:.1f} GB are free"
        )
        return warning("out-of-memory", text)
    else:
        source, options = str(path), {"output_path": str(folder / "onnxsim.onnx")}
    simplified = _simplify(source, **options)
    if isinstance(simplified, Message) or not is_external:
        return simplified
    try:
        return read_graph(folder / "onnxsim.onnx")
    except RunError as error:
        return warning("onnxsim-failed", f"onnxsim failed: its result cannot be read: {error}")


def _float_difference(first: Path, second: Path, tokens: NDArray[np.int64] | None) -> float:
    """Compare two graphs; where they differ, compare them again without activation quantization.

    It turns a difference in the last digit of a sum, which a simplifier may reorder, into a different int8
    value. Both graphs must quantize activations in the same way.
    """
    from smelt.export.parity.references import make_dequantized_copy

    difference = _max_difference(first, second, tokens)
    if (
        difference <= _TOLERANCE
        or not (rounding := _rounding_signature(first))
        or rounding != _rounding_signature(second)
    ):
        return difference
    with ExitStack() as stack:
        first_tokens, other = (
            stack.enter_context(make_dequantized_copy(path.parent, [path.stem], widen=False)) / path.name
            for path in (first, second)
        )
        return _max_difference(first_tokens, other, tokens)


def _rounding_signature(path: Path) -> list[tuple[str, ...]]:
    """Return how a graph quantizes activations: operator attributes and constants of QuantizeLinear."""
    from onnx import numpy_helper

    graph = read_graph(path, values=False).graph
    view = QuantizedGraph(graph)
    values = {tensor.name: tensor for tensor in graph.initializer}
    signatures, folder = [], str(path.parent)
    for node in graph.node:
        parts = [str(attribute) for attribute in node.attribute]
        if node.op_type == "QuantizeLinear" or replace_with_float_nodes(node, view) is not None:
            grid = node.input[1:] if node.op_type == "QuantizeLinear" else ()
            parts += [
                str(numpy_helper.to_array(values[name], folder).tolist()) for name in grid if name in values
            ]
            signatures.append((node.op_type, *sorted(parts)))
    return sorted(signatures)


def _max_difference(first: Path, second: Path, tokens: NDArray[np.int64] | None) -> float:
    """Run both graphs on the same inputs; return the largest difference relative to an output's spread.

    Batches of two sizes are run, because a simplifier may have fixed one of them in the graph.
    """
    from smelt.export.parity.parity_samples import (
        EXAMPLE_LENGTHS,
        OTHER_EXAMPLE_LENGTHS,
        example_feeds,
        without_padding,
    )
    from smelt.runtimes.onnx_session import open_onnx_session

    def outputs(path: Path) -> Iterator[tuple[str, NDArray[Any], dict[str, Any]]]:
        session = open_onnx_session(path, threads=1)
        names = [output.name for output in session.get_outputs()]
        for lengths in (EXAMPLE_LENGTHS, OTHER_EXAMPLE_LENGTHS):
            for feeds in example_feeds(session, tokens, lengths):
                for name, value in zip(names, session.run(names, feeds), strict=True):
                    yield name, value, feeds

    worst = 0.0
    try:
        expected = list(outputs(first))  # one session after the other: each holds the weights
        for (name, a, feeds), (_, b, _) in zip(expected, outputs(second), strict=True):
            unpadded = without_padding(name, a, feeds), without_padding(name, b, feeds)
            worst = max(worst, _relative_difference(*unpadded))
    except Exception:  # it does not load or has other inputs; ONNX Runtime's errors share no other base class
        return float("inf")
    return worst


def _relative_difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the largest difference of two outputs of one graph, infinite if they are not comparable."""
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    std = float(np.std(a, dtype=np.float64)) or 1.0
    scale = max(std, _MAX_VALUE_FACTOR * float(np.abs(a).max(initial=0.0)))
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) / scale


_FLOAT4_IR_VERSION = 11  # the first one with FLOAT4E2M1


def expand_placeholders_in_file(path: Path) -> None:
    """Replace the placeholders of the graph in `path`, in place; external weights are not moved."""
    model = read_graph(path, values=False)
    if expand_placeholders(model):
        write_graph(model, path)


def expand_placeholders(model: Any) -> int:
    """Replace the placeholders of an onnx.ModelProto in place; return their number."""
    graph, view, expansions = model.graph, QuantizedGraph(model.graph), _all_expansions()
    nodes = []
    expanded: dict[tuple[str, ...], str] = {}  # a constant is widened once for all its readers
    renamed: dict[str, str] = {}
    for node in graph.node:
        for input_index, name in enumerate(node.input):
            node.input[input_index] = renamed.get(name, name)
        if node.domain != LOAD_TIME_DOMAIN:
            nodes.append(node)
            if node.op_type == "BitwiseOr" and node.input[0] in view.shapes:  # the packed parts are separate
                view.shapes[node.output[0]] = view.shapes[node.input[0]]
            continue
        result = node.output[0]
        first = expanded.setdefault((node.op_type, *node.input), result)
        if first != result:
            renamed[result] = first
            continue
        if node.op_type == BLOCKWISE_OP:
            _record_rounding(model, node)
        nodes += expansions[node.op_type](view, node)
    num_placeholders = len(expanded) + len(renamed)
    if not num_placeholders:
        return 0
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unused_constants(graph, {name for _, *names in expanded for name in names})
    opset_imports = [item for item in model.opset_import if item.domain != LOAD_TIME_DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(opset_imports)
    if any(node.domain == NVIDIA_DOMAIN for node in nodes):
        model.opset_import.add(domain=NVIDIA_DOMAIN, version=1)
    if has_float4(graph):
        model.ir_version = max(model.ir_version, _FLOAT4_IR_VERSION)
    return num_placeholders


def _all_expansions() -> dict[str, Expansion]:
    """Return the expansions of the placeholders of `smelt.quantization.emit`, and of those of the schemes."""
    return {
        "FloatScales": _widen_scales,
        "Transposed": _transpose,
        BLOCKWISE_OP: _expand_blocks,
        **dict.fromkeys(SIGNED_BLOCK_OPS, _expand_signed_blocks),
        **dict.fromkeys(DEQUANTIZE_OPS, _dequantize),
        **placeholder_expansions(),
    }


def _widen_scales(graph: QuantizedGraph, node: Any) -> list[Any]:
    from onnx import TensorProto, helper

    result = node.output[0]
    return [helper.make_node("Cast", node.input, [result], f"{result}.cast", to=TensorProto.FLOAT)]


def _transpose(graph: QuantizedGraph, node: Any) -> list[Any]:
    from onnx import helper

    result = node.output[0]
    return [helper.make_node("Transpose", node.input, [result], f"{result}.turn", perm=[1, 0])]


def _dequantize(graph: QuantizedGraph, node: Any) -> list[Any]:
    """Return the DequantizeLinear of a matrix, with explicit zero points also where all are 0.

    On processors without VNNI ONNX Runtime 1.31 converts unfused int8 weights to uint8. Without zero points
    it adds a single one, and then rejects a single zero point with one scale per row.
    """
    from onnx import helper

    result, axis, inputs = node.output[0], DEQUANTIZE_OPS[node.op_type], list(node.input)
    if len(inputs) == 2:  # symmetric weights
        inputs.append(f"{result}.zeros")
        graph.add_constant(inputs[2], np.zeros(graph.shapes[inputs[1]], dtype=np.int8))
    return [helper.make_node("DequantizeLinear", inputs, [result], f"{result}.dequantize", axis=axis)]
