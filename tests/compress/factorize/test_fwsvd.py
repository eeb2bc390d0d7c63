"""FWSVD against its formula."""

import torch
from torch import nn

from smelt.compress.factorize.svd import fwsvd_metric, low_rank_layer


def test_it_is_the_svd_of_the_rows_weighted_and_weighted_back_as_the_paper_writes_a_layer():
    torch.manual_seed(0)
    layer = nn.Linear(32, 24)
    information = torch.rand(24, 32, dtype=torch.float64) * torch.logspace(-3, 2, 32).double()
    pair, _ = low_rank_layer(layer, 6, fwsvd_metric(information))
    # Z = X W + b: rows of W [inputs, outputs] are weighted, A = I^-1 U S, B = V^T
    paper = layer.weight.detach().double().T
    rows = information.T.sum(dim=1).sqrt().unsqueeze(1)
    u, s, vt = torch.linalg.svd(rows * paper, full_matrices=False)
    wanted = (u[:, :6] * s[:6] / rows) @ vt[:6]
    made = pair.up.weight.double() @ pair.down.weight.double()
    torch.testing.assert_close(made, wanted.T, rtol=1e-3, atol=1e-5)


def test_an_input_without_a_gradient_does_not_divide_by_zero():
    layer = nn.Linear(32, 24)
    information = torch.ones(24, 32, dtype=torch.float64)
    information[:, 3] = 0
    pair, _ = low_rank_layer(layer, 6, fwsvd_metric(information))
    assert bool(pair.down.weight.isfinite().all())
