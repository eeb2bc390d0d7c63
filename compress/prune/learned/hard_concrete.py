"""The hard concrete distribution of trainable masks z in [0, 1], with point masses at 0 and 1.

Louizos et al. 2018, arXiv:1712.01312, section 2.2; log alpha is trained; u is uniform, beta 2/3, gamma -0.1,
zeta 1.1:

    s = sigmoid((log u - log(1 - u) + log alpha) / beta)        z = clamp(s (zeta - gamma) + gamma, 0, 1)
    P(z > 0) = sigmoid(log alpha - beta log(-gamma / zeta))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BETA, _GAMMA, _ZETA = 2 / 3, -0.1, 1.1
INITIAL_LOG_ALPHA = 3.0  # a mask is then 1 in four of five samples, and 0 in one of a hundred


def sample_mask(log_alpha: Tensor) -> Tensor:
    """Return sampled hard concrete masks, with the dtype of `log_alpha` and a gradient."""
    u = torch.rand_like(log_alpha).clamp(1e-6, 1 - 1e-6)
    s = ((u.log() - (1 - u).log() + log_alpha) / _BETA).sigmoid()
    return (s * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def open_probability(log_alpha: Tensor) -> Tensor:
    """Return the probability that a mask is not 0."""
    return (log_alpha - _BETA * math.log(-_GAMMA / _ZETA)).sigmoid()


def deterministic_mask(log_alpha: Tensor) -> Tensor:
    """Return deterministic masks, clamp(sigmoid(log alpha) (zeta - gamma) + gamma, 0, 1)."""
    return (log_alpha.sigmoid() * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def most_open(log_alpha: Tensor, multiple_of: int = 1) -> Tensor:
    """Return the indices of the masks with the largest log alpha, as many as are expected to be open.

    int64, ascending, on the CPU; their number is a multiple of `multiple_of`, at least one multiple, at most
    all.
    """
    log_alpha = log_alpha.detach().cpu()
    wanted = math.floor(float(open_probability(log_alpha).sum()) / multiple_of + 0.5) * multiple_of
    count = min(len(log_alpha), max(multiple_of, wanted))
    found: Tensor = log_alpha.topk(count).indices.sort().values
    return found


def deterministic_mask_at(log_alpha: Tensor, kept: Tensor) -> Tensor:
    """Return deterministic masks that are 0 outside the indices `kept`."""
    soft, kept = deterministic_mask(log_alpha), kept.to(log_alpha.device)
    return torch.zeros_like(soft).index_copy(0, kept, soft[kept])
