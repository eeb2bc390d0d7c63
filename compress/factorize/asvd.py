"""Activation-aware SVD: inputs with large activations have more weight.

ASVD, Yuan et al. 2023, arXiv:2312.05821: W S = U S' V^T with the diagonal S_j = (mean |X_j|)^alpha over a
layer's inputs X, alpha 0.5. `whitened_svd.py` also uses correlations between inputs.

Shapes: K = inputs of a layer.
"""

from __future__ import annotations

from torch import Tensor

from smelt.compress.factorize.svd import ErrorMetric

# Lower bound, relative to the mean: inputs below it would have no weight at all.
_MIN_SCALE = 1e-4


def asvd_metric(magnitude: Tensor, alpha: float) -> ErrorMetric:
    """Return the metric of weights times the power `alpha` of the inputs' mean magnitudes, float64 [K]."""
    floor = _MIN_SCALE * float(magnitude.mean()) or 1.0
    scale = magnitude.clamp(min=floor) ** alpha
    return ErrorMetric(transform=scale, inverse=1 / scale)
