"""mxfp4 against ml_dtypes' types of the OCP formats, transformers' decoder, and ONNX Runtime."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from smelt.compress.quantize.plan_layers import quantize_module, round_to_nearest
from smelt.quantization.schemes.float4 import Mxfp4
from tests.support import schemes

OPTIONS = {"group_size": 32, "accuracy_level": 4}


def by_specification(row):
    """Section 6.3 of the specification, with numbers rounded by ml_dtypes, for one group, float32 [32]."""
    largest = np.abs(row).max()
    scale = np.float32(2.0) ** (np.floor(np.log2(largest)) - 2) if largest else np.float32(1)
    return (row / scale).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale


def drawn(rows=6, width=256, power=3):
    torch.manual_seed(0)
    return torch.randn(rows, width).pow(power) * 0.01


@pytest.mark.parametrize("power", [1, 3, 9])
def test_values_equal_the_specification(power):
    weight = drawn(power=power)
    values = schemes.rounded_matrix("mxfp4", weight).dequantize().numpy()
    expected = np.concatenate([by_specification(g) for g in weight.reshape(-1, 32).numpy()])
    assert np.array_equal(values.ravel(), expected)


def test_ties_are_rounded_to_even_and_the_range_ends_at_6():
    row = torch.tensor([4.0, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0, 7.9, -7.9, 0.2, -0.2, 0.0] + 19 * [0.0])
    codes, grid = round_to_nearest(row[None], Mxfp4(), OPTIONS)
    assert grid["scales"].tolist() == [[1.0]]
    assert codes[0, 0, :13].tolist() == [6, 0, 2, 2, 12, 4, 6, 6, 7, 15, 0, 0, 0]


@pytest.mark.parametrize(
    ("largest", "exponent"), [(1.0, -2), (1.99, -2), (2.0, -1), (3e38, 125), (1e-30, -102)]
)
def test_scale_is_two_powers_below_the_largest_magnitude(largest, exponent):
    group = torch.zeros(1, 1, 32)
    group[0, 0, 5] = -largest
    assert Mxfp4().compute_qparams(group, 32, OPTIONS)["scales"].item() == 2.0**exponent


def test_transformers_decodes_the_stored_bytes_to_the_same_values():
    """Its decoder of gpt-oss takes bytes of two codes and E8M0 scales, and gives inputs by outputs."""
    matrix = schemes.rounded_matrix("mxfp4", drawn())
    scales = matrix.tensor("scales").to(torch.float8_e8m0fnu).view(torch.uint8)
    values = convert_moe_packed_tensors(matrix.tensor("codes")[None], scales[None], dtype=torch.float32)
    assert values[0].T.equal(matrix.dequantize())


def test_every_level_is_exported_as_eight_bits_unpacked_once(tmp_path):
    torch.manual_seed(0)
    layers = [
        quantize_module(nn.Linear(width, 24), "mxfp4", {"group_size": 32, "accuracy_level": level}).eval()
        for width, level in itertools.product((300, 64), (0, 4))
    ]
    attributes = schemes.fused_matmul_attributes(layers[:2], tmp_path / "optimized.onnx")
    attributes += schemes.fused_matmul_attributes(layers[2:], tmp_path / "optimized.onnx")
    assert {a["bits"] for a in attributes} == {8}
    assert {a["block_size"] for a in attributes} == {32}


@pytest.mark.parametrize("size", [1e-4, 1e-9])
def test_small_scales_are_exported_exactly(size):
    """Of 1e-9 they are none that float16 holds."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 24, bias=False)
    linear.weight.data *= size
    layer = quantize_module(linear, "mxfp4").eval()
    x = torch.randn(2, 3, 64)
    (actual,) = schemes.run_onnx_runtime([layer], x)
    with torch.inference_mode():
        expected = layer(x)
    assert (torch.from_numpy(actual) - expected).abs().max() < 1e-5 * expected.std()


def test_graph_stores_four_bits_per_weight_and_two_byte_scales():
    layer = quantize_module(nn.Linear(1024, 512), "mxfp4").eval()
    onnx_model = schemes.export_layers([layer], torch.randn(1, 2, 1024))
    stored = [t for t in onnx_model.graph.initializer if list(t.dims)[:1] == [512] and len(t.dims) > 1]
    expected_bytes = 512 * (1024 // 2 + 32 * 2)
    assert sum(len(t.raw_data) for t in stored) == expected_bytes
    assert expected_bytes < len(onnx_model.SerializeToString()) < 1.05 * expected_bytes
