"""Write group-wise weights as a blocked DequantizeLinear that uses the stored bytes of the matrix.

    weights uint4 [N, G g], zeros uint4 [N, G], scales float16 [N, G] -- Cast -- DequantizeLinear float32

OpenVINO multiplies such weights without converting them to float. Scales are stored as float16 and cast
first, because the operator would return float16 weights otherwise. The midpoint is written as zero points.
Weights with other readers, as bytes, are stored a second time: a tensor of ONNX has one type.

TensorRT reads signed weights, and scales of its compute type:

    weights int4 [G g, N], scales float32 [G, N] -- DequantizeLinear float32, axis 0
    weights int4 [N, G g], scales float32 [N, G] -- DequantizeLinear float32, axis 1, for tables

Shapes: N = outputs, G = groups of a row, g = group size.
"""

from __future__ import annotations

from typing import Any

from smelt.core.errors import InputError
from smelt.quantization.emit import SIGNED_BLOCK_OPS
from smelt.runtimes.openvino_backend import ACTIVATION_BLOCKS

# a byte of midpoints, two of them for 4 bits
_ZERO_BYTES = {4: 0x88, 8: 0x80}


def expand_blocked_weights(model: Any, node: Any) -> list[Any]:
    """Return the nodes that replace the placeholder `node`, and add its constants to `model`.

    Raises:
        InputError: other layers of this graph round their activations in another way.
    """
    from onnx import TensorProto, helper

    graph, result = model.graph, node.output[0]
    if node.op_type in SIGNED_BLOCK_OPS:
        return [_signed_blocks(graph, node, SIGNED_BLOCK_OPS[node.op_type])]
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    bits, size = attributes["bits"], attributes["block_size"]
    _record_rounding(model, size if attributes["rounds"] else 0)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    codes, scales, *zeros = node.input
    rows, groups = tensors[scales].dims
    kind = TensorProto.UINT4 if bits == 4 else TensorProto.UINT8
    _reinterpret_tensor(graph, tensors[codes], f"{result}.codes", kind, (rows, groups * size))
    if zeros:
        _reinterpret_tensor(graph, tensors[zeros[0]], f"{result}.zeros", kind, (rows, groups))
    else:
        middle = bytes([_ZERO_BYTES[bits]]) * -(-rows * groups * bits // 8)
        zero_points = helper.make_tensor(f"{result}.zeros", kind, (rows, groups), middle, raw=True)
        graph.initializer.append(zero_points)
    wide = f"{result}.scales"
    inputs = [f"{result}.codes", wide, f"{result}.zeros"]
    return [
        helper.make_node("Cast", [scales], [wide], f"{result}.cast", to=TensorProto.FLOAT),
        helper.make_node(
            "DequantizeLinear", inputs, [result], f"{result}.dequantize", axis=1, block_size=size
        ),
    ]


def drop_unused_constants(graph: Any, names: set[str]) -> None:
    """Remove the constants `names` from a graph if none of its nodes reads them."""
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name not in names or tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _signed_blocks(graph: Any, node: Any, axis: int) -> Any:
    """Return the node that replaces the placeholder `node` of signed weights; add its weights to `graph`."""
    from onnx import TensorProto, helper

    result, (codes, scales) = node.output[0], node.input
    (size,) = [
        helper.get_attribute_value(attribute)
        for attribute in node.attribute
        if attribute.name == "block_size"
    ]
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    first, second = tensors[scales].dims
    shape = (first * size, second) if axis == 0 else (first, second * size)
    _reinterpret_tensor(graph, tensors[codes], f"{result}.codes", TensorProto.INT4, shape)
    inputs = [f"{result}.codes", scales]
    return helper.make_node(
        "DequantizeLinear", inputs, [result], f"{result}.dequantize", axis=axis, block_size=size
    )


def _reinterpret_tensor(graph: Any, tensor: Any, name: str, kind: int, shape: tuple[int, int]) -> None:
    """Add the bytes of `tensor`, which may be external, as a tensor of another type and shape."""
    copy = graph.initializer.add()
    copy.CopyFrom(tensor)
    copy.name, copy.data_type = name, kind
    del copy.dims[:]
    copy.dims.extend(shape)


def _record_rounding(model: Any, blocks: int) -> None:
    known = {entry.key: entry.value for entry in model.metadata_props}
    before = known.get(ACTIVATION_BLOCKS)
    if before is None:
        model.metadata_props.add(key=ACTIVATION_BLOCKS, value=str(blocks))
    elif before != str(blocks):
        raise InputError(
            "onnx: target openvino: OpenVINO quantizes all activations of a graph in the same way, but layers"
            f" of this model need {_element_name(before)} and {_element_name(str(blocks))}. Quantize all"
            " layers with the same group_size and accuracy_level.",
            code="mixed-group-sizes",
        )


def _element_name(blocks: str) -> str:
    return "float activations" if blocks == "0" else f"activations in blocks of {blocks}"
