import numpy as np
import pytest
import schemes
import torch

from smelt.compress.quantize.plan_layers import round_to_nearest
from smelt.quantization.schemes.affine import Int2

SIZES = (32, 64, 128)
LAYOUTS = [(group, symmetric, level) for group in SIZES for symmetric in (True, False) for level in (0, 4)]


def decide(weight, symmetric):
    return round_to_nearest(weight, Int2(), {"group_size": 32, "symmetric": symmetric})


@pytest.mark.parametrize(("group", "symmetric", "level"), LAYOUTS)
def test_layer_equals_matmul_nbits(group, symmetric, level):
    layer = schemes.random_affine("int2", group, symmetric, level)
    x = torch.randn(3, 5, 100)
    x[0, 0] = 0
    expected = schemes.matmul_nbits(layer, x, bits=2)
    with torch.inference_mode():
        got = layer(x).numpy()
    assert np.abs(got - expected).max() < 1e-5 * expected.std()


def test_every_layout_leaves_as_what_torch_computes_and_a_session_spreads_codes_once(tmp_path):
    """With whole activations as 4 bits, for which there is a fast kernel, with rounded ones as 2 bits."""
    layers = [schemes.random_affine("int2", *layout) for layout in LAYOUTS]
    attributes = schemes.fused_matmul_attributes(layers, tmp_path / "optimized.onnx")
    assert {(a["accuracy_level"], a["bits"]) for a in attributes} == {(0, 4), (4, 2)}


def test_symmetric_codes_by_hand():
    # the largest magnitude, -4, becomes -2: scale 2; 1.2 is 0.6 -> 1; 4 would be 2 and is cut to 1
    codes, grid = decide(torch.tensor([[-4.0, 1.2, 0.0, 4.0, -1.1] + 27 * [0.0]]), symmetric=True)
    assert grid["scales"].tolist() == [[2.0]]
    assert codes[0, 0, :5].tolist() == [0, 3, 2, 3, 1]


def test_asymmetric_codes_by_hand():
    # from -1 to 2: scale 1, zero point 1
    codes, grid = decide(torch.tensor([[-1.0, 2.0, 0.4, 0.6] + 28 * [0.0]]), symmetric=False)
    assert grid["scales"].tolist() == [[1.0]]
    assert grid["zeros"].tolist() == [[1]]
    assert codes[0, 0, :4].tolist() == [0, 3, 1, 2]


def test_four_codes_lie_in_a_byte():
    layer = schemes.random_affine("int2", 64, inputs=64)
    codes = layer.matrix.unpack().q_weight[3, 0]
    assert layer.matrix.codes[3, 0, 5] == sum(int(codes[20 + i]) << 2 * i for i in range(4))
    assert layer.matrix.codes.shape == (24, 1, 16)
