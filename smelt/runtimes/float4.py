"""Run graphs for TensorRT with 4-bit floats in ONNX Runtime, which has no kernels of them (1.31).

Each number of E2M1 is one of E4M3, which ONNX Runtime dequantizes in blocks, too. So constants are stored in
that type, and TensorRT's operator becomes standard ones. The copy in memory computes the same numbers, for
parity checks and scores on a CPU, and saves nothing.

    scale = E4M3 of min(max |block| / 6 / global scale, 448)
    value = E2M1 of x / (scale * global scale), ties to the even code, at most 6

Source: NVIDIA TensorRT documentation, "Quantization Schemes", "DynamicQuantize".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from smelt.quantization.scheme import NVIDIA_DOMAIN
from smelt.quantization.schemes.float4 import E2M1_MAX
from smelt.quantization.schemes.fp8 import E4M3_MAX
from smelt.quantization.schemes.nvfp4 import BLOCK_SIZE, DYNAMIC_QUANTIZE


def has_float4(graph: Any) -> bool:
    """Return whether an onnx.GraphProto has constants of 4-bit floats (E2M1)."""
    from onnx import TensorProto

    return any(tensor.data_type == TensorProto.FLOAT4E2M1 for tensor in graph.initializer)


def replace_float4(model: Any) -> None:
    """Replace 4-bit floats in an onnx.ModelProto, whose weights are loaded, in place."""
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT4E2M1:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            kind = helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN)
            tensor.CopyFrom(numpy_helper.from_array(values.astype(kind), tensor.name))
    nodes = []
    for node in graph.node:
        is_quantizer = node.op_type == DYNAMIC_QUANTIZE and node.domain == NVIDIA_DOMAIN
        nodes += _quantize_blocks(node) if is_quantizer else [node]
    del graph.node[:]
    graph.node.extend(nodes)
    imports = [entry for entry in model.opset_import if entry.domain != NVIDIA_DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(imports)


def _quantize_blocks(node: Any) -> list[Any]:
    """Return standard nodes for the operator: codes in the shape of x, and the scales of its blocks."""
    from onnx import TensorProto

    codes, scales = node.output
    graph = _Nodes(codes)
    x = graph.add("Cast", node.input[0], to=TensorProto.FLOAT)
    global_scale = graph.add("Cast", node.input[1], to=TensorProto.FLOAT)
    shape = graph.add("Shape", x)
    blocks = graph.add("Reshape", x, graph.constant([-1, BLOCK_SIZE]))
    amax = graph.add("ReduceMax", graph.add("Abs", blocks), graph.constant([1]), keepdims=1)
    ratio = graph.add("Div", graph.add("Div", amax, graph.constant(E2M1_MAX)), global_scale)
    stored = graph.add("Cast", graph.add("Min", ratio, graph.constant(E4M3_MAX)), to=TensorProto.FLOAT8E4M3FN)
    scale = graph.add("Mul", graph.add("Cast", stored, to=TensorProto.FLOAT), global_scale)
    zero, one, two, four = (graph.constant(float(value)) for value in (0, 1, 2, 4))
    divisor = graph.add("Where", graph.add("Equal", scale, zero), one, scale)
    values = graph.add("Div", blocks, divisor)
    # the distance of two numbers is 0.5 below 2, 1 below 4, and 2 above
    size = graph.add("Abs", values)
    wide = graph.add("Where", graph.add("Less", size, four), one, two)
    step = graph.add("Where", graph.add("Less", size, two), graph.constant(0.5), wide)
    rounded = graph.add("Mul", graph.add("Round", graph.add("Div", values, step)), step)
    clipped = graph.add("Clip", rounded, graph.constant(-E2M1_MAX), graph.constant(E2M1_MAX))
    graph.add("Cast", graph.add("Reshape", clipped, shape), to=TensorProto.FLOAT8E4M3FN, result=codes)
    first_axes = graph.add("Slice", shape, graph.constant([0]), graph.constant([-1]))
    blocks_shape = graph.add("Concat", first_axes, graph.constant([-1]), axis=0)
    graph.add("Reshape", stored, blocks_shape, result=scales)
    return graph.nodes


class _Nodes:
    """Nodes whose values have names that begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[Any] = []

    def add(self, op_type: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        from onnx import helper

        name = result or f"{self.prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name, **attributes))
        return name

    def constant(self, value: float | Sequence[int]) -> str:
        """Add a constant: float32 [] or int64 [n]."""
        from onnx import numpy_helper

        array = np.array(value, np.float32 if isinstance(value, float) else np.int64)
        return self.add("Constant", value=numpy_helper.from_array(array))
