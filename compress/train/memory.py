"""What a training needs in memory whatever its batches, asked before it begins.

AdamW keeps a gradient and two moments in float32 for every weight that is trained (Loshchilov & Hutter
2019, arXiv:1711.05101); the best and the averaged weights are copies. Activations come on top of that,
so a training that passes may still run out.
"""

from __future__ import annotations

import torch
from torch import nn

from smelt.core.memory import available_bytes, require_memory

_GRADIENT, _MOMENTS, _COPY = 4, 8, 4  # bytes a weight


def require_training_memory(
    model: nn.Module, device: torch.device, *, keeps_best: bool, averages: bool
) -> None:
    """Refuse a training whose gradients and optimizer state alone do not fit.

    Args:
        model: float32, on the CPU.
        device: where it will be trained.
        keeps_best: whether the best weights are copied aside (validation).
        averages: whether a moving average of the weights is kept.

    Raises:
        RunError: they do not fit; the message says how much is needed and how much is free.
    """
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    copies = _COPY * weights * (keeps_best + averages)  # on the CPU, wherever the model is trained
    work = (_GRADIENT + _MOMENTS) * weights
    remedy = (
        f"That is for the gradients, the optimizer and the copies of {weights / 1e6:,.1f} million weights,"
        " before any batch. Make the model smaller first, or take a machine with more memory."
    )
    if device.type == "cuda":
        moved = sum(p.numel() * p.element_size() for p in model.parameters())
        require_memory(
            work + moved, "Training on the GPU", remedy, free_bytes=torch.cuda.mem_get_info(device)[0]
        )
        work = 0
    require_memory(work + copies, "Training", remedy, free_bytes=available_bytes())
