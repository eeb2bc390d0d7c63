"""Whitened SVD: the low-rank factors with the least output error on samples.

SVD-LLM, Wang et al. 2024, arXiv:2403.07378: with C = X X^T of a layer's inputs and L L^T = C, the squared
error |(W - W') X|_F^2 is |(W - W') L|_F^2, so dropping the smallest singular values of W L is optimal, and
their squares are the error. The ridge below makes C regular, so that L can be its Cholesky factor; for a
layer with no more outputs than inputs, C itself is enough (svd.py). The bias of a layer can compensate the
mean: then C is the covariance, and the bias takes the mean output of the dropped part.

Shapes: K = inputs of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compress.factorize.svd import ErrorMetric

# Added to all eigenvalues, relative to their mean, so that rare directions keep some weight.
_RIDGE_RATIO = 0.1


def whitened_svd_metric(second_moment: Tensor, sums: Tensor, tokens: int, *, bias: bool) -> ErrorMetric:
    """Return the metric of a layer's output error.

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
