"""A scheme of standard operators is one class: its nodes are recognized by their inputs, not their type."""

from typing import ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.export.graphs.attention import GraphSpec
from smelt.export.graphs.export_graph import export_graph
from smelt.export.parity.references import dequantize_graph
from smelt.export.simplify_graph import expand_placeholders
from smelt.quantization.scheme import QuantizedGraph
from smelt.quantization.schemes.int8 import Int8PerChannel
from smelt.quantization.schemes.registry import SCHEMES, owner_of_operator

NAME, PLACEHOLDER = "float8", "Float8Columns"


class Float8(Int8PerChannel):
    """codes: the bytes of float8 (E4M3) [N, K]; scales: float32 [N]."""

    name = NAME
    supports_embeddings = learnable_scales = False
    unsupported_targets: ClassVar = {}
    operators = ("MatMul",)
    tolerance = embedding_tolerance = 0.0

    def compute_qparams(self, groups, width, options):
        amax = groups.abs().amax(dim=-1)
        return {"scales": (amax / torch.finfo(torch.float8_e4m3fn).max).where(amax > 0, 1.0)}

    def quantize(self, groups, grid, options):
        return (groups / grid["scales"][..., None]).to(torch.float8_e4m3fn).view(torch.uint8)

    def dequantize(self, codes, grid, options):
        return codes.view(torch.float8_e4m3fn).float() * grid["scales"][..., None]

    def code_range(self, grid, options):
        return None

    def stored_tensors(self, rows, width, options):
        stored = super().stored_tensors(rows, width, options)
        return stored | {"codes": type(stored["codes"])((rows, width), "uint8")}

    def quantizes_activations(self, options):
        return False

    def linear(self, matrix, x, bias):
        return F.linear(x, matrix.dequantized(), bias)

    def emit_linear(self, matrix, x, bias, target):
        columns, scales = matrix.tensor("columns"), matrix.tensor("scales")
        weight = torch.onnx.ops.symbolic(
            f"smelt.load::{PLACEHOLDER}",
            [columns, scales],
            dtype=torch.float32,
            shape=columns.shape,
            version=1,
        )
        return x @ weight + bias

    def placeholder_expansions(self):
        return {PLACEHOLDER: _expand}

    def owns_operator(self, node, graph):
        maker = graph.maker(node.input[1]) if node.op_type == "MatMul" else None
        return maker is not None and maker.op_type == "DequantizeLinear" and _is_float8(graph, maker)

    def float_activation_nodes(self, node):
        return [node]


def _is_float8(graph, node):
    from onnx import TensorProto

    codes = graph.constant(node.input[0])
    return codes is not None and codes.data_type == TensorProto.FLOAT8E4M3FN


def _expand(graph, node):
    from onnx import TensorProto, helper

    (codes, scales), result = node.input, node.output[0]
    graph.reinterpret_constant(codes, f"{result}.codes", TensorProto.FLOAT8E4M3FN, tuple(graph.shapes[codes]))
    return [helper.make_node("DequantizeLinear", [f"{result}.codes", scales], [result], axis=1)]


class ThreeProducts(nn.Module):
    """Two quantized layers, and a matrix multiplication of two activations."""

    def __init__(self):
        super().__init__()
        self.attentions = ()
        self.first = quantize_module(nn.Linear(64, 32), NAME)
        self.second = quantize_module(nn.Linear(32, 12), NAME)

    def forward(self, x):
        y = self.second(self.first(x))
        return y @ y.transpose(1, 2)


def test_standard_operators_are_matched_to_their_own_matmul_and_equal_torch(monkeypatch):
    import onnxruntime

    monkeypatch.setitem(SCHEMES, NAME, Float8())
    torch.manual_seed(0)
    model, x = ThreeProducts().eval(), torch.randn(1, 5, 64)
    with torch.inference_mode():
        expected = model(x).numpy()
    onnx_model = export_graph(
        GraphSpec("model", model, (x,), ["x"], ["out"], ({1: "length"},)), "ort-cpu", 20
    )
    assert expand_placeholders(onnx_model) == 2
    graph = QuantizedGraph(onnx_model.graph)
    owned = [node for node in onnx_model.graph.node if owner_of_operator(node, graph)]
    assert [node.op_type for node in owned] == ["MatMul", "MatMul"]
    assert sum(node.op_type == "MatMul" for node in onnx_model.graph.node) == 3
    used_names = {name for node in onnx_model.graph.node for name in node.input}
    assert {tensor.name for tensor in onnx_model.graph.initializer} <= used_names
    for _ in range(2):
        session = onnxruntime.InferenceSession(
            onnx_model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        (out,) = session.run(None, {"x": x.numpy()})
        assert np.abs(out - expected).max() < 1e-5 * expected.std()
        dequantize_graph(onnx_model)
