"""Fisher-weighted SVD: inputs on whose weights the loss depends more count more.

FWSVD, Hsu et al. 2022, arXiv:2207.00112: the empirical Fisher information of a weight is its mean squared
gradient; that of a row the sum over its weights, so that the weighted problem keeps a closed form. The paper
multiplies from the left, Z = X W + b: a row of its W is what one input is multiplied with, a column here.
So W D = U S V^T with D_j = sqrt(sum_i F_ij).

Shapes: M = outputs, K = inputs of a layer.
"""

from __future__ import annotations

from torch import Tensor

from smelt.compress.factorize.svd import Metric

# Of the mean: inputs without a gradient would be free to be lost altogether.
_SMALLEST = 1e-4


def fisher_weighted(information: Tensor) -> Metric:
    """Return the metric of weights times what the loss says of their input.

    Args:
        information: mean squared gradients, float64 [M, K].
    """
    inputs = information.sum(dim=0).sqrt()
    floor = _SMALLEST * float(inputs.mean()) or 1.0
    scale = inputs.clamp(min=floor)
    return Metric(into=scale, back=1 / scale)
