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


def hessian_of(found: InputStatistics) -> Tensor:
    """Return 2 X X^T / tokens, float64 [K, K]."""
    assert found.second is not None
    return found.second * (2 / max(1, found.tokens))


def inverse_factor(hessian: Tensor) -> tuple[Tensor, float]:
    """Return U, upper triangular float64 [K, K], with U^T U the inverse of the damped `hessian` [K, K].

    Where 1 % of the mean diagonal is too little to invert it, ten times as much is added, and so on; what it
    was in the end comes second.

    Raises:
        ValueError: no damping makes it one that can be inverted (it is not finite, or no second moment).
    """
    damp = DAMP
    while damp <= _MOST:
        damped = hessian.clone()
        diagonal = damped.diagonal()
        diagonal[diagonal == 0] = 1.0
        diagonal.add_(damp * float(diagonal.mean()))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed) and bool(factor.isfinite().all()):
                return factor, damp
        damp *= 10
    raise ValueError("the second moment of its inputs cannot be inverted")
