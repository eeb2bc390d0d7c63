"""The best product of two thin matrices, by the singular value decomposition, in a metric of choice.

Eckart & Young 1936: of all matrices of rank r, the first r singular triples of W are nearest to it. Where
errors do not count alike, W is scaled first and the factors are scaled back:

    W L = U S V^T,    up = U_r sqrt(S_r),    down = sqrt(S_r) V_r^T L^-1

so that |(W - up down) L|_F^2 is the sum of the dropped squared singular values, exactly. L is what
`whitened.py`, `asvd.py` and `fisher.py` find; plain SVD has none.

Shapes: M = outputs, K = inputs of a layer, r = rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smelt.runtime.layers.low_rank import LowRankLinear


@dataclass(frozen=True)
class Metric:
    """What the error of a layer is measured in; all float64.

    into: L, [K, K], or [K] for a diagonal; back: its inverse.
    mean: of the inputs, [K]: what a dropped part does to the mean of the outputs goes into the bias.
    """

    into: Tensor | None = None
    back: Tensor | None = None
    mean: Tensor | None = None


def scaled(weight: Tensor, metric: Metric) -> Tensor:
    """Return W L, float64 [M, K]."""
    out = weight.detach().double()
    if metric.into is not None:
        out = out @ metric.into if metric.into.dim() == 2 else out * metric.into
    return out


def spectrum(weight: Tensor, metric: Metric) -> Tensor:
    """Return the singular values of W L, float64, falling."""
    values: Tensor = torch.linalg.svdvals(scaled(weight, metric))
    return values


@torch.no_grad()
def thin_pair(layer: nn.Linear, rank: int, metric: Metric) -> tuple[LowRankLinear, float]:
    """Return the best pair of `rank` for `layer` in `metric`, in eval mode, and its relative error, 0 to 1.

    The bias stays with `up`. Where the metric knows the mean of the inputs, it also gets (W - up down) mean.
    The error is |(W - up down) L|_F / |W L|_F.
    """
    weight = layer.weight.detach().double()
    u, sigma, vt = torch.linalg.svd(scaled(weight, metric), full_matrices=False)
    root = sigma[:rank].sqrt()
    up, down = u[:, :rank] * root, root.unsqueeze(1) * vt[:rank]
    if metric.back is not None:
        down = down @ metric.back if metric.back.dim() == 2 else down * metric.back
    rows, columns = weight.shape
    pair = LowRankLinear(columns, rows, rank, bias=layer.bias is not None)
    pair.up.weight.copy_(up)
    pair.down.weight.copy_(down)
    if layer.bias is not None:
        bias = layer.bias.double()
        if metric.mean is not None:
            bias = bias + (weight - up @ down) @ metric.mean
        pair.up.bias.copy_(bias)
    squares = sigma.square()
    error = float((squares[rank:].sum() / squares.sum().clamp(min=1e-300)).sqrt())
    return pair.eval(), error
