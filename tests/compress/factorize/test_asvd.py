"""ASVD against its formula."""

import pytest
import torch
from torch import nn

from smelt.compress.factorize.svd import asvd_metric, low_rank_layer


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_asvd_pair_equals_svd_of_scaled_weights(alpha):
    torch.manual_seed(0)
    layer = nn.Linear(32, 24)
    magnitude = torch.rand(32, dtype=torch.float64) * 5 + 0.1
    pair, _ = low_rank_layer(layer, 6, asvd_metric(magnitude, alpha))
    scale = magnitude**alpha
    u, s, vt = torch.linalg.svd(layer.weight.detach().double() * scale, full_matrices=False)
    expected = (u[:, :6] * s[:6]) @ vt[:6] / scale
    product = pair.up.weight.double() @ pair.down.weight.double()
    torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-6)


def test_always_zero_input_gives_finite_weights():
    layer = nn.Linear(32, 24)
    magnitude = torch.ones(32, dtype=torch.float64)
    magnitude[3] = 0
    pair, _ = low_rank_layer(layer, 6, asvd_metric(magnitude, 0.5))
    assert bool(pair.down.weight.isfinite().all())
