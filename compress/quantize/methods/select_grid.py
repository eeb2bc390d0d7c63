"""Selection of the better of two grids per group, or per matrix for per-tensor scales."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.runtime.schemes.scheme import Scheme, SchemeOptions


def select_per_group(better: Tensor, candidate: Tensor, current: Tensor) -> Tensor:
    """Return the grid tensor with `candidate` for the groups where it is better, else `current`.

    Args:
        better: bool [N, G].
        candidate: [N, G, ...], or [N] if all groups of a row share a value.
        current: like `candidate`.
    """
    there = (
        better.reshape(*better.shape, *[1] * (candidate.dim() - better.dim()))
        if candidate.dim() > 1
        else better[:, 0]
    )
    return torch.where(there, candidate, current)


def pool_errors(sums: Tensor, scheme: Scheme, options: SchemeOptions) -> Tensor:
    """Return the errors [N, G], summed over all groups that share a scale."""
    return sums.sum().expand_as(sums) if scheme.is_per_tensor(options) else sums
