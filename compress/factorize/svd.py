"""The best low-rank factors of a matrix, by singular value decomposition, in a given error metric.

Eckart & Young 1936: of all matrices of rank r, the first r singular triples of W are nearest to it. For a
weighted error, W is scaled first and the factors are scaled back:

    W L = U S V^T,    up = U_r sqrt(S_r),    down = sqrt(S_r) V_r^T L^-1

so that |(W - up down) L|_F^2 is the sum of the dropped squared singular values, exactly. L comes from
`asvd_metric`, `fwsvd_metric` or `whitened_svd_metric`; plain SVD has none.

The eigenvectors of the smaller of W L L^T W^T and L^T W^T W L are computed, which takes a fraction of the
time and memory of a decomposition of W L. Squaring loses singular values below a hundred-millionth of the
largest; the factors are not affected, because their product is W after an orthogonal projection,
up down = U_r U_r^T W, or before one, W L V_r V_r^T L^-1. The first needs only L L^T, not L or its inverse.

Shapes: M = outputs, K = inputs of a layer, r = rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smelt.models.layers import LowRankLinear

# Relative to the largest singular value: smaller ones are lost in the squares.
_MIN_SINGULAR_VALUE = 1e-8


@dataclass(frozen=True)
class ErrorMetric:
    """The error metric of a layer; all float64.

    transform: L, [K, K], or [K] for a diagonal. inverse: its inverse. gram: L L^T, [K, K], if only that is
    known; L is its lower Cholesky factor then. input_mean: mean of the inputs, [K]: the effect of the dropped
    part on the mean of the outputs is added to the bias.
    """

    transform: Tensor | None = None
    inverse: Tensor | None = None
    input_mean: Tensor | None = None
    gram: Tensor | None = None

    def weighted_gram(self, weight: Tensor) -> Tensor:
        """Return W L L^T W^T, float64 [M, M]."""
        if self.gram is not None:
            return weight @ self.gram @ weight.T
        out = self.apply(weight)
        return out @ out.T

    def apply(self, weight: Tensor) -> Tensor:
        """Return W L, float64 [M, K]."""
        into = torch.linalg.cholesky(self.gram) if self.gram is not None else self.transform
        if into is None:
            return weight
        return weight @ into if into.dim() == 2 else weight * into

    def undo(self, down: Tensor) -> Tensor:
        """Return `down` L^-1, float64 [r, K]."""
        if self.gram is not None:
            lower = torch.linalg.cholesky(self.gram)
            found: Tensor = torch.linalg.solve_triangular(lower, down, upper=False, left=False)
            return found
        if self.inverse is None:
            return down
        return down @ self.inverse if self.inverse.dim() == 2 else down * self.inverse

    def squared_error(self, off: Tensor) -> float:
        """Return |off L|_F^2 of off, [M, K]."""
        off = off.double()
        if self.gram is not None:
            return float(((off @ self.gram) * off).sum())
        return float(self.apply(off).square().sum())


@dataclass(frozen=True)
class Decomposition:
    """Singular values of W L, falling, and the singular vectors on the smaller side; float64.

    basis: U [M, M] where M <= K, else V [K, K]. The largest entry of each of its columns is positive.
    """

    singular_values: Tensor
    basis: Tensor


@torch.no_grad()
def decompose(weight: Tensor, metric: ErrorMetric) -> Decomposition:
    """Return the singular values of W L, and the singular vectors of the smaller side."""
    weight = weight.detach().double()
    if weight.shape[0] <= weight.shape[1]:
        square = metric.weighted_gram(weight)
    else:
        out = metric.apply(weight)
        square = out.T @ out
        del out
    values, vectors = torch.linalg.eigh(square)
    vectors = vectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    return Decomposition(values.flip(0).clamp(min=0).sqrt(), vectors * largest.sign())


@torch.no_grad()
def low_rank_factors(
    weight: Tensor, rank: int, metric: ErrorMetric, decomposition: Decomposition | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best factors up [M, r] and down [r, K] of `weight` [M, K], and all singular values.

    All float64; the singular values are those of W L, falling. `decomposition`: of W L, if it was computed
    before.
    """
    weight = weight.detach().double()
    found = decompose(weight, metric) if decomposition is None else decomposition
    sigma, basis = found.singular_values, found.basis[:, :rank]
    root = sigma[:rank].clamp(min=max(_MIN_SINGULAR_VALUE * float(sigma[0]), 1e-150)).sqrt()
    if weight.shape[0] <= weight.shape[1]:
        up, down = basis * root, (basis.T @ weight) / root.unsqueeze(1)
    else:
        up, down = (metric.apply(weight) @ basis) / root, metric.undo(root.unsqueeze(1) * basis.T)
    return up, down, sigma


@torch.no_grad()
def low_rank_layer(
    layer: nn.Linear, rank: int, metric: ErrorMetric, decomposition: Decomposition | None = None
) -> tuple[LowRankLinear, float]:
    """Return the best factors of `layer` with `rank` in `metric`, in eval mode, and their relative error.

    The bias is kept in `up`. If the metric has the mean of the inputs, (W - up down) mean is added to it.
    The error is |(W - up down) L|_F / |W L|_F.
    """
    weight = layer.weight.detach().double()
    up, down, sigma = low_rank_factors(weight, rank, metric, decomposition)
    rows, columns = weight.shape
    pair = LowRankLinear(columns, rows, rank, bias=layer.bias is not None)
    pair.up.weight.copy_(up)
    pair.down.weight.copy_(down)
    if layer.bias is not None:
        bias = layer.bias.double()
        if metric.input_mean is not None:
            bias = bias + (weight - up @ down) @ metric.input_mean
        pair.up.bias.copy_(bias)
    squares = sigma.square()
    error = float((squares[rank:].sum() / squares.sum().clamp(min=1e-300)).sqrt())
    return pair.eval(), error


# Lower bound, relative to the mean: without it, tiny inputs and inputs without a gradient have no weight.
_MIN_SCALE = 1e-4


def asvd_metric(magnitude: Tensor, alpha: float) -> ErrorMetric:
    """Return the metric of weights times the power `alpha` of the inputs' mean magnitudes, float64 [K].

    ASVD (activation-aware SVD), Yuan et al. 2023, arXiv:2312.05821: W S = U S' V^T with the diagonal
    S_j = (mean |X_j|)^alpha over a layer's inputs X, alpha 0.5. Unlike `whitened_svd_metric`, it does not use
    correlations between inputs.
    """
    floor = _MIN_SCALE * float(magnitude.mean()) or 1.0
    scale = magnitude.clamp(min=floor) ** alpha
    return ErrorMetric(transform=scale, inverse=1 / scale)


def fwsvd_metric(information: Tensor) -> ErrorMetric:
    """Return the metric that scales weights by the Fisher information of their input.

    FWSVD (Fisher-weighted SVD), Hsu et al. 2022, arXiv:2207.00112: the empirical Fisher information of a
    weight is its mean squared gradient; that of a row is the sum over its weights, so that the weighted
    problem has a closed form. The paper multiplies from the left, Z = X W + b: a row of its W belongs to one
    input, which is a column here. So W D = U S V^T with D_j = sqrt(sum_i F_ij).

    Args:
        information: mean squared gradients, float64 [M, K].
    """
    inputs = information.sum(dim=0).sqrt()
    floor = _MIN_SCALE * float(inputs.mean()) or 1.0
    scale = inputs.clamp(min=floor)
    return ErrorMetric(transform=scale, inverse=1 / scale)


# Added to all eigenvalues, relative to their mean, so that rare directions keep some weight.
_RIDGE_RATIO = 0.1


def whitened_svd_metric(second_moment: Tensor, sums: Tensor, tokens: int, *, bias: bool) -> ErrorMetric:
    """Return the metric of a layer's output error.

    SVD-LLM (whitened SVD), Wang et al. 2024, arXiv:2403.07378: with C = X X^T of a layer's inputs and
    L L^T = C, the squared error |(W - W') X|_F^2 is |(W - W') L|_F^2, so dropping the smallest singular
    values of W L is optimal, and their squares are the error. The ridge makes C regular, so that L can be its
    Cholesky factor; for a layer with no more outputs than inputs, C itself is enough. The bias of a layer can
    compensate the mean: then C is the covariance, and the bias takes the mean output of the dropped part.

    Args:
        second_moment: X X^T, float64 [K, K], summed over tokens.
        sums: of the inputs, float64 [K].
        tokens: number of tokens.
        bias: whether the layer has one.
    """
    mean = sums / tokens
    covariance = second_moment / tokens  # new memory, which is changed below
    if bias:
        covariance = covariance - torch.outer(mean, mean)
    ridge = _RIDGE_RATIO * max(0.0, float(covariance.diagonal().mean())) or 1.0
    covariance.diagonal().add_(ridge)
    return ErrorMetric(gram=covariance, input_mean=mean if bias else None)
