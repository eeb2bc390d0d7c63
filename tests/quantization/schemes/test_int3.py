import pytest
import schemes
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from smelt.compress.quantize.plan_layers import round_to_nearest
from smelt.quantization.schemes.affine import Int3

SIZES = (16, 32, 64, 128)
LAYOUTS = [(group, symmetric, level) for group in SIZES for symmetric in (True, False) for level in (0, 4)]


def decide(weight, symmetric):
    return round_to_nearest(weight, Int3(), {"group_size": 32, "symmetric": symmetric})


def test_onnx_runtime_has_no_three_bit_product():
    """When it has, its codes need not be spread."""
    with pytest.raises(Fail, check=lambda error: "2b, 4b and 8b" in str(error)):
        schemes.matmul_nbits(schemes.random_affine("int3"), torch.randn(1, 100), bits=3)


def test_every_layout_leaves_as_four_bits_which_a_session_makes_once(tmp_path):
    layers = [schemes.random_affine("int3", *layout) for layout in LAYOUTS]
    attributes = schemes.fused_matmul_attributes(layers, tmp_path / "optimized.onnx")
    assert {a["bits"] for a in attributes} == {4}


def test_a_graph_holds_three_bits_a_weight():
    layer = schemes.random_affine("int3", 128, inputs=1024, outputs=512)
    made = schemes.export_layers([layer], torch.randn(1, 2, 1024))
    stored = [t for t in made.graph.initializer if list(t.dims)[:1] == [512] and len(t.dims) > 1]
    assert sum(len(t.raw_data) for t in stored) == 512 * (1024 * 3 // 8 + 8 * 2)
    assert len(made.SerializeToString()) < 1.1 * 512 * 1024 * 3 / 8  # scales and tables of spreading among it


def test_symmetric_codes_by_hand():
    # the largest magnitude, -4, becomes -4: scale 1; 3.6 would be 4 and is cut to 3
    codes, grid = decide(torch.tensor([[-4.0, 3.6, 0.0, 1.4, -2.6] + 27 * [0.0]]), symmetric=True)
    assert grid["scales"].tolist() == [[1.0]]
    assert codes[0, 0, :5].tolist() == [0, 7, 4, 5, 1]


def test_asymmetric_codes_by_hand():
    # from -1 to 2.5: scale 0.5, zero point 2
    codes, grid = decide(torch.tensor([[-1.0, 2.5, 0.4, 0.8] + 28 * [0.0]]), symmetric=False)
    assert grid["scales"].tolist() == [[0.5]]
    assert grid["zeros"].tolist() == [[2]]
    assert codes[0, 0, :4].tolist() == [0, 7, 3, 4]


def test_two_low_bits_lie_beside_the_high_one():
    matrix = schemes.random_affine("int3", 64, inputs=64).matrix
    codes = matrix.unpack().q_weight[3, 0]
    assert matrix.codes[3, 0, 5] == sum(int(codes[20 + i]) % 4 << 2 * i for i in range(4))
    assert matrix.tensor("highs")[3, 0, 2] == sum(int(codes[16 + i]) // 4 << i for i in range(8))
    assert (matrix.codes.shape, matrix.tensor("highs").shape) == ((24, 1, 16), (24, 1, 8))


def test_values_are_twice_as_far_off_as_those_of_four_bits():
    torch.manual_seed(0)
    weight = torch.randn(40, 256)
    three, four = ((schemes.rounded_matrix(n, weight).dequantize() - weight).std() for n in ("int3", "int4"))
    assert 1.9 < three / four < 2.3
