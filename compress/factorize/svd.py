"""The best product of two thin matrices, by the singular value decomposition, in a metric of choice.

Eckart & Young 1936: of all matrices of rank r, the first r singular triples of W are nearest to it. Where
errors do not count alike, W is scaled first and the factors are scaled back:

    W L = U S V^T,    up = U_r sqrt(S_r),    down = sqrt(S_r) V_r^T L^-1

so that |(W - up down) L|_F^2 is the sum of the dropped squared singular values, exactly. L is what
`whitened.py`, `asvd.py` and `fisher.py` find; plain SVD has none.

Computed are the eigenvectors of the smaller of W L L^T W^T and L^T W^T W L, which takes a fraction of the
time and memory of a decomposition of W L. Squares lose singular values below a hundred-millionth of the
largest; the product does not suffer, because it is W behind an orthogonal projection, up down = U_r U_r^T W,
or before one, W L V_r V_r^T L^-1. For the first neither L nor its inverse is needed, only L L^T.

Shapes: M = outputs, K = inputs of a layer, r = rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smelt.runtime.layers.low_rank import LowRankLinear

# Of the largest singular value: below it the squares say nothing.
_LOST = 1e-8


@dataclass(frozen=True)
class Metric:
    """What the error of a layer is measured in; all float64.

    into: L, [K, K], or [K] for a diagonal. back: its inverse. square: L L^T, [K, K], where only that is
    known; L is its lower Cholesky factor then. mean: of the inputs, [K]: what a dropped part does to the mean
    of the outputs goes into the bias.
    """

    into: Tensor | None = None
    back: Tensor | None = None
    mean: Tensor | None = None
    square: Tensor | None = None

    def squared(self, weight: Tensor) -> Tensor:
        """Return W L L^T W^T, float64 [M, M]."""
        if self.square is not None:
            return weight @ self.square @ weight.T
        out = self.times(weight)
        return out @ out.T

    def times(self, weight: Tensor) -> Tensor:
        """Return W L, float64 [M, K]."""
        into = torch.linalg.cholesky(self.square) if self.square is not None else self.into
        if into is None:
            return weight
        return weight @ into if into.dim() == 2 else weight * into

    def undone(self, down: Tensor) -> Tensor:
        """Return `down` L^-1, float64 [r, K]."""
        if self.square is not None:
            lower = torch.linalg.cholesky(self.square)
            found: Tensor = torch.linalg.solve_triangular(lower, down, upper=False, left=False)
            return found
        if self.back is None:
            return down
        return down @ self.back if self.back.dim() == 2 else down * self.back

    def error_of(self, off: Tensor) -> float:
        """Return |off L|_F^2 of off, [M, K]."""
        off = off.double()
        if self.square is not None:
            return float(((off @ self.square) * off).sum())
        return float(self.times(off).square().sum())


@dataclass(frozen=True)
class Decomposed:
    """Singular values of W L, falling, and the singular vectors on the smaller side; float64.

    basis: U [M, M] where M <= K, else V [K, K]. The largest entry of each of its columns is positive.
    """

    sigma: Tensor
    basis: Tensor


@torch.no_grad()
def decomposed(weight: Tensor, metric: Metric) -> Decomposed:
    """Return the singular values of W L, and the vectors of the smaller side."""
    weight = weight.detach().double()
    if weight.shape[0] <= weight.shape[1]:
        square = metric.squared(weight)
    else:
        out = metric.times(weight)
        square = out.T @ out
        del out
    values, vectors = torch.linalg.eigh(square)
    vectors = vectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    return Decomposed(values.flip(0).clamp(min=0).sqrt(), vectors * largest.sign())


def spectrum(weight: Tensor, metric: Metric) -> Tensor:
    """Return the singular values of W L, float64, falling."""
    return decomposed(weight, metric).sigma


@torch.no_grad()
def factors(
    weight: Tensor, rank: int, metric: Metric, known: Decomposed | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return up [M, r] and down [r, K] of the best product for `weight` [M, K], and all singular values.

    All float64; the singular values are those of W L, falling. `known` is the decomposition of W L, where it
    was computed before.
    """
    weight = weight.detach().double()
    found = decomposed(weight, metric) if known is None else known
    sigma, basis = found.sigma, found.basis[:, :rank]
    root = sigma[:rank].clamp(min=max(_LOST * float(sigma[0]), 1e-150)).sqrt()
    if weight.shape[0] <= weight.shape[1]:
        up, down = basis * root, (basis.T @ weight) / root.unsqueeze(1)
    else:
        up, down = (metric.times(weight) @ basis) / root, metric.undone(root.unsqueeze(1) * basis.T)
    return up, down, sigma


@torch.no_grad()
def thin_pair(
    layer: nn.Linear, rank: int, metric: Metric, known: Decomposed | None = None
) -> tuple[LowRankLinear, float]:
    """Return the best pair of `rank` for `layer` in `metric`, in eval mode, and its relative error, 0 to 1.

    The bias stays with `up`. Where the metric knows the mean of the inputs, it also gets (W - up down) mean.
    The error is |(W - up down) L|_F / |W L|_F.
    """
    weight = layer.weight.detach().double()
    up, down, sigma = factors(weight, rank, metric, known)
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
