"""Tucker-2: a convolution's kernel as a smaller one between two changes of channels.

Source: Kim et al. 2016, Compression of Deep Convolutional Neural Networks for Fast and Low Power Mobile
Applications, arXiv:1511.06530; iteration: De Lathauwer, De Moor & Vandewalle 2000, SIAM J. Matrix Anal. 21(4)
(HOOI).

Shapes: K = kernel [T, S, D, E], T channels out, S in; R, Q = ranks of the channels in and out.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = 100  # rounds
_ENOUGH = 1e-9  # of a round, of the kernel's squared norm


def unfolded(kernel: Tensor, mode: int) -> Tensor:
    """Return the kernel as a matrix whose rows are the channels out (mode 0) or in (mode 1)."""
    return kernel.transpose(0, mode).flatten(1)


def tucker(kernel: Tensor, inner: int | None, outer: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return U_in [S, R], the core [Q, R, D, E] and U_out [T, Q], float64.

    Args:
        kernel: float.
        inner: R; None where the channels in stay, and U_in is None.
        outer: Q.
    """
    whole = kernel.double()
    out = _leading(unfolded(whole, 0), outer)
    if inner is None:
        return None, torch.einsum("tsde,tq->qsde", whole, out), out
    before, norm = -1.0, float(whole.square().sum())
    into = _leading(unfolded(whole, 1), inner)
    core = whole
    for _ in range(_MOST):
        into = _leading(unfolded(torch.einsum("tsde,tq->qsde", whole, out), 1), inner)
        out = _leading(unfolded(torch.einsum("tsde,sr->trde", whole, into), 0), outer)
        core = torch.einsum("tsde,tq,sr->qrde", whole, out, into)
        kept = float(core.square().sum())  # the factors are orthonormal, so this is what is not lost
        if kept - before <= _ENOUGH * norm:
            break
        before = kept
    return into, core, out


def product(into: Tensor | None, core: Tensor, out: Tensor) -> Tensor:
    """Return the kernel [T, S, D, E] that the three stand for."""
    whole = torch.einsum("qrde,tq->trde", core, out)
    return whole if into is None else torch.einsum("trde,sr->tsde", whole, into)


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """Return the first `rank` left singular vectors of [n, m], [n, rank]."""
    vectors: Tensor = torch.linalg.svd(matrix, full_matrices=False).U[:, :rank]
    if vectors.shape[1] < rank:  # fewer columns than the rank: any further directions do
        vectors = torch.linalg.qr(torch.cat([vectors, torch.eye(len(matrix), dtype=matrix.dtype)], 1)).Q
    return vectors[:, :rank]
