"""Activation-aware SVD: inputs that are large on real rows count more.

ASVD, Yuan et al. 2023, arXiv:2312.05821: W S = U S' V^T with the diagonal S_j = (mean |X_j|)^alpha over a
layer's inputs X, alpha 0.5. `whitened.py` goes further: it knows which inputs go together.

Shapes: K = inputs of a layer.
"""

from __future__ import annotations

from torch import Tensor

from smelt.compress.factorize.svd import Metric

# Of the mean: inputs below it would be free to be lost altogether.
_SMALLEST = 1e-4


def activation_aware(magnitude: Tensor, alpha: float) -> Metric:
    """Return the metric of weights times the power `alpha` of the inputs' mean magnitudes, float64 [K]."""
    floor = _SMALLEST * float(magnitude.mean()) or 1.0
    scale = magnitude.clamp(min=floor) ** alpha
    return Metric(into=scale, back=1 / scale)
