"""Scheme nvfp4: NVIDIA's formula in float64 with ml_dtypes' types, compressed-tensors' numbers, graphs."""

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.export.convert_to_half import convert_to_half
from smelt.quantization.schemes.nvfp4 import fake_quantize_float4, power_of_two_above
from smelt.quantization.schemes.registry import SCHEMES, bits_per_weight, default_options
from smelt.runtimes.float4 import replace_float4
from smelt.runtimes.onnx_session import open_onnx_session
from tests.support import schemes
from tests.support.expected_errors import raises_setting_codes

FP4_MAX, FP8_MAX = 6.0, 448.0


def global_scale(largest):
    """amax / (6 * 448), NVIDIA's formula, rounded up to a power of two."""
    return 2.0 ** np.ceil(np.log2(largest / (FP4_MAX * FP8_MAX)))


def by_formula(x, scale):
    """Blocks of 16 of float64 `x` [..., K] by TensorRT's formula, each rounding by ml_dtypes' types."""
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    ratio = np.minimum(amax / FP4_MAX / scale, FP8_MAX)
    block_scale = ratio.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    quotient = np.divide(blocks, block_scale, out=np.zeros_like(blocks), where=block_scale > 0)
    values = quotient.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * block_scale
    return values.reshape(x.shape)


def drawn(rows=6, width=256, power=3):
    torch.manual_seed(0)
    return torch.randn(rows, width).pow(power) * 0.01


@pytest.mark.parametrize("power", [1, 3])
def test_weights_equal_the_formula_in_float64(power):
    weight = drawn(power=power)
    exact = weight.double().numpy()
    values = schemes.rounded_matrix("nvfp4", weight).dequantize().double().numpy()
    scale = global_scale(np.abs(exact).max())
    # where E4M3's number of a block is below its normal ones, 2^-6, it was rounded once more
    is_normal = np.abs(exact).reshape(6, 16, 16).max(axis=-1) / FP4_MAX / scale >= 2**-6
    assert is_normal.mean() > 0.95
    blocks = values.reshape(6, 16, 16), by_formula(exact, scale).reshape(6, 16, 16)
    np.testing.assert_array_equal(blocks[0][is_normal], blocks[1][is_normal])


@pytest.mark.parametrize("largest", [1e-3, 4.0, 3000.0])
def test_activations_equal_the_formula_also_beyond_the_range(largest):
    torch.manual_seed(0)
    x = torch.randn(5, 64) * largest / 3
    x[0, :16], x[1, 3] = 0.0, 5 * largest
    x[2, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]) * largest / 6  # ties
    x[2, 8:16] = 0.0
    scale = global_scale(largest)
    values = fake_quantize_float4(x, torch.tensor(scale, dtype=torch.float32))
    np.testing.assert_array_equal(values.double().numpy(), by_formula(x.double().numpy(), scale))


def test_library_of_the_format_computes_the_same_numbers():
    """compressed-tensors with its own formula, but a power of two for its global scale."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = drawn(power=1)
    matrix = schemes.rounded_matrix("nvfp4", weight)
    args = QuantizationArgs(**matrix.scheme.checkpoint_args(matrix.options)["weights"])
    inverse = generate_gparam(weight.min(), weight.max())
    stored_scale = 1 / matrix.tensor("global_scale")
    assert 0.5 < (stored_scale / inverse).item() <= 1  # rounded up, so its inverse is not larger
    groups = weight.reshape(6, -1, 16)
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args, stored_scale)
    values = fake_quantize(weight, scales, zeros, args, global_scale=stored_scale)
    assert matrix.tensor("block_scales").equal(scales.float())
    assert values.equal(matrix.dequantize())


@pytest.mark.parametrize(("x", "expected"), [
    (1.0, 1.0), (1.0001, 2.0), (0.5, 0.5), (0.6, 1.0), (3e-9, 2.0**-24), (0.0, 1.0),
])  # fmt: skip
def test_global_scale_is_the_power_of_two_above(x, expected):
    assert power_of_two_above(torch.tensor(x)).item() == expected


def test_tiny_blocks_are_rounded_again_to_the_least_scale():
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16:] = 1.0, 1e-7
    matrix = schemes.rounded_matrix("nvfp4", weight)
    least = matrix.tensor("global_scale") * 2.0**-9
    assert matrix.unpack().qparams["scales"][0, 1] == least
    assert matrix.dequantize()[0, 16:].eq(0).all()  # 1e-7 is less than a quarter of it
    weight[0, 16:] = least * 1.4
    assert schemes.rounded_matrix("nvfp4", weight).dequantize()[0, 16:].eq(least * 1.5).all()


def test_size_is_four_and_a_half_bits_and_one_scale():
    scheme = SCHEMES["nvfp4"]
    assert bits_per_weight(scheme, default_options(scheme), 64, 32) == 4.5 + 32 / (64 * 32)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("bits", [4, 16])
def test_graph_has_two_levels_in_its_own_type(dtype, bits, tmp_path):
    torch.manual_seed(0)
    layer = schemes.with_activation_range(nn.Linear(72, 12), "nvfp4", {"activation_bits": bits})
    x = torch.randn(1, 4, 72)  # 4.5 blocks
    with torch.inference_mode():
        expected = layer(x).numpy()
    model = schemes.export_layers([layer], x, "tensorrt", opset=23)
    if dtype != "fp32":
        convert_to_half(model, "model", dtype)
    kinds = {
        tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer
    }
    quantizers = [node for node in model.graph.node if node.domain == "trt"]
    assert [node.op_type for node in quantizers] == ["TRT_FP4DynamicQuantize"] * (bits == 4)
    dequantizers = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(dequantizers) == (4 if bits == 4 else 2)
    stored = [kinds[node.input[0]] for node in dequantizers if node.input[0] in kinds]
    assert sorted(stored) == ["FLOAT4E2M1", "FLOAT8E4M3FN"]
    scale_kind = {"fp32": "FLOAT", "fp16": "FLOAT16", "bf16": "BFLOAT16"}[dtype]
    scales = {node.input[1] for node in (*dequantizers, *quantizers)} & kinds.keys()
    assert {kinds[name] for name in scales} == {scale_kind}
    if dtype == "fp32":
        onnx.save(model, tmp_path / "model.onnx")
        (out,) = open_onnx_session(tmp_path / "model.onnx").run(None, {"x": x.numpy()})
        assert np.abs(out - expected).max() < 1e-5 * expected.std()


def test_weights_of_a_graph_are_onnx_numbers():
    """ONNX's reference evaluator computes the float4 constants themselves."""
    layer = schemes.with_activation_range(nn.Linear(64, 12), "nvfp4", {"activation_bits": 16})
    model = schemes.export_layers([layer], torch.randn(1, 4, 64), "tensorrt", opset=23)
    weights = next(node for node in model.graph.node if node.op_type == "MatMul").input[1]
    del model.graph.output[:]
    model.graph.output.add(name=weights)
    (values,) = ReferenceEvaluator(model).run([weights], {"x": np.zeros((1, 4, 64), np.float32)})
    np.testing.assert_array_equal(np.asarray(values, np.float32).T, layer.matrix.dequantize().numpy())


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)])
def test_standard_operators_equal_the_formula(shape, tmp_path):
    """The copy that ONNX Runtime runs, of TensorRT's operator alone."""
    helper, kind = onnx.helper, onnx.TensorProto
    scale = 2.0**-9
    nodes = [
        helper.make_node("TRT_FP4DynamicQuantize", ["x", "g"], ["q", "s"], domain="trt", axis=-1,
                         block_size=16, scale_type=kind.FLOAT8E4M3FN),
        helper.make_node("DequantizeLinear", ["s", "g"], ["t"]),
        helper.make_node("DequantizeLinear", ["q", "t"], ["y"], axis=-1, block_size=16),
    ]  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "graph", [value("x", kind.FLOAT, shape)], [value("y", kind.FLOAT, shape)],
        [onnx.numpy_helper.from_array(np.float32(scale), "g")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("trt", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    replace_float4(model)
    onnx.save(model, tmp_path / "model.onnx")
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32) * 2
    x[0, ..., :16], x[1, ..., 5] = 0, 40  # a block of zeros, and one beyond the range
    (out,) = open_onnx_session(tmp_path / "model.onnx").run(None, {"x": x})
    np.testing.assert_array_equal(out.astype(np.float64), by_formula(x.astype(np.float64), scale))


@pytest.mark.parametrize(("settings", "code"), [
    ({"calibration_samples": 4}, "unused-setting"), ({"calibration_method": "minmax"}, "unused-setting"),
    ({"group_size": 32}, "wrong-value"), ({"accuracy_level": 0}, "unused-setting"),
])  # fmt: skip
def test_settings_without_effect_on_weights_alone_are_rejected(settings, code):
    with raises_setting_codes(code):
        QuantizeSettings(scheme="nvfp4", activation_bits=16, **settings)


def test_only_quantized_activations_are_calibrated():
    assert QuantizeSettings(scheme="nvfp4").needs_calibration
    assert not QuantizeSettings(scheme="nvfp4", activation_bits=16).needs_calibration
