"""Scheme fp8: E4M3 by its definition in float64, scales by Model Optimizer's formula, graphs."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.export.convert_to_half import convert_to_half
from smelt.quantization.schemes.fp8 import round_scale_up
from smelt.quantization.schemes.registry import find_scheme
from smelt.runtimes.onnx_session import open_onnx_session
from tests.support import schemes
from tests.support.expected_errors import raises_setting_codes

FP8 = find_scheme("fp8")


def e4m3_values():
    """The 256 numbers of E4M3 in float64 by the format's definition (arXiv:2209.05433, table 1)."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(float) - 7)
    )
    magnitude[codes & 127 == 127] = np.nan
    return np.where(codes > 127, -magnitude, magnitude)


def nearest_code(x):
    """The code of float64 `x`: the nearest value, of two the one with an even code; 448 beyond the range."""
    values = e4m3_values()[:127]
    distances = np.abs(np.minimum(np.abs(x), 448)[..., None] - values)
    best = distances.min(axis=-1, keepdims=True)
    is_nearest = distances == best
    even_first = np.where(is_nearest, np.arange(127) % 2, 2)
    codes = even_first.argmin(axis=-1)
    return np.where((x < 0) & (codes > 0), codes + 128, codes)


def test_codes_stand_for_the_values_of_the_format():
    codes = torch.arange(256, dtype=torch.uint8)[None, None]
    values = FP8.dequantize(codes, {"scales": torch.ones(1, 1)}, {}).numpy()[0, 0]
    np.testing.assert_array_equal(values, e4m3_values().astype(np.float32))


def test_rounding_equals_float64_nearest_also_at_ties_and_beyond_the_range():
    values = e4m3_values()[:127]
    ties = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, ties, ties * (1 + 2e-7), ties * (1 - 2e-7), [0.0, 460.0, 1e30]])
    x = np.concatenate([x, -x]).astype(np.float32)
    codes = FP8.quantize(torch.from_numpy(x)[None, None], {"scales": torch.ones(1, 1)}, {})
    np.testing.assert_array_equal(codes[0, 0].numpy(), nearest_code(x.astype(np.float64)))


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_scales_are_the_largest_magnitude_over_448_rounded_up(granularity):
    """Model Optimizer's scale is amax / 448; here it has 8 bits, so it is at most 2^-7 larger."""
    torch.manual_seed(0)
    weight = torch.randn(6, 40) * torch.logspace(-6, 3, 6)[:, None]
    scales = schemes.rounded_matrix("fp8", weight, granularity=granularity).tensor("scales").double()
    amax = weight.abs().amax(dim=1).double()
    exact = (amax.max().expand_as(amax) if granularity == "tensor" else amax) / 448
    ratios = scales / exact
    assert (ratios >= 1).all()
    assert (ratios[exact > 2**-17] <= 1 + 2**-7).all()
    for kind in (torch.float16, torch.bfloat16):
        assert scales.to(kind).double().equal(scales)


@pytest.mark.parametrize(("scale", "expected"), [
    (0.0, 1.0), (1.0, 1.0), (1 + 2**-7, 1 + 2**-7), (1 + 2**-8, 1 + 2**-7), (2**-24 * 0.3, 2**-24),
])  # fmt: skip
def test_scale_is_rounded_up_to_eight_bits(scale, expected):
    assert round_scale_up(torch.tensor(scale)).item() == expected


def test_layer_multiplies_values_of_rounded_activations():
    torch.manual_seed(0)
    layer = schemes.with_activation_range(nn.Linear(48, 10), "fp8", largest=3.5)
    x = torch.randn(7, 48)
    x[0, :2] = torch.tensor([5.0, -90.0])  # beyond the range
    scale = 3.5 / 448  # has 8 bits
    x_codes = nearest_code(x.double().numpy() / scale)
    expected = (e4m3_values()[x_codes] * scale) @ layer.matrix.dequantize().double().numpy().T
    with torch.inference_mode():
        out = layer(x).double().numpy() - layer.bias.detach().numpy()
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_graph_has_standard_pairs_with_scales_in_its_own_type(dtype, granularity, tmp_path):
    torch.manual_seed(0)
    layer = schemes.with_activation_range(nn.Linear(64, 12), "fp8", {"granularity": granularity})
    x = torch.randn(1, 4, 64)
    with torch.inference_mode():
        expected = layer(x).numpy()
    model = schemes.export_layers([layer], x, "tensorrt", opset=22)
    if dtype != "fp32":
        convert_to_half(model, "model", dtype)
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    kind = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[dtype]
    pairs = [n for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert [n.op_type for n in pairs].count("DequantizeLinear") == 2
    assert {types[n.input[1]] for n in pairs} == {kind}
    assert [types[n.input[0]] for n in pairs if n.input[0] in types] == [TensorProto.FLOAT8E4M3FN]
    stored = {t.name: onnx.numpy_helper.to_array(t).astype(np.float32) for t in model.graph.initializer}
    for name in {n.input[1] for n in pairs}:  # no digit of a scale is lost
        assert np.isin(
            stored[name], [layer.matrix.tensor("input_scale"), *layer.matrix.tensor("scales")]
        ).all()
    if dtype == "fp32":
        onnx.save(model, tmp_path / "model.onnx")
        (out,) = open_onnx_session(tmp_path / "model.onnx").run(None, {"x": x.numpy()})
        assert np.abs(out - expected).max() < 1e-5 * expected.std()


@pytest.mark.parametrize(("settings", "method"), [
    ({"scheme": "fp8"}, "minmax"),
    ({"scheme": "fp8", "calibration_method": "percentile"}, "percentile"),
    ({"scheme": "int8-static"}, "percentile"),
    ({"scheme": {"encoder": "fp8", "decoder": "int8-static"}}, "percentile"),
])  # fmt: skip
def test_float_activations_are_not_clipped_by_default(settings, method):
    parsed = QuantizeSettings(**settings)
    assert parsed.range_method == method
    assert parsed.to_report()["calibration_method"] == method


@pytest.mark.parametrize("method", ["entropy", "mse"])
def test_range_searches_for_integers_are_rejected(method):
    with raises_setting_codes("settings-conflict"):
        QuantizeSettings(scheme="fp8", calibration_method=method)
