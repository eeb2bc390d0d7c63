"""Weights in groups as a blocked DequantizeLinear, whose codes are the bytes that the matrix is stored in.

    codes uint4 [N, G g], zeros uint4 [N, G], scales float16 [N, G] -- Cast -- DequantizeLinear float32

OpenVINO multiplies such codes without making floats of them. Scales are stored as float16, and widened first:
from those as they are the operator would make weights of float16. The middle is written as zero points. Codes
that somebody else reads too, as bytes, are in the graph a second time: a tensor of ONNX has one type.

TensorRT reads signed ones, and scales of the type that it multiplies in:

    codes int4 [G g, N], scales float32 [G, N] -- DequantizeLinear float32, axis 0
    codes int4 [N, G g], scales float32 [N, G] -- DequantizeLinear float32, axis 1, of tables

Shapes: N = outputs, G = groups of a row, g = group size.
"""

from __future__ import annotations

from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.backends.openvino_module import ACTIVATION_BLOCKS
from smelt.runtime.layers.emit_blocks import SIGNED

# a byte of middle codes, two of them where they have 4 bits
_MIDDLE = {4: 0x88, 8: 0x80}


def blocked_weights(model: Any, node: Any) -> list[Any]:
    """Return the nodes that the place-holder `node` becomes, and put its constants into `model`.

    Raises:
        InputError: other products of this graph round their activations in another way.
    """
    from onnx import TensorProto, helper

    graph, result = model.graph, node.output[0]
    if node.op_type in SIGNED:
        return [_signed(graph, node, SIGNED[node.op_type])]
    said = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    bits, size = said["bits"], said["block_size"]
    _say_rounding(model, size if said["rounds"] else 0)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    codes, scales, *zeros = node.input
    rows, groups = tensors[scales].dims
    kind = TensorProto.UINT4 if bits == 4 else TensorProto.UINT8
    _again(graph, tensors[codes], f"{result}.codes", kind, (rows, groups * size))
    if zeros:
        _again(graph, tensors[zeros[0]], f"{result}.zeros", kind, (rows, groups))
    else:
        middle = bytes([_MIDDLE[bits]]) * -(-rows * groups * bits // 8)
        made = helper.make_tensor(f"{result}.zeros", kind, (rows, groups), middle, raw=True)
        graph.initializer.append(made)
    wide = f"{result}.scales"
    inputs = [f"{result}.codes", wide, f"{result}.zeros"]
    return [
        helper.make_node("Cast", [scales], [wide], f"{result}.cast", to=TensorProto.FLOAT),
        helper.make_node(
            "DequantizeLinear", inputs, [result], f"{result}.dequantize", axis=1, block_size=size
        ),
    ]


def drop_unread(graph: Any, names: set[str]) -> None:
    """Take the constants `names` out of a graph as far as none of its nodes reads them."""
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name not in names or tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _signed(graph: Any, node: Any, axis: int) -> Any:
    """Return the node that the place-holder `node` of signed codes becomes; put its codes into `graph`."""
    from onnx import TensorProto, helper

    result, (codes, scales) = node.output[0], node.input
    (size,) = [helper.get_attribute_value(one) for one in node.attribute if one.name == "block_size"]
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    first, second = tensors[scales].dims
    shape = (first * size, second) if axis == 0 else (first, second * size)
    _again(graph, tensors[codes], f"{result}.codes", TensorProto.INT4, shape)
    inputs = [f"{result}.codes", scales]
    return helper.make_node(
        "DequantizeLinear", inputs, [result], f"{result}.dequantize", axis=axis, block_size=size
    )


def _again(graph: Any, tensor: Any, name: str, kind: int, shape: tuple[int, int]) -> None:
    """Add the bytes of `tensor`, which may lie outside, as a tensor of another type and shape."""
    made = graph.initializer.add()
    made.CopyFrom(tensor)
    made.name, made.data_type = name, kind
    del made.dims[:]
    made.dims.extend(shape)


def _say_rounding(model: Any, blocks: int) -> None:
    known = {said.key: said.value for said in model.metadata_props}
    before = known.get(ACTIVATION_BLOCKS)
    if before is None:
        model.metadata_props.add(key=ACTIVATION_BLOCKS, value=str(blocks))
    elif before != str(blocks):
        raise InputError(
            f"onnx: target openvino: OpenVINO rounds the activations of a graph in blocks of one size, and"
            f" these products want {_words(before)} and {_words(str(blocks))}. Quantize all layers with the"
            " same group_size and accuracy_level.",
            code="mixed-group-sizes",
        )


def _words(blocks: str) -> str:
    return "none rounded" if blocks == "0" else f"blocks of {blocks}"
