"""The grids that docs/measurements/int8-static.md compares are what it says they are."""

from __future__ import annotations

import benchmarks_path  # noqa: F401 -- before what lies in benchmarks
import int8_grids
import numpy as np
import pytest
import torch
from torch import nn

from smelt.compress.quantize.plan_layers import round_to_nearest
from smelt.quantization.schemes.registry import default_options, find_scheme

WEIGHT = torch.tensor([[1.27, -0.304, 0.996], [0.0254, 0.0101, -0.0127]])


def test_grids_are_those_of_the_formulas() -> None:
    scheme = find_scheme("int8-dynamic")
    own = round_to_nearest(WEIGHT, scheme, default_options(scheme))
    values = scheme.dequantize(own.q_weight, own.qparams, default_options(scheme)).flatten(1)
    torch.testing.assert_close(int8_grids.quantize_dequantize(WEIGHT, "channel"), values)
    # one step for all, 1.27 / 127: of the second row little is left
    tensor = torch.tensor([[1.27, -0.30, 1.0], [0.03, 0.01, -0.01]])
    torch.testing.assert_close(int8_grids.quantize_dequantize(WEIGHT, "tensor"), tensor)
    # from -0.304 to 1.27 in 255 steps, zero at code 49
    step = 1.574 / 255
    codes = np.round(WEIGHT[0].double().numpy() / step) + 49
    wanted = torch.tensor((codes.clip(0, 255) - 49) * step, dtype=torch.float32)
    torch.testing.assert_close(int8_grids.quantize_dequantize(WEIGHT, "channel, zero points")[0], wanted)
    torch.testing.assert_close(int8_grids.quantize_dequantize(WEIGHT, "tensor, zero points")[0], wanted)


@pytest.mark.parametrize(("grid", "scales"), [("channel", [0.01, 0.0002]), ("tensor", [0.01, 0.01])])
def test_rows_of_a_matrix_have_one_scale_per_tensor(grid: str, scales: list[float]) -> None:
    from smelt.compress.quantize.plan_layers import quantize_module

    layer = nn.Linear(3, 2)
    layer.weight.data = WEIGHT.clone()
    new = quantize_module(layer, "int8-dynamic", {"granularity": grid})
    torch.testing.assert_close(new.matrix.tensor("scales"), torch.tensor(scales))
    torch.testing.assert_close(new.matrix.dequantize(), int8_grids.quantize_dequantize(WEIGHT, grid))
