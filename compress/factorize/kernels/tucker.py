"""Tucker-2: a convolution's kernel as a smaller kernel between two 1 x 1 convolutions.

Source: Kim et al. 2016, Compression of Deep Convolutional Neural Networks for Fast and Low Power Mobile
Applications, arXiv:1511.06530; iteration: De Lathauwer, De Moor & Vandewalle 2000, SIAM J. Matrix Anal. 21(4)
(HOOI).

Shapes: K = kernel [T, S, D, E], T channels out, S in; R, Q = ranks of the channels in and out.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_ITERATIONS = 100  # iterations
_TOLERANCE = 1e-9  # of an iteration, relative to the kernel's squared norm


def unfold(kernel: Tensor, mode: int) -> Tensor:
    """Return the kernel as a matrix whose rows are the output (mode 0) or input channels (mode 1)."""
    return kernel.transpose(0, mode).flatten(1)


def tucker2_decompose(
    kernel: Tensor, input_rank: int | None, output_rank: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return U_in [S, R], the core [Q, R, D, E] and U_out [T, Q], float64.

    Args:
        kernel: float.
        input_rank: R; None if input channels are not reduced; U_in is None then.
        output_rank: Q.
    """
    whole = kernel.double()
    out = _leading_vectors(unfold(whole, 0), output_rank)
    if input_rank is None:
        return None, torch.einsum("tsde,tq->qsde", whole, out), out
    before, norm = -1.0, float(whole.square().sum())
    into = _leading_vectors(unfold(whole, 1), input_rank)
    core = whole
    for _ in range(_MAX_ITERATIONS):
        into = _leading_vectors(unfold(torch.einsum("tsde,tq->qsde", whole, out), 1), input_rank)
        out = _leading_vectors(unfold(torch.einsum("tsde,sr->trde", whole, into), 0), output_rank)
        core = torch.einsum("tsde,tq,sr->qrde", whole, out, into)
        kept = float(core.square().sum())  # the factors are orthonormal, so this is the kept energy
        if kept - before <= _TOLERANCE * norm:
            break
        before = kept
    return into, core, out


def tucker2_kernel(input_factor: Tensor | None, core: Tensor, output_factor: Tensor) -> Tensor:
    """Return the kernel [T, S, D, E] that the three factors represent."""
    whole = torch.einsum("qrde,tq->trde", core, output_factor)
    return whole if input_factor is None else torch.einsum("trde,sr->tsde", whole, input_factor)


def _leading_vectors(matrix: Tensor, rank: int) -> Tensor:
    """Return the first `rank` left singular vectors of [n, m], [n, rank]."""
    vectors: Tensor = torch.linalg.svd(matrix, full_matrices=False).U[:, :rank]
    if vectors.shape[1] < rank:  # fewer columns than the rank: further directions are arbitrary
        vectors = torch.linalg.qr(torch.cat([vectors, torch.eye(len(matrix), dtype=matrix.dtype)], 1)).Q
    return vectors[:, :rank]
