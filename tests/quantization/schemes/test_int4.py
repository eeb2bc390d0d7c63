"""Whole-number codes in groups (int2, int3, int4, int8-groupwise): by hand, and against ONNX Runtime."""

import itertools

import numpy as np
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from torch import nn

from smelt.compress.quantize.plan_layers import round_to_nearest
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.errors import InputError
from smelt.models.edits import apply_edits
from smelt.quantization.groupwise import unpack_nibbles
from smelt.quantization.schemes.registry import default_options, find_scheme
from tests.support import schemes
from tests.support.expected_errors import raises_code, raises_setting_codes

GROUPS = {"int2": (32, 64, 128), "int3": (16, 32, 64, 128), "int4": (16, 32, 64, 128)}
GROUPS["int8-groupwise"] = GROUPS["int4"]
BITS = {"int2": 2, "int4": 4, "int8-groupwise": 8}


def layouts(scheme):
    return list(itertools.product(GROUPS[scheme], (True, False), (0, 4)))


def decide(scheme, weight, group, symmetric):
    decided = round_to_nearest(weight, find_scheme(scheme), {"group_size": group, "symmetric": symmetric})
    return decided.q_weight, decided.qparams["scales"], decided.qparams.get("zeros")


@pytest.mark.parametrize("scheme", BITS)
def test_layers_equal_matmul_nbits(scheme):
    x = torch.randn(3, 5, 100)
    x[0, 0] = 0
    for group, symmetric, level in layouts(scheme):
        layer = schemes.random_affine(scheme, group, symmetric, level)
        expected = schemes.matmul_nbits(layer, x, bits=BITS[scheme])
        with torch.inference_mode():
            assert np.abs(layer(x).numpy() - expected).max() < 1e-5 * expected.std(), (
                group,
                symmetric,
                level,
            )


def test_onnx_runtime_has_no_three_bit_matmul():
    """When it has, its codes need not be spread."""
    with pytest.raises(Fail, check=lambda error: "2b, 4b and 8b" in str(error)):
        schemes.matmul_nbits(schemes.random_affine("int3"), torch.randn(1, 100), bits=3)


# with rounded activations ONNX Runtime has a fast kernel for 2 bits, with whole ones for 4
@pytest.mark.parametrize(("scheme", "kernels"), [("int2", {(0, 4), (4, 2)}), ("int3", {(0, 4), (4, 4)})])
def test_every_layout_is_exported_as_torch_computes_and_unpacked_once(scheme, kernels, tmp_path):
    layers = [schemes.random_affine(scheme, *layout) for layout in layouts(scheme)]
    attributes = schemes.fused_matmul_attributes(layers, tmp_path / "optimized.onnx")
    assert {(a["accuracy_level"], a["bits"]) for a in attributes} == kernels


def test_graph_stores_three_bits_per_weight():
    layer = schemes.random_affine("int3", 128, inputs=1024, outputs=512)
    model = schemes.export_layers([layer], torch.randn(1, 2, 1024))
    stored = [t for t in model.graph.initializer if list(t.dims)[:1] == [512] and len(t.dims) > 1]
    assert sum(len(t.raw_data) for t in stored) == 512 * (1024 * 3 // 8 + 8 * 2)
    assert (
        len(model.SerializeToString()) < 1.1 * 512 * 1024 * 3 / 8
    )  # scales and tables of spreading among it


@pytest.mark.parametrize(("scheme", "weights", "scale", "codes"), [
    # the largest magnitude, -4, becomes the lowest code; what would be one more than the highest is cut
    ("int2", [-4.0, 1.2, 0.0, 4.0, -1.1], 2.0, [0, 3, 2, 3, 1]),
    ("int3", [-4.0, 3.6, 0.0, 1.4, -2.6], 1.0, [0, 7, 4, 5, 1]),
    ("int4", [-4.0, 3.7, 0.0, 0.26], 0.5, [0, 15, 8, 9]),
    ("int8-groupwise", [-4.0, 3.99, 0.0, 0.25], 1 / 32, [0, 255, 128, 136]),
])  # fmt: skip
def test_symmetric_weights_equal_manual_values(scheme, weights, scale, codes):
    row = torch.tensor([weights + (32 - len(weights)) * [0.0]])
    quantized, scales, zeros = decide(scheme, row, 32, symmetric=True)
    assert (scales.tolist(), zeros) == ([[scale]], None)
    assert quantized[0, 0, : len(codes)].tolist() == codes


@pytest.mark.parametrize(("scheme", "weights", "rest", "scale", "zero", "codes"), [
    ("int2", [-1.0, 2.0, 0.4, 0.6], 0.0, 1.0, 1, [0, 3, 1, 2]),
    ("int3", [-1.0, 2.5, 0.4, 0.8], 0.0, 0.5, 2, [0, 7, 3, 4]),
    ("int4", [1.0, 3.0], 2.0, 0.2, 0, [5, 15, 10]),  # a range begins at 0, which must be exact
    ("int8-groupwise", [-1.0, 1.5], 0.0, 2.5 / 255, 102, [0, 255, 102]),
])  # fmt: skip
def test_asymmetric_weights_equal_manual_values(scheme, weights, rest, scale, zero, codes):
    quantized, scales, zeros = decide(
        scheme, torch.tensor([weights + (32 - len(weights)) * [rest]]), 32, symmetric=False
    )
    assert scales[0, 0] == pytest.approx(scale, rel=1e-3)
    assert zeros.tolist() == [[zero]]
    assert quantized[0, 0, : len(codes)].tolist() == codes


def test_int3_stores_two_low_bits_and_one_high_bit_separately():
    matrix = schemes.random_affine("int3", 64, inputs=64).matrix
    codes = matrix.unpack().q_weight[3, 0]
    assert matrix.codes[3, 0, 5] == sum(int(codes[20 + i]) % 4 << 2 * i for i in range(4))
    assert matrix.tensor("highs")[3, 0, 2] == sum(int(codes[16 + i]) // 4 << i for i in range(8))
    assert (matrix.codes.shape, matrix.tensor("highs").shape) == ((24, 1, 16), (24, 1, 8))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scheme", ["int4", "int8-groupwise"])
def test_weights_and_scales_equal_the_onnx_runtime_quantizer(scheme, symmetric):
    from onnxruntime.capi import _pybind_state

    rows, columns, group, halves = 24, 100, 32, 2 if scheme == "int4" else 1
    groups = -(-columns // group)
    weight = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    codes = np.zeros((rows, groups, group // halves), np.uint8)
    scales, zeros = np.zeros(rows * groups, np.float32), np.zeros(rows * groups // halves, np.uint8)
    transposed = np.ascontiguousarray(weight.T)
    quantize = getattr(_pybind_state, f"quantize_matmul_{BITS[scheme]}bits")
    quantize(codes, transposed, scales, zeros, group, rows, columns, symmetric)
    expected, their_zeros = torch.from_numpy(codes), torch.from_numpy(zeros).view(rows, -1)
    if scheme == "int4":
        expected, their_zeros = unpack_nibbles(expected), unpack_nibbles(their_zeros)

    quantized, our_scales, our_zeros = decide(scheme, torch.from_numpy(weight), group, symmetric)
    # a scale rounded to float16 moves values, and a zero point, that lie near the middle between two codes
    off = (quantized.int() - expected.int()).flatten(1)[:, :columns]
    assert off.abs().max() <= 1
    assert (off == 0).float().mean() > (0.995 if scheme == "int4" else 0.95)
    assert np.allclose(our_scales.flatten(), scales, rtol=2**-11)
    assert (our_zeros is None) == symmetric
    if not symmetric:
        off = our_zeros.int() - their_zeros.int()
        assert off.abs().max() <= (0 if scheme == "int4" else 1)
        assert (off == 0).float().mean() > 0.95


def test_positive_scales_are_the_largest_magnitude_of_either_sign():
    groups = torch.tensor([[[-4.0, 1.0, 2.0, 0.5], [4.0, -3.9, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    scheme = find_scheme("int4")
    options = default_options(scheme) | {"symmetric": "positive"}
    grid = scheme.compute_qparams(groups, 12, options)
    assert grid["scales"].tolist() == [[0.5, 0.5, 1.0]]
    values = scheme.dequantize(scheme.quantize(groups, grid, options), grid, options)
    assert values.tolist() == [[[-4.0, 1.0, 2.0, 0.5], [3.5, -4.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]


def test_only_four_bits_support_positive_scales():
    assert QuantizeSettings(scheme="int4", symmetric="positive").symmetric == "positive"
    assert QuantizeSettings(scheme="int4", symmetric=False).symmetric is False
    with raises_setting_codes("wrong-value") as caught:
        QuantizeSettings(scheme="int2", symmetric="positive", embedding_scheme="int3")
    assert all(part in str(caught.value) for part in ("symmetric", "positive", "int2"))


def test_unsupported_structure_is_refused():
    edit = {"op": "quantize", "module": "0", "scheme": "int4", "symmetric": True, "accuracy_level": 4}
    with raises_code("wrong-value", InputError) as caught:
        apply_edits(nn.Sequential(nn.Linear(8, 8)), [edit | {"group_size": 48}])
    assert caught.value.setting == "group_size"
