"""pow2 against its formula, number by number, and against ONNX Runtime."""

import itertools
import math

import pytest
import torch
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_module
from tests.support import schemes

SIZES = (16, 32, 64, 128)


def by_formula(x, scale):
    """LogQuant of Miyashita et al. 2016 with a sign, and zero below half the least power."""
    share = abs(x) / scale
    if share < 2**-7:
        return 0.0
    power = min(max(round(-math.log2(share)), 0), 6)
    return math.copysign(2.0**-power * scale, x)


@pytest.mark.parametrize("size", SIZES)
def test_values_equal_the_formula(size):
    torch.manual_seed(0)
    weight = torch.randn(6, 256).pow(3) * 0.01
    values = schemes.rounded_matrix("pow2", weight, group_size=size).dequantize()
    for row, row_values in zip(weight.tolist(), values.tolist(), strict=True):
        for start in range(0, 256, size):
            group = row[start : start + size]
            scale = float(torch.tensor(max(map(abs, group))).half())
            expected = [by_formula(x, scale) for x in group]
            assert row_values[start : start + size] == pytest.approx(expected, rel=1e-6, abs=0)
    assert len(values.unique()) > 15


def test_small_scales_are_exported_exactly():
    """A 64th of them would be no whole float16."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 24, bias=False)
    linear.weight.data *= 1e-4
    layer = quantize_module(linear, "pow2").eval()
    x = torch.randn(2, 3, 64)
    (actual,) = schemes.run_onnx_runtime([layer], x)
    with torch.inference_mode():
        expected = layer(x)
    assert (torch.from_numpy(actual) - expected).abs().max() < 1e-5 * expected.std()


def test_every_layout_is_exported_as_eight_bits_unpacked_once(tmp_path):
    torch.manual_seed(0)
    layers = [
        quantize_module(nn.Linear(300, 24), "pow2", {"group_size": size, "accuracy_level": level}).eval()
        for size, level in itertools.product(SIZES, (0, 4))
    ]
    attributes = schemes.fused_matmul_attributes(layers, tmp_path / "optimized.onnx")
    assert {a["bits"] for a in attributes} == {8}


def test_graph_stores_four_bits_per_weight():
    layer = quantize_module(nn.Linear(1024, 512), "pow2").eval()
    onnx_model = schemes.export_layers([layer], torch.randn(1, 2, 1024))
    stored = [t for t in onnx_model.graph.initializer if list(t.dims)[:1] == [512] and len(t.dims) > 1]
    expected_bytes = 512 * (1024 // 2 + 16 * 2)
    assert sum(len(t.raw_data) for t in stored) == expected_bytes
    assert expected_bytes < len(onnx_model.SerializeToString()) < 1.05 * expected_bytes
