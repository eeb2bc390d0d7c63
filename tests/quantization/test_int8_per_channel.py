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
from smelt.quantization.schemes.registry import find_scheme, is_row_independent
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
def test_codes_and_scale_are_those_of_onnx_runtimes_quantizer(scheme):
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


def test_a_matrix_of_zeros_has_scale_1():
    matrix = schemes.rounded_matrix("int8-dynamic", torch.zeros(3, 4), **WHOLE)
    assert matrix.scales.tolist() == [1.0, 1.0, 1.0]
    assert not matrix.codes.any()


@EACH
def test_weights_beyond_a_range_that_was_cut_have_the_outermost_codes(scheme):
    codes = find_scheme(scheme).quantize(torch.tensor([[[-200.0, 200.0]]]), {"scales": torch.ones(1, 1)}, {})
    assert codes.tolist() == [[[-127, 127]]]


@EACH
def test_no_row_is_decided_alone_where_all_have_one_scale(scheme):
    found = find_scheme(scheme)
    assert not found.is_per_tensor({"granularity": "channel"})
    assert is_row_independent(found, 48, {"granularity": "channel"})
    assert not is_row_independent(found, 48, WHOLE)
    assert not schemes.rounded_matrix(scheme, torch.randn(3, 4), **WHOLE).is_row_independent()


def scales_in(graph, scheme):
    """The shapes of the scales of all products of a graph."""
    operator, place = PRODUCTS[scheme]
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.graph.initializer}
    return [shapes[node.input[place]] for node in graph.graph.node if node.op_type == operator]


@needs_vnni
@EACH
def test_the_graph_holds_a_scalar_where_all_scales_of_a_product_are_one(scheme):
    one, other = layer(scheme), layer(scheme, 24, seed=1, scale=3)
    both, rows = concat_quantized([one, other]), layer(scheme, granularity="channel")
    same = concat_quantized([one, one])
    layers, x = [one, both, same, rows], torch.randn(2, 5, 48)
    assert both.matrix.scales.unique().numel() == 2
    graph = schemes.export_layers(layers, x)
    assert scales_in(graph, scheme) == [[], [64], [], [40]]
    with torch.inference_mode():
        for found, got in zip(layers, schemes.run_onnx_runtime(layers, x), strict=True):
            assert np.abs(found(x).numpy() - got).max() < 1e-5


def test_the_form_of_blocks_repeats_the_scale_and_the_other_node_that_is_timed_has_a_scalar():
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
        self.words = quantize_module(nn.Embedding(40, 48), scheme, WHOLE)
        self.words.matrix = self.head.matrix

    def forward(self, ids):
        return self.head(self.words(ids))


@needs_vnni
@EACH
def test_a_table_that_is_the_head_too_has_one_scale_in_both_and_an_exact_twin(scheme):
    model, ids = Tied(scheme).eval(), torch.tensor([[1, 3, 7]])
    graph = GraphSpec("model", model, (ids,), ["ids"], ["out"], ({1: "length"},))
    with torch.inference_mode():
        expected = model(ids).numpy()
        exact = F.linear(model.words(ids), model.head.matrix.dequantize(), model.head.bias).numpy()
    made = export_graph(graph, "ort-cpu", 20)
    expand_placeholders(made)
    assert scales_in(made, scheme) == [[]]
    assert [node.op_type for node in made.graph.node].count("Gather") == 1  # of codes, and of no scales
    assert np.abs(run(made, ids) - expected).max() < 1e-5 * expected.std()
    assert dequantize_graph(made) == 1
    assert np.abs(run(made, ids) - exact).max() < 1e-5 * exact.std()


def run(model, ids):
    import onnxruntime

    from smelt.runtimes.onnx_backend import session_options

    given = model.SerializeToString(), session_options()
    session = onnxruntime.InferenceSession(*given, providers=["CPUExecutionProvider"])
    return session.run(None, {"ids": ids.numpy()})[0]


@pytest.mark.parametrize("target", ["tensorrt", "openvino"])
def test_for_others_a_scale_is_said_for_every_channel(target):
    module = nn.Sequential(layer("int8-static"))
    module.attentions = ()
    graph = GraphSpec("model", module, (torch.randn(3, 48),), ["x"], ["y"], ({0: "rows"},))
    made = export_graph(graph, target, 20)
    expand_placeholders(made)
    shapes = {tensor.name: list(tensor.dims) for tensor in made.graph.initializer}
    given = [n.input[1] for n in made.graph.node if n.op_type == "DequantizeLinear"]
    assert [40] in [shapes.get(name) for name in given]
