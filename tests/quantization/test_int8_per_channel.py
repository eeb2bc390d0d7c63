"""int8 codes with one scale for a matrix: against ONNX Runtime's quantizer and operators, and in graphs."""

import numpy as np
import pytest
import torch
from onnx import TensorProto
from onnxruntime.quantization.quant_utils import quantize_data
from torch import nn
from torch.nn import functional as F

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.export.graphs.attention import GraphSpec
from smelt.export.graphs.export_graph import export_graph
from smelt.export.parity.references import dequantize_graph
from smelt.export.simplify_graph import expand_placeholders
from smelt.quantization.layers import concat_quantized
from smelt.quantization.schemes.registry import default_options, find_scheme, is_row_independent
from tests.support import schemes
from tests.support.graphs.ort_sessions import needs_vnni

WHOLE = {"granularity": "tensor"}
# the operator of a product, and which of its inputs holds the scales of the weights
PRODUCTS = {"int8-dynamic": ("DynamicQuantizeMatMul", 2), "int8-static": ("MatMulIntegerToFloat", 3)}
EACH = pytest.mark.parametrize("scheme", PRODUCTS)


def layer(scheme="int8-dynamic", outputs=40, seed=0, granularity="tensor", scale=1.0):
    torch.manual_seed(seed)
    plain = nn.Linear(48, outputs)
    plain.weight.data *= scale
    return schemes.with_activation_range(plain, scheme, {"granularity": granularity}, largest=2.5).eval()


@EACH
def test_weights_and_scale_equal_the_onnx_runtime_quantizer(scheme):
    torch.manual_seed(0)
    weight = torch.randn(30, 70)
    weight[3] *= 20  # it alone decides the scale
    weight[5] = 0
    _, scale, codes = quantize_data(weight.numpy(), TensorProto.INT8, symmetric=True)
    matrix = schemes.rounded_matrix(scheme, weight, **WHOLE)
    assert matrix.codes.numpy().tolist() == np.asarray(codes).tolist()
    assert matrix.scales.numpy() == pytest.approx(np.full(30, scale), rel=1e-6)
    assert matrix.scales.unique().numel() == 1
    assert int(matrix.codes.abs().max(dim=1).values.min()) == 0 < int(matrix.codes[0].abs().max()) < 30


def test_zero_matrix_has_scale_1():
    matrix = schemes.rounded_matrix("int8-dynamic", torch.zeros(3, 4), **WHOLE)
    assert matrix.scales.tolist() == [1.0, 1.0, 1.0]
    assert not matrix.codes.any()


@EACH
def test_weights_beyond_a_clipped_range_get_the_outermost_levels(scheme):
    codes = find_scheme(scheme).quantize(torch.tensor([[[-200.0, 200.0]]]), {"scales": torch.ones(1, 1)}, {})
    assert codes.tolist() == [[[-127, 127]]]


@EACH
def test_rows_are_dependent_if_all_share_one_scale(scheme):
    definition = find_scheme(scheme)
    options = default_options(definition)
    assert not definition.is_per_tensor(options)
    assert is_row_independent(definition, 48, options)
    assert not is_row_independent(definition, 48, options | WHOLE)
    assert not schemes.rounded_matrix(scheme, torch.randn(3, 4), **WHOLE).is_row_independent()


def scales_in(graph, scheme):
    """The shapes of the scales of all products of a graph."""
    operator, input_index = PRODUCTS[scheme]
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.graph.initializer}
    return [shapes[node.input[input_index]] for node in graph.graph.node if node.op_type == operator]


@needs_vnni
@EACH
def test_graph_stores_a_scalar_if_all_scales_are_equal(scheme):
    first, other = layer(scheme), layer(scheme, 24, seed=1, scale=3)
    joined, rows = concat_quantized([first, other]), layer(scheme, granularity="channel")
    same = concat_quantized([first, first])
    layers, x = [first, joined, same, rows], torch.randn(2, 5, 48)
    assert joined.matrix.scales.unique().numel() == 2
    graph = schemes.export_layers(layers, x)
    assert scales_in(graph, scheme) == [[], [64], [], [40]]
    with torch.inference_mode():
        for module, output in zip(layers, schemes.run_onnx_runtime(layers, x), strict=True):
            assert np.abs(module(x).numpy() - output).max() < 1e-5


def test_blocked_form_repeats_the_scale_and_the_other_variant_has_a_scalar():
    matrix = layer().matrix
    _, plain = matrix.scheme.variant_node(matrix, "x", "y")
    assert {name: list(tensor.shape) for name, tensor in plain.items()} == {
        "y.columns": [48, 40],
        "y.scale": [],
    }
    before = matrix.dequantize()
    matrix.select_variant("MatMulNBits")
    _, blocks = matrix.scheme.variant_node(matrix, "x", "y")
    assert list(blocks["y.block_scales"].shape) == [40, 2]
    stored = (blocks["y.blocks"].float() - 128) * blocks["y.block_scales"][..., None]
    assert stored.flatten(1)[:, :48].equal(before)


class Tied(nn.Module):
    """A lookup and a product of one matrix."""

    def __init__(self, scheme):
        super().__init__()
        self.attentions = ()
        self.head = layer(scheme)
        self.words = quantize_module(nn.Embedding(40, 48), scheme, self.head.matrix.options)
        self.words.matrix = self.head.matrix

    def forward(self, ids):
        return self.head(self.words(ids))


@needs_vnni
@EACH
def test_tied_embedding_has_one_scale_and_an_exact_dequantized_copy(scheme):
    model, ids = Tied(scheme).eval(), torch.tensor([[1, 3, 7]])
    graph = GraphSpec("model", model, (ids,), ["ids"], ["out"], ({1: "length"},))
    with torch.inference_mode():
        expected = model(ids).numpy()
        exact = F.linear(model.words(ids), model.head.matrix.dequantize(), model.head.bias).numpy()
    onnx_model = export_graph(graph, "ort-cpu", 20)
    expand_placeholders(onnx_model)
    assert scales_in(onnx_model, scheme) == [[]]
    assert [node.op_type for node in onnx_model.graph.node].count("Gather") == 1  # of codes, and of no scales
    assert np.abs(run(onnx_model, ids) - expected).max() < 1e-5 * expected.std()
    assert dequantize_graph(onnx_model) == 1
    assert np.abs(run(onnx_model, ids) - exact).max() < 1e-5 * exact.std()


def run(model, ids):
    import onnxruntime

    from smelt.runtimes.onnx_session import session_options

    session_arguments = model.SerializeToString(), session_options()
    session = onnxruntime.InferenceSession(*session_arguments, providers=["CPUExecutionProvider"])
    return session.run(None, {"ids": ids.numpy()})[0]


@pytest.mark.parametrize("target", ["tensorrt", "openvino"])
def test_other_targets_get_one_scale_per_channel(target):
    module = nn.Sequential(layer("int8-static"))
    module.attentions = ()
    graph = GraphSpec("model", module, (torch.randn(3, 48),), ["x"], ["y"], ({0: "rows"},))
    onnx_model = export_graph(graph, target, 20)
    expand_placeholders(onnx_model)
    shapes = {tensor.name: list(tensor.dims) for tensor in onnx_model.graph.initializer}
    scale_names = [n.input[1] for n in onnx_model.graph.node if n.op_type == "DequantizeLinear"]
    assert [40] in [shapes.get(name) for name in scale_names]
