"""Whitened SVD: of all products of a rank the one whose outputs on real rows are nearest.

SVD-LLM, Wang et al. 2024, arXiv:2403.07378: with C = X X^T of a layer's inputs and L L^T = C, the squared
error |(W - W') X|_F^2 is |(W - W') L|_F^2, so that dropping the smallest singular values of W L is best, and
what they are is what is lost. The ridge below makes C far from singular, so that L may be its Cholesky
factor; where a layer has no more outputs than inputs, C itself is enough (svd.py). A layer with a bias is
free to move its mean: there C is the covariance, and the bias takes what the mean of the inputs made of the
dropped part.

Shapes: K = inputs of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compress.factorize.svd import Metric

# Of the mean eigenvalue: what is added to all, so that directions that few rows have are not lost altogether.
_RIDGE = 0.1


def whitened(moment: Tensor, total: Tensor, tokens: int, *, bias: bool) -> Metric:
    """Return the metric of a layer's outputs.

    Args:
        moment: X X^T, float64 [K, K], summed over tokens.
        total: of the inputs, float64 [K].
        tokens: how many.
        bias: whether the layer has one.
    """
    mean = total / tokens
    covariance = moment / tokens  # new memory, which is changed below
    if bias:
        covariance = covariance - torch.outer(mean, mean)
    ridge = _RIDGE * max(0.0, float(covariance.diagonal().mean())) or 1.0
    covariance.diagonal().add_(ridge)
    return Metric(square=covariance, mean=mean if bias else None)
