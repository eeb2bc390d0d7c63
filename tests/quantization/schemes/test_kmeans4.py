"""kmeans4 against the best 16 values there are, which dynamic programming finds, and against ONNX Runtime."""

import itertools

import pytest
import torch
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.quantization.schemes.registry import find_scheme
from tests.support import schemes

OPTIONS = {"group_size": 128, "accuracy_level": 0}


def least_error(row, count):
    """The squared error of the best `count` values for `row`: exact k-means of one dimension.

    Best clusters are runs of the sorted numbers; cost[k][n] is the least over where the last run begins
    (Wang and Song 2011, Ckmeans.1d.dp, The R Journal 3/2).
    """
    rising = row.double().sort().values
    sums, squares = (torch.cat([torch.zeros(1), t.cumsum(0)]) for t in (rising, rising**2))
    size = len(rising)
    starts, ends = torch.arange(size + 1)[:, None], torch.arange(size + 1)[None]
    runs = squares[ends] - squares[starts] - (sums[ends] - sums[starts]) ** 2 / (ends - starts).clamp(min=1)
    runs = runs.masked_fill(starts >= ends, torch.inf)
    cost = runs[0]
    for _ in range(count - 1):
        cost = (cost[:, None] + runs).amin(dim=0)
    return float(cost[size])


def weights(kind, rows=12, width=128):
    torch.manual_seed(0)
    return {
        "normal": torch.randn(rows, width),
        "heavy": torch.distributions.StudentT(3.0).sample((rows, width)),
        "uniform": torch.rand(rows, width) - 0.3,
    }[kind] * 0.05  # fmt: skip


@pytest.mark.parametrize(("kind", "most"), [("normal", 1.25), ("heavy", 1.7), ("uniform", 1.12)])
def test_error_is_close_to_the_optimum_of_sixteen_values(kind, most):
    weight = weights(kind, 60)
    off = (
        (schemes.rounded_matrix("kmeans4", weight, **OPTIONS).dequantize() - weight)
        .double()
        .square()
        .sum(dim=1)
    )
    least = torch.tensor([least_error(row, 16) for row in weight], dtype=torch.float64)
    assert (off >= 0.999 * least).all()
    assert (off / least).mean() < most


def test_sixteen_even_values_are_found_within_half_a_byte_step():
    values = torch.linspace(-1, 1, 16)
    matrix = schemes.rounded_matrix("kmeans4", values.repeat(8)[None], **OPTIONS)
    assert (matrix.tensor("codebook")[0, 0].int() - 128).tolist() == (values * 127).round().int().tolist()
    assert matrix.unpack().q_weight[0, 0].tolist() == 8 * list(range(16))
    assert (matrix.dequantize() - values.repeat(8)).abs().max() < 0.51 / 127


def test_midpoint_is_rounded_to_the_lower_value():
    grid = {"scales": torch.ones(1, 1), "codebook": (128 + 2 * torch.arange(16)).byte()[None, None]}
    steps = torch.tensor([[[1.0, 1.1, 2.9, 3.0]]])
    assert find_scheme("kmeans4").quantize(steps, grid, {}).tolist() == [[[0, 1, 1, 1]]]


def test_zeros_are_kept():
    weight = weights("normal") + 0.05
    weight[:, ::3] = 0
    assert schemes.rounded_matrix("kmeans4", weight, **OPTIONS).dequantize()[:, ::3].eq(0).all()


def test_every_layout_is_exported_as_eight_bits_unpacked_once(tmp_path):
    torch.manual_seed(0)
    layers = [
        quantize_module(nn.Linear(300, 24), "kmeans4", {"group_size": size, "accuracy_level": level})
        for size, level in itertools.product((128, 256), (0, 4))
    ]
    attributes = schemes.fused_matmul_attributes(
        [layer.eval() for layer in layers], tmp_path / "optimized.onnx"
    )
    assert sorted((a["bits"], a["block_size"], a["accuracy_level"]) for a in attributes) == [
        (8, 128, 0), (8, 128, 4), (8, 256, 0), (8, 256, 4)
    ]  # fmt: skip


def test_graph_stores_four_bits_per_weight_and_the_codebooks():
    layer = quantize_module(nn.Linear(1024, 512), "kmeans4").eval()
    onnx_model = schemes.export_layers([layer], torch.randn(1, 2, 1024))
    stored = [t for t in onnx_model.graph.initializer if list(t.dims)[:1] == [512] and len(t.dims) > 1]
    expected_bytes = 512 * (1024 // 2 + 4 * 16 + 4 * 2)
    assert sum(len(t.raw_data) for t in stored) == expected_bytes
    assert (
        expected_bytes < len(onnx_model.SerializeToString()) < 1.05 * expected_bytes
    )  # tables of spreading among it


def test_padding_of_the_last_group_is_not_a_weight_of_zero():
    weight = torch.linspace(0.2, 0.9, 16)[None]  # as many as there are values
    values = schemes.rounded_matrix("kmeans4", weight).dequantized()
    torch.testing.assert_close(values, weight, rtol=0, atol=0.9 / 127 / 2 + 1e-3)
