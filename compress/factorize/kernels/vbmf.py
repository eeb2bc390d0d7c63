"""Rank of a matrix with noise by variational Bayesian matrix factorization (VBMF), in closed form.

Empirical variational Bayesian matrix factorization has a global solution: singular values above a threshold
that the noise's variance determines are kept; the variance minimizes the free energy. Neither a rank nor a
tolerance is needed.

Source: Nakajima, Sugiyama, Babacan & Tomioka 2013, Global Analytic Solution of Fully-observed Variational
Bayesian Matrix Factorization, JMLR 14, theorems 2 and 4 and section 5.

Names: L <= M, sides of the matrix; a = L / M; g, its singular values; v, the variance of the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# theorem 4: the threshold's zero is close to this times the root of a, for every a
_TAU_ZERO = 2.5129


@dataclass(frozen=True)
class VbmfRank:
    """rank: number of singular values above `threshold`. variance: of the noise."""

    rank: int
    variance: float
    threshold: float


def vbmf(values: NDArray[np.float64], rows: int, columns: int) -> VbmfRank:
    """Return the rank of a matrix by its singular values, with noise of unknown variance.

    Args:
        values: all singular values, falling, float64 [min(rows, columns)].
        rows: of the matrix.
        columns: of the matrix.
    """
    from scipy.optimize import minimize_scalar

    short, long = sorted((rows, columns))
    alpha = short / long
    squares = np.square(values[:short])
    if not squares.sum() > 0:
        return VbmfRank(0, 0.0, 0.0)
    limit = _threshold(alpha)
    # section 5: at least the values beyond the largest rank that can be told from noise are noise
    most = min(short - 1, max(0, math.ceil(short / (1 + alpha)) - 1))
    high = float(squares.sum()) / (short * long)
    rest = squares[most:]
    low = max(float(rest[0]) / (long * limit), float(rest.mean()) / long, high * 1e-12)
    if low < high:
        found = minimize_scalar(
            lambda log: free_energy(math.exp(log), squares, long, alpha),
            bounds=(math.log(low), math.log(high)), method="bounded", options={"xatol": 1e-10},
        )  # fmt: skip
        variance = math.exp(float(found.x))
    else:
        variance = high
    threshold = math.sqrt(long * variance * limit)
    return VbmfRank(int((np.sqrt(squares) > threshold).sum()), variance, threshold)


def free_energy(variance: float, squares: NDArray[np.float64], long: int, alpha: float) -> float:
    """Return the free energy of a variance, up to a constant and a factor.

    Args:
        variance: of the noise.
        squares: of all singular values.
        long: M.
        alpha: L / M.
    """
    x = squares / (long * variance)
    kept = x[x > _threshold(alpha)]
    noise = x[x <= _threshold(alpha)]
    tau = _tau(kept, alpha)
    of_noise = float(noise.sum() - np.log(np.maximum(noise, 1e-300)).sum())
    of_kept = float(
        (kept - tau).sum() + np.log((tau + 1) / kept).sum() + alpha * np.log(tau / alpha + 1).sum()
    )
    return of_noise + of_kept


def _threshold(alpha: float) -> float:
    """Return the threshold of g^2 / (M v): theorem 4."""
    zero = _TAU_ZERO * math.sqrt(alpha)
    return (1 + zero) * (1 + alpha / zero)


def _tau(x: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Return the larger root t of x = (1 + t) (1 + a / t)."""
    middle = x - (1 + alpha)
    found: NDArray[np.float64] = 0.5 * (middle + np.sqrt(np.square(middle) - 4 * alpha))
    return found
