"""Fisher-weighted SVD: outputs on whose weights the loss depends more count more.

FWSVD, Hsu et al. 2022, arXiv:2207.00112: the empirical Fisher information of a weight is its mean squared
gradient; a row's is the sum over its weights, so that the weighted problem keeps a closed form:
D W = U S V^T with D_i = sqrt(sum_j F_ij).

Shapes: M = outputs, K = inputs of a layer.
"""

from __future__ import annotations

from torch import Tensor

from smelt.compress.factorize.svd import Metric

# Of the mean: rows without a gradient would be free to be lost altogether.
_SMALLEST = 1e-4


def fisher_weighted(information: Tensor) -> Metric:
    """Return the metric of weights times what the loss says of their row.

    Args:
        information: mean squared gradients, float64 [M, K].
    """
    rows = information.sum(dim=1).sqrt()
    floor = _SMALLEST * float(rows.mean()) or 1.0
    return Metric(outputs=rows.clamp(min=floor))
