import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.quantization.schemes.int8 import dynamic_scale_zero_point
from smelt.quantization.schemes.registry import SCHEMES, default_options
from tests.support import schemes
from tests.support.graphs.ort_sessions import ort_session

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_dynamic_quantize_matmul(bias, granularity):
    torch.manual_seed(0)
    layer = quantize_module(
        nn.Linear(48, 40, bias=bias), "int8-dynamic", {"granularity": granularity, "symmetric": True}
    )
    scales = layer.matrix.scales if granularity == "channel" else layer.matrix.scales[0]
    x = torch.randn(3, 5, 48)
    from onnx import numpy_helper

    constants = [
        numpy_helper.from_array(np.ascontiguousarray(layer.matrix.codes.numpy().T), "b"),
        numpy_helper.from_array(scales.numpy(), "s"),
    ]
    names = ["x", "b", "s"]
    if bias:
        constants.append(numpy_helper.from_array(layer.bias.detach().numpy(), "c"))
        names += ["", "c"]
    node = helper.make_node("DynamicQuantizeMatMul", names, ["y"], domain="com.microsoft")
    session = ort_session([node], [("x", TensorProto.FLOAT)], [("y", TensorProto.FLOAT)], constants)
    expected = session.run(None, {"x": x.numpy()})[0]
    assert np.abs(layer(x).detach().numpy() - expected).max() < 1e-6


def test_quantized_weights_are_symmetric_per_row():
    matrix = schemes.rounded_matrix(
        "int8-dynamic", torch.tensor([[1.27, -0.50], [0.0, 0.0], [-254.0, 127.0]])
    )
    assert matrix.codes.tolist() == [[127, -50], [0, 0], [-127, 64]]  # 63.5 rounds to the even 64
    assert torch.allclose(matrix.scales, torch.tensor([0.01, 1.0, 2.0]))


@pytest.mark.parametrize("width", [20, 32, 100, 256])
@pytest.mark.parametrize("rows", [1, 5])
def test_blocked_weights_are_equal_and_match_matmul_nbits(width, rows):
    torch.manual_seed(0)
    layer = quantize_module(nn.Linear(width, 12, bias=False), "int8-dynamic")
    matrix, x = layer.matrix, torch.randn(rows, width)
    before = matrix.dequantize()
    matrix.select_variant("MatMulNBits")
    assert matrix.dequantize().equal(before)
    matrix.prepare_export("product")
    stored = (matrix.tensor("blocks").float() - 128) * matrix.tensor("block_scales")[..., None]
    assert stored.flatten(1)[:, :width].equal(before)
    actual = run_form(matrix, x)
    with torch.inference_mode():
        assert np.abs(actual - layer(x).numpy()).max() < 1e-5 * actual.std()


@pytest.mark.parametrize("form", ["", "DynamicQuantizeMatMul"])
def test_timed_node_is_the_matmul(form):
    torch.manual_seed(0)
    layer = quantize_module(nn.Linear(48, 12, bias=False), "int8-dynamic")
    layer.matrix.select_variant(form)
    x = torch.randn(3, 48)
    with torch.inference_mode():
        assert np.abs(run_form(layer.matrix, x) - layer(x).numpy()).max() < 1e-6


def run_form(matrix, x):
    from onnx import numpy_helper

    node, tensors = matrix.scheme.variant_node(matrix, "x", "y")
    assert node.op_type == matrix.variant or (
        not matrix.variant and node.op_type == matrix.scheme.operator_variants({})[0]
    )
    constants = [numpy_helper.from_array(t.detach().numpy(), name) for name, t in tensors.items()]
    session = ort_session([node], [("x", TensorProto.FLOAT)], [("y", TensorProto.FLOAT)], constants)
    return session.run(None, {"x": x.numpy()})[0]


def test_blocks_are_independent_of_other_rows_but_one_range_is_not():
    torch.manual_seed(0)
    layer = quantize_module(nn.Linear(256, 12), "int8-dynamic")
    x = torch.randn(4, 256)
    x[3] *= 1000
    moved = {}
    for form in layer.matrix.scheme.operator_variants({}):
        layer.matrix.select_variant(form)
        with torch.inference_mode():
            moved[form] = float((layer(x)[:3] - layer(x[:3])).abs().max())
    assert moved["MatMulNBits"] < 1e-5 < 0.1 < moved["DynamicQuantizeMatMul"]


def test_symmetric_range_clips_the_largest_value_to_the_last_level():
    """127.5 steps and a zero point at 127.5 both become 128: code 256, which is 255."""
    torch.manual_seed(0)
    x = torch.linspace(-127.5, 127.5, 64)[None].repeat(3, 1)
    matrix = schemes.rounded_matrix("int8-dynamic", torch.randn(5, 64))
    scale, zero = dynamic_scale_zero_point(x)
    codes = (x / scale).round().add(zero).clamp(0, 255)
    assert (zero, int(codes.max())) == (128, 255)
    expected = (codes - zero) * scale @ matrix.dequantized().T
    torch.testing.assert_close(matrix.scheme.linear(matrix, x, None), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("symmetric", [True, False])
def test_row_of_zeros_gives_the_bias_exactly_in_blocks(symmetric):
    """The operator sums products with the middle of its codes; rounding errors of 0.01 were the result."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 8)
    linear.weight.data[2] = 0
    options = default_options(SCHEMES["int8-dynamic"]) | {"symmetric": symmetric}
    layer = quantize_module(linear, "int8-dynamic", options).eval()
    layer.matrix.select_variant("MatMulNBits")
    [actual] = schemes.run_onnx_runtime([layer], 30 * torch.randn(2, 3, 256))
    assert (actual[..., 2] == linear.bias[2].item()).all()
