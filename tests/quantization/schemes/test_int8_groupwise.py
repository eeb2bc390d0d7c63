import numpy as np
import pytest
import schemes
import torch

from smelt.compress.quantize.plan_layers import round_to_nearest
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.affine import Int8Groupwise

SIZES = (16, 32, 64, 128)
LAYOUTS = [(group, symmetric, level) for group in SIZES for symmetric in (True, False) for level in (0, 4)]


def random_layer(inputs=100, outputs=24, group=32, symmetric=True, level=4):
    torch.manual_seed(0)
    groups = -(-inputs // group)
    codes = torch.randint(0, 256, (outputs, groups, group), dtype=torch.uint8)
    grid = {"scales": torch.rand(outputs, groups) + 0.5}
    if not symmetric:
        grid["zeros"] = torch.randint(0, 256, (outputs, groups), dtype=torch.uint8)
    options = {"group_size": group, "symmetric": symmetric, "accuracy_level": level}
    return schemes.random_quantized_layer("int8-groupwise", UnpackedWeights(codes, grid), inputs, **options)


@pytest.mark.parametrize(("group", "symmetric", "level"), LAYOUTS)
def test_layer_equals_matmul_nbits(group, symmetric, level):
    layer = random_layer(group=group, symmetric=symmetric, level=level)
    x = torch.randn(3, 5, 100)
    x[0, 0] = 0
    expected = schemes.matmul_nbits(layer, x, bits=8)
    with torch.inference_mode():
        got = layer(x).numpy()
    assert np.abs(got - expected).max() < 1e-5 * expected.std()


@pytest.mark.parametrize("group", SIZES)
def test_a_row_in_onnx_runtime_does_not_depend_on_its_batch(group):
    """A row that is a thousand times as large moves no other; int8-dynamic would lose them all."""
    layer, x = random_layer(group=group, inputs=256), torch.randn(9, 256)
    x[8] *= 1000
    whole = schemes.matmul_nbits(layer, x, bits=8)[:8]
    alone = np.concatenate([schemes.matmul_nbits(layer, x[at : at + 1], bits=8) for at in range(8)])
    assert np.abs(whole - alone).max() < 2e-6 * alone.std()  # sums in another order


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_and_scales_are_those_of_onnx_runtimes_quantizer(symmetric):
    from onnxruntime.capi._pybind_state import quantize_matmul_8bits

    rows, columns, group = 24, 100, 32
    groups = -(-columns // group)
    weight = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    codes = np.zeros((rows, groups, group), np.uint8)
    scales, zeros = np.zeros(rows * groups, np.float32), np.zeros(rows * groups, np.uint8)
    transposed = np.ascontiguousarray(weight.T)
    quantize_matmul_8bits(codes, transposed, scales, zeros, group, rows, columns, symmetric)

    options = {"group_size": group, "symmetric": symmetric}
    found = round_to_nearest(torch.from_numpy(weight), Int8Groupwise(), options)
    ours = found.q_weight.flatten(1)[:, :columns].int()
    theirs = torch.from_numpy(codes).flatten(1)[:, :columns].int()
    # a scale rounded to float16 moves values, and a zero point, that lie near the middle between two codes
    assert (ours - theirs).abs().max() <= 1
    assert (ours == theirs).float().mean() > 0.95
    assert np.allclose(found.qparams["scales"].flatten(), scales, rtol=2**-11)
    if symmetric:
        assert "zeros" not in found.qparams
    else:
        off = found.qparams["zeros"].int() - torch.from_numpy(zeros).view(rows, -1).int()
        assert off.abs().max() <= 1
        assert (off == 0).float().mean() > 0.95


def test_symmetric_codes_by_hand():
    # the largest magnitude, -4, becomes -128: scale 1 / 32; 3.99 would be 127.7 and is cut to 127
    decided = round_to_nearest(
        torch.tensor([[-4.0, 3.99, 0.0, 0.25] + 12 * [0.0]]), Int8Groupwise(),
        {"group_size": 16, "symmetric": True},
    )  # fmt: skip
    assert decided.qparams["scales"].tolist() == [[1 / 32]]
    assert decided.q_weight[0, 0, :4].tolist() == [0, 255, 128, 136]


def test_asymmetric_codes_by_hand():
    # from -1 to 1.5: scale 2.5 / 255, zero point 102
    decided = round_to_nearest(
        torch.tensor([[-1.0, 1.5] + 14 * [0.0]]), Int8Groupwise(), {"group_size": 16, "symmetric": False}
    )
    assert decided.qparams["scales"][0, 0] == pytest.approx(2.5 / 255, rel=1e-3)
    assert decided.qparams["zeros"].tolist() == [[102]]
    assert decided.q_weight[0, 0, :3].tolist() == [0, 255, 102]


@pytest.mark.parametrize("symmetric", [True, False])
def test_values_are_a_sixteenth_as_far_off_as_those_of_four_bits(symmetric):
    torch.manual_seed(0)
    weight = torch.randn(40, 256)
    options = {"group_size": 64, "symmetric": symmetric}
    eight, four = (
        (schemes.rounded_matrix(name, weight, **options).dequantize() - weight).std()
        for name in ("int8-groupwise", "int4")
    )
    assert 15 < four / eight < 19  # 2^4, or 255 / 15 with zero points
