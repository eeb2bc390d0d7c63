"""Of two grids the better one, group by group; or for the whole matrix where that has one scale."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.runtime.schemes.scheme import Options, Scheme


def taken(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return of each group the new part of a grid where it is better; a grid may have more axes behind.

    Args:
        better: bool [N, G].
        new: [N, G, ...], or [N] where all groups of a row have one.
        old: likewise.
    """
    there = (
        better.reshape(*better.shape, *[1] * (new.dim() - better.dim())) if new.dim() > 1 else better[:, 0]
    )
    return torch.where(there, new, old)


def pooled(sums: Tensor, scheme: Scheme, options: Options) -> Tensor:
    """Return sums over groups, [N, G], as a search of grids compares them: of all that share a scale."""
    return sums.sum().expand_as(sums) if scheme.whole(options) else sums
