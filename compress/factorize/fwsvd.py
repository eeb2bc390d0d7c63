"""Fisher-weighted SVD: inputs have weight by the sensitivity of the loss to their weights.

FWSVD, Hsu et al. 2022, arXiv:2207.00112: the empirical Fisher information of a weight is its mean squared
gradient; that of a row is the sum over its weights, so that the weighted problem has a closed form. The paper
multiplies from the left, Z = X W + b: a row of its W belongs to one input, which is a column here.
So W D = U S V^T with D_j = sqrt(sum_i F_ij).

Shapes: M = outputs, K = inputs of a layer.
"""

from __future__ import annotations

from torch import Tensor

from smelt.compress.factorize.svd import ErrorMetric

# Lower bound, relative to the mean: inputs without a gradient would have no weight at all.
_MIN_SCALE = 1e-4


def fwsvd_metric(information: Tensor) -> ErrorMetric:
    """Return the metric that scales weights by the Fisher information of their input.

    Args:
        information: mean squared gradients, float64 [M, K].
    """
    inputs = information.sum(dim=0).sqrt()
    floor = _MIN_SCALE * float(inputs.mean()) or 1.0
    scale = inputs.clamp(min=floor)
    return ErrorMetric(transform=scale, inverse=1 / scale)
