"""int8 weights with zero points: against ONNX Runtime's quantizer and operators, and in graphs."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization.quant_utils import quantize_data
from torch import nn
from torch.nn import functional as F

from smelt.compress.quantize.hqq import _fit_grid as fit_hqq_grid
from smelt.compress.quantize.plan_layers import quantize_module
from smelt.compress.quantize.step_sizes import StepSizes
from smelt.export.parity.references import dequantize_graph
from smelt.quantization.layers import concat_quantized
from smelt.quantization.schemes.registry import default_options, find_scheme, unsupported_scheme_options
from tests.support import schemes
from tests.support.graphs.ort_sessions import needs_vnni

ASYMMETRIC = {"symmetric": False}
# the operator of a product, and which of its inputs holds the zero points of the weights
PRODUCTS = {"int8-dynamic": ("DynamicQuantizeMatMul", 3), "int8-static": ("MatMulIntegerToFloat", 5)}
EACH = pytest.mark.parametrize("scheme", PRODUCTS)
BY = pytest.mark.parametrize("granularity", ["channel", "tensor"])


def shifted(outputs=40, inputs=48, seed=0):
    """A layer whose rows have different ranges, most of them on one side of 0."""
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs)
    layer.weight.data += torch.linspace(-0.3, 0.3, outputs)[:, None]
    layer.weight.data[3] = layer.weight.data[3].abs() + 0.1
    layer.weight.data[4] = -layer.weight.data[4].abs() - 0.1
    return layer


def quantized(scheme, granularity="channel", **more):
    options = ASYMMETRIC | {"granularity": granularity}
    return schemes.with_activation_range(shifted(**more), scheme, options, largest=2.5, lowest=-1.0).eval()


def compute_scale_zp(low, high):
    """`compute_scale_zp` of onnxruntime.quantization for int8, asymmetric, in float64."""
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    scale = (high - low) / 255
    return np.float32(scale), int(np.round(-128 - low / scale))


@EACH
@BY
def test_codes_scales_and_zero_points_equal_the_onnx_runtime_quantizer(scheme, granularity):
    weight = shifted().weight.detach()
    matrix = schemes.rounded_matrix(scheme, weight, granularity=granularity, **ASYMMETRIC)
    parts = [weight] if granularity == "tensor" else list(weight[:, None])
    scales, zeros, codes = [], [], []
    for part in parts:
        zero, scale, quantized_part = quantize_data(part.numpy(), TensorProto.INT8, symmetric=False)
        assert (scale, int(zero)) == compute_scale_zp(part.min(), part.max())
        scales += [scale] * len(part)
        zeros += [int(zero)] * len(part)
        codes += np.asarray(quantized_part).tolist()
    assert matrix.tensor("zeros").tolist() == zeros
    assert matrix.scales.tolist() == [float(scale) for scale in scales]
    assert matrix.codes.tolist() == codes
    assert -128 in zeros or granularity == "tensor"  # of the row without negative weights


def test_rows_of_zeros_are_unchanged_and_one_sided_rows_use_all_codes():
    weight = torch.stack([torch.zeros(16), torch.linspace(0.1, 1.0, 16)])
    matrix = schemes.rounded_matrix("int8-dynamic", weight, **ASYMMETRIC)
    assert matrix.dequantize()[0].abs().max() == 0
    assert matrix.codes[1].max() == 127
    symmetric = schemes.rounded_matrix("int8-dynamic", weight)
    errors = [(m.dequantize() - weight).abs().max() for m in (matrix, symmetric)]
    assert float(errors[0]) < 0.6 * float(errors[1])


@EACH
@BY
@pytest.mark.parametrize("bias", [True, False])
def test_layer_equals_product_of_dequantized_weights_and_activations(scheme, granularity, bias):
    layer = quantized(scheme, granularity)
    layer.bias = layer.bias if bias else None
    x = torch.randn(2, 5, 48)
    expected = F.linear(
        layer.matrix.scheme.fake_quantize_activations(layer.matrix, x), layer.matrix.dequantize(), layer.bias
    )
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


@needs_vnni
@EACH
@BY
def test_onnx_runtime_equals_torch(scheme, granularity):
    layers, x = (
        [quantized(scheme, granularity), quantized(scheme, granularity, seed=1)],
        torch.randn(2, 5, 48),
    )
    operator, index = PRODUCTS[scheme]
    graph = schemes.export_layers(layers, x)
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    zeros = [constants[n.input[index]] for n in graph.graph.node if n.op_type == operator]
    assert [list(tensor.dims) for tensor in zeros] == [[40] if granularity == "channel" else []] * 2
    assert {tensor.data_type for tensor in zeros} == {TensorProto.INT8}
    for module, output in zip(layers, schemes.run_onnx_runtime(layers, x), strict=True):
        assert np.abs(module(x).detach().numpy() - output).max() < 1e-5


@BY
def test_explicit_form_has_zero_points_of_weights_and_equals_torch(granularity):
    layer, x = quantized("int8-static", granularity), torch.randn(1, 5, 48)
    graph = schemes.export_layers([layer], x, "openvino")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    [zeros] = [
        constants[n.input[2]] for n in graph.graph.node
        if n.op_type == "DequantizeLinear" and constants.get(n.input[0], np.zeros(0)).ndim == 2
    ]  # fmt: skip
    assert zeros.dtype == np.int8
    assert zeros.tolist() == layer.matrix.tensor("zeros").tolist()
    [actual] = ReferenceEvaluator(graph).run(None, {"x": x.numpy()})
    assert np.abs(layer(x).detach().numpy() - actual).max() < 1e-5
    dequantize_graph(graph)  # the float copy that parity compares
    [exact] = ReferenceEvaluator(graph).run(None, {"x": x.numpy()})
    expected = F.linear(x, layer.matrix.dequantize(), layer.bias).detach().numpy()
    assert np.abs(expected - exact).max() < 1e-5


def test_openvino_computes_zero_points_of_weights():
    openvino = pytest.importorskip("openvino")
    layer, x = quantized("int8-static"), torch.randn(1, 5, 48)
    graph = schemes.export_layers([layer], x, "openvino")
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(graph.SerializeToString()), "CPU")
    actual = compiled([x.numpy()])[0]
    expected = layer(x).detach().numpy()
    assert np.abs(expected - actual).max() < 0.02 * expected.std()


def test_blocks_have_zero_points_and_the_same_weights():
    matrix = quantized("int8-dynamic").matrix
    before = matrix.dequantize()
    node, plain = matrix.scheme.variant_node(matrix, "x", "y")
    assert list(node.input) == ["x", "y.columns", "y.scales", "y.zeros"]
    assert plain["y.zeros"].dtype == torch.int8
    matrix.select_variant("MatMulNBits")
    node, blocks = matrix.scheme.variant_node(matrix, "x", "y")
    assert list(node.input) == ["x", "y.blocks", "y.block_scales", "y.block_zeros"]
    steps = blocks["y.blocks"].float() - blocks["y.block_zeros"].float()[..., None]
    assert (steps * blocks["y.block_scales"][..., None]).flatten(1)[:, :48].equal(before)


def test_blocks_in_onnx_runtime_equal_torch():
    layer, x = quantized("int8-dynamic"), torch.randn(2, 5, 48)
    layer.matrix.select_variant("MatMulNBits")
    [actual] = schemes.run_onnx_runtime([layer], x)
    expected = layer(x).detach().numpy()
    assert np.abs(expected - actual).max() < 1e-4


class Lookup(nn.Module):
    """A lookup in the rows of an embedding, which takes floats as ids."""

    out_features = 48

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, x):
        return self.table(x.long())


@pytest.mark.parametrize(
    ("scheme", "variant"), [("int8-dynamic", ""), ("int8-dynamic", "MatMulNBits"), ("int8-static", "")]
)
@BY
def test_embedding_rows_subtract_zero_points_in_graphs(scheme, granularity, variant):
    embedding = nn.Embedding(40, 48, padding_idx=0)
    embedding.weight.data += 0.4
    embedding.weight.data[0] = 0
    table = quantize_module(
        embedding, scheme, default_options(find_scheme(scheme)) | ASYMMETRIC | {"granularity": granularity}
    )
    table.matrix.select_variant(variant)
    ids = torch.tensor([[0.0, 3.0, 39.0]])
    module = Lookup(table).eval()
    expected = table.matrix.dequantize()[ids.long()]
    assert expected[0, 0].abs().max() == 0
    assert module(ids).equal(expected)
    [actual] = schemes.run_onnx_runtime([module], ids)
    assert np.abs(expected.numpy() - actual).max() < 1e-6


def test_joined_layers_keep_their_zero_points():
    first, other = quantized("int8-dynamic", "tensor"), quantized("int8-dynamic", "tensor", seed=1)
    joined, x = concat_quantized([first, other]), torch.randn(3, 48)
    assert joined.matrix.tensor("zeros").unique().numel() == 2
    torch.testing.assert_close(joined(x), torch.cat([first(x), other(x)], dim=1))


@BY
def test_hqq_moves_one_zero_point_for_a_tensor_and_others_by_row(granularity):
    scheme = find_scheme("int8-dynamic")
    options = default_options(scheme) | ASYMMETRIC | {"granularity": granularity}
    groups = shifted().weight.detach()[:, None]
    grid = dict(scheme.compute_qparams(groups, 48, options))
    values = scheme.dequantize(scheme.quantize(groups, grid, options), grid, options)
    offsets = torch.arange(40.0)[:, None] % 5  # of the rows, in steps; 2 on average
    target = values - (offsets * grid["scales"])[..., None]
    moved = fit_hqq_grid(target, values, grid, torch.ones(1, 48), scheme, options)["zeros"].int()
    expected = (
        grid["zeros"].int() + (torch.full_like(offsets, 2) if granularity == "tensor" else offsets).int()
    )
    assert moved.tolist() == expected.clamp(max=255).tolist()


@BY
def test_learned_steps_train_zero_points(granularity):
    layer = quantized("int8-dynamic", granularity)
    steps = StepSizes(layer.matrix)
    weight = shifted().weight.detach()
    assert steps.fake_quantize(weight).allclose(layer.matrix.dequantize(), atol=1e-6)
    (steps.fake_quantize(weight) - 2 * weight.clamp(max=0.2)).square().sum().backward()
    assert steps.offset.grad.abs().max() > 0
    assert len(steps.offset) == (1 if granularity == "tensor" else 40)
    steps.offset.data += 3 / 255
    decided = steps.quantizer()(weight, layer.matrix.scheme, layer.matrix.options)
    before = layer.matrix.unpack().qparams["zeros"].int()
    moved = decided.qparams["zeros"].int()
    assert ((moved - before) == 3)[before <= 252].all()


def test_tensorrt_requires_symmetric_weights():
    scheme = find_scheme("int8-static")
    options = default_options(scheme) | {"activations_symmetric": True}
    assert unsupported_scheme_options(scheme, options, "tensorrt") == []
    assert unsupported_scheme_options(scheme, options | ASYMMETRIC, "tensorrt") == ["`symmetric: true`"]
    assert unsupported_scheme_options(scheme, options | ASYMMETRIC, "openvino") == []
