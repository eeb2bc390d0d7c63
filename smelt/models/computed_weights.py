"""Weights that are in no file, since they follow from the config: tables of sines."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


@torch.no_grad()
def compute_weights(model: Any, module: Any) -> None:
    """Compute the parameters of a `module` of `model` that are in no file, on the CPU."""
    module.to_empty(device="cpu", recurse=False)
    if hasattr(module, "create_weight"):  # of Marian and Pegasus: transformers' loop over all values is slow
        module.weight.copy_(_sine_table(*module.weight.shape))
    else:
        model._init_weights(module)


def _sine_table(num_positions: int, width: int) -> Tensor:
    """Return the sines of all positions, then their cosines, float32 [num_positions, width]."""
    angles = np.arange(num_positions)[:, None] / np.power(10_000, 2 * (np.arange(width) // 2) / width)
    return torch.from_numpy(np.hstack([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])])).float()
