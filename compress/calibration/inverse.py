"""The Cholesky factor of the inverse of a damped second moment, which SparseGPT and GPTQ go along.

Frantar & Alistarh 2023, SparseGPT, arXiv:2301.00774, and Frantar et al. 2023, GPTQ, arXiv:2210.17323, as in
their published code: H = 2 X X^T / tokens, 1 on the diagonal of inputs that are always 0, and a part of the
mean diagonal added to all.

Shapes: K = inputs of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compress.calibration.statistics import InputStatistics

DAMP = 0.01  # of the mean of the diagonal
_MOST = 10.0  # no damping beyond it: H would be forgotten


class NotInvertibleError(ValueError):
    """The second moment of a layer's inputs has no inverse."""


def inverse_factor(found: InputStatistics) -> tuple[Tensor, float]:
    """Return U, upper triangular float64 [K, K], with U^T U the inverse of the damped H [K, K].

    Where 1 % of the mean diagonal is too little to invert it, ten times as much is added, and so on; what it
    was in the end comes second. Beside the second moment two matrices of its size are in memory at most.

    Args:
        found: what the layer is fed, with its second moment.

    Raises:
        NotInvertibleError: no damping makes it one that can be inverted (it is not finite, or no moment).
    """
    damp = DAMP
    while damp <= _MOST:
        factor = _factor(found, damp)
        if factor is not None:
            return factor, damp
        damp *= 10
    raise NotInvertibleError("the second moment of its inputs cannot be inverted")


def _factor(found: InputStatistics, damp: float) -> Tensor | None:
    """Return U at one damping, None where H cannot be inverted with it; what is done with goes at once."""
    assert found.second is not None
    matrix = found.second * (2 / max(1, found.tokens))
    diagonal = matrix.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal.add_(damp * float(diagonal.mean()))
    del diagonal  # a view, which would hold the matrix
    matrix, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        return None
    matrix = torch.cholesky_inverse(matrix)
    factor, failed = torch.linalg.cholesky_ex(matrix, upper=True)
    # the sum tells what is not finite without another matrix, which isfinite makes
    return None if int(failed) or not bool(factor.sum().isfinite()) else factor
