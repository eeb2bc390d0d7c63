"""CP: a convolution's kernel as a sum of products of one vector for each of its four axes.

The best such sum of a rank need not exist: terms can grow without bound and cancel. So each least squares
problem has a small ridge, which falls, and the terms' sizes are spread evenly over their vectors.

Source: Lebedev et al. 2015, Speeding-up Convolutional Neural Networks Using Fine-tuned CP-Decomposition,
arXiv:1412.6553; alternating least squares: Kolda & Bader 2009, SIAM Review 51(3), figure 3.3.

Shapes: kernel [T, S, D, E]; R = rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_ITERATIONS = 200  # iterations
_TOLERANCE = 1e-8  # of an iteration, relative to the kernel's norm
_RIDGE = 1e-6  # relative to the mean of a problem's diagonal
_AXIS_LETTERS = "tsde"


def cp_decompose(kernel: Tensor, rank: int, seed: int) -> list[Tensor]:
    """Return the vectors of the axes, float64 [T, R], [S, R], [D, R], [E, R].

    Args:
        kernel: float.
        rank: R.
        seed: of random directions, if the kernel has fewer than R.
    """
    whole = kernel.double()
    draw = torch.Generator().manual_seed(seed)
    factors = [_initial_factor(whole, axis, rank, draw) for axis in range(4)]
    norm, before = float(whole.norm()), float("inf")
    for _ in range(_MAX_ITERATIONS):
        for axis in range(4):
            others = [factors[other] for other in range(4) if other != axis]
            factors[axis] = _solve(_project(whole, factors, axis), others)
        off = float((whole - cp_kernel(factors)).norm())
        if before - off <= _TOLERANCE * norm:
            break
        before = off
    return _balance_norms(factors)


def cp_kernel(factors: list[Tensor]) -> Tensor:
    """Return the kernel [T, S, D, E] that the vectors represent."""
    return torch.einsum("tr,sr,dr,er->tsde", *factors)


def _initial_factor(whole: Tensor, axis: int, rank: int, draw: torch.Generator) -> Tensor:
    """Return initial vectors: the leading ones of the axis, then random ones."""
    matrix = whole.transpose(0, axis).flatten(1)
    vectors = torch.linalg.svd(matrix, full_matrices=False).U[:, :rank]
    missing = rank - vectors.shape[1]
    more = torch.randn(len(matrix), missing, generator=draw, dtype=whole.dtype)
    return torch.cat([vectors, more / len(matrix) ** 0.5], dim=1)


def _project(whole: Tensor, factors: list[Tensor], axis: int) -> Tensor:
    """Return the kernel times the vectors of all other axes, [n, R]."""
    letters = [f"{letter}r" for place, letter in enumerate(_AXIS_LETTERS) if place != axis]
    others = [factor for place, factor in enumerate(factors) if place != axis]
    return torch.einsum(f"{_AXIS_LETTERS},{','.join(letters)}->{_AXIS_LETTERS[axis]}r", whole, *others)


def _solve(wanted: Tensor, others: list[Tensor]) -> Tensor:
    """Return the vectors [n, R] of one axis that fit best with those of the other axes."""
    grams = [factor.T @ factor for factor in others]
    gram = grams[0] * grams[1] * grams[2]
    ridge = _RIDGE * float(gram.diagonal().mean().clamp(min=1e-300))
    gram = gram + ridge * torch.eye(len(gram), dtype=gram.dtype)
    solution: Tensor = torch.linalg.solve(gram, wanted.T).T
    return solution


def _balance_norms(factors: list[Tensor]) -> list[Tensor]:
    """Return the same sum of products, with equal norms of the vectors in each term."""
    norms = [factor.norm(dim=0).clamp(min=1e-300) for factor in factors]
    each = (norms[0] * norms[1] * norms[2] * norms[3]) ** 0.25
    return [factor / norm * each for factor, norm in zip(factors, norms, strict=True)]
