"""The distribution of a mask z in [0, 1] that trains: at 0 and at 1 with a probability of its own.

The hard concrete distribution (Louizos et al. 2018, arXiv:1712.01312, section 2.2), whose log alpha trains; u
is uniform, beta 2/3, gamma -0.1, zeta 1.1:

    s = sigmoid((log u - log(1 - u) + log alpha) / beta)        z = clamp(s (zeta - gamma) + gamma, 0, 1)
    P(z > 0) = sigmoid(log alpha - beta log(-gamma / zeta))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BETA, _GAMMA, _ZETA = 2 / 3, -0.1, 1.1
OPEN = 3.0  # log alpha at first: a mask is 1 in four of five draws, and 0 in one of a hundred


def draw_mask(log_alpha: Tensor) -> Tensor:
    """Return hard concrete masks, float as `log_alpha`, with a gradient."""
    u = torch.rand_like(log_alpha).clamp(1e-6, 1 - 1e-6)
    s = ((u.log() - (1 - u).log() + log_alpha) / _BETA).sigmoid()
    return (s * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def open_chance(log_alpha: Tensor) -> Tensor:
    """Return the probability that a mask is not 0."""
    return (log_alpha - _BETA * math.log(-_GAMMA / _ZETA)).sigmoid()


def settled_mask(log_alpha: Tensor) -> Tensor:
    """Return masks without chance, clamp(sigmoid(log alpha) (zeta - gamma) + gamma, 0, 1)."""
    return (log_alpha.sigmoid() * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def likeliest(log_alpha: Tensor, step: int = 1) -> Tensor:
    """Return the places of as many masks as are expected to be open, those of the largest log alpha.

    int64, rising, on the CPU; their number is a multiple of `step`, at least one (of fewer masks all).
    """
    log_alpha = log_alpha.detach().cpu()
    wanted = math.floor(float(open_chance(log_alpha).sum()) / step + 0.5) * step
    count = min(len(log_alpha), max(step, wanted))
    found: Tensor = log_alpha.topk(count).indices.sort().values
    return found


def settled_at(log_alpha: Tensor, stay: Tensor) -> Tensor:
    """Return masks without chance, which are 0 but for those at the places `stay`."""
    soft, stay = settled_mask(log_alpha), stay.to(log_alpha.device)
    return torch.zeros_like(soft).index_copy(0, stay, soft[stay])
