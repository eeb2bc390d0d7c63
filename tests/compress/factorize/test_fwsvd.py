"""FWSVD against its formula."""

import torch
from torch import nn

from smelt.compress.factorize.svd import fwsvd_metric, low_rank_layer


def test_fwsvd_pair_equals_formula_of_paper():
    torch.manual_seed(0)
    layer = nn.Linear(32, 24)
    information = torch.rand(24, 32, dtype=torch.float64) * torch.logspace(-3, 2, 32).double()
    pair, _ = low_rank_layer(layer, 6, fwsvd_metric(information))
    # Z = X W + b: rows of W [inputs, outputs] are weighted, A = I^-1 U S, B = V^T
    paper = layer.weight.detach().double().T
    rows = information.T.sum(dim=1).sqrt().unsqueeze(1)
    u, s, vt = torch.linalg.svd(rows * paper, full_matrices=False)
    expected = (u[:, :6] * s[:6] / rows) @ vt[:6]
    product = pair.up.weight.double() @ pair.down.weight.double()
    torch.testing.assert_close(product, expected.T, rtol=1e-3, atol=1e-5)


def test_input_without_gradient_gives_finite_weights():
    layer = nn.Linear(32, 24)
    information = torch.ones(24, 32, dtype=torch.float64)
    information[:, 3] = 0
    pair, _ = low_rank_layer(layer, 6, fwsvd_metric(information))
    assert bool(pair.down.weight.isfinite().all())
