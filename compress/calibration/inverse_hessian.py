"""The Cholesky factor of the inverse of a damped second moment, used by SparseGPT and GPTQ.

Frantar & Alistarh 2023, SparseGPT, arXiv:2301.00774, and Frantar et al. 2023, GPTQ, arXiv:2210.17323, as in
their published code: H = 2 X X^T / tokens, 1 on the diagonal of inputs that are always 0, and a part of the
mean diagonal added to all.

Shapes: K = inputs of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compress.calibration.statistics import InputStatistics

HESSIAN_DAMPING = 0.01  # relative to the mean of the diagonal
_MAX_DAMPING = 10.0  # more damping would drown H


class NotInvertibleError(ValueError):
    """The second moment of a layer's inputs has no inverse."""


def inverse_cholesky(statistics: InputStatistics) -> tuple[Tensor, float]:
    """Return U, upper triangular float64 [K, K], with U^T U the inverse of the damped H [K, K].

    The damping is 1 % of the mean diagonal, or the smallest power of ten times that which makes H invertible;
    it is returned as well. At most two matrices of the size of the second moment are in memory in addition.

    Args:
        statistics: of the layer's inputs, with the second moment.

    Raises:
        NotInvertibleError: H is not invertible with any damping (it is not finite, or not semidefinite).
    """
    damp = HESSIAN_DAMPING
    while damp <= _MAX_DAMPING:
        factor = _inverse_cholesky(statistics, damp)
        if factor is not None:
            return factor, damp
        damp *= 10
    raise NotInvertibleError("the second moment of its inputs cannot be inverted")


def _inverse_cholesky(statistics: InputStatistics, damp: float) -> Tensor | None:
    """Return U for one damping, None if H is not invertible with it; frees memory as early as possible."""
    assert statistics.second_moment is not None
    matrix = statistics.second_moment * (2 / max(1, statistics.tokens))
    diagonal = matrix.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal.add_(damp * float(diagonal.mean()))
    del diagonal  # a view, which would keep the matrix in memory
    matrix, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        return None
    matrix = torch.cholesky_inverse(matrix)
    factor, failed = torch.linalg.cholesky_ex(matrix, upper=True)
    # the sum detects values that are not finite without the extra matrix of isfinite
    return None if int(failed) or not bool(factor.sum().isfinite()) else factor
