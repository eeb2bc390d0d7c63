"""Check the memory that a training needs for any batch size, before it starts.

AdamW keeps a gradient and two moments in float32 for every trained weight (Loshchilov & Hutter 2019,
arXiv:1711.05101); the best and the averaged weights are copies. Activations need memory in addition,
so a training that passes the check may still run out.
"""

from __future__ import annotations

import torch
from torch import nn

from smelt.core.memory import available_bytes, require_memory

_GRADIENT_BYTES, _MOMENT_BYTES, _COPY_BYTES = 4, 8, 4  # bytes a weight


def require_training_memory(
    model: nn.Module, device: torch.device, *, keeps_best: bool, keeps_average: bool
) -> None:
    """Require memory for the gradients and the optimizer state of a training.

    Args:
        model: float32, on the CPU.
        device: the training device.
        keeps_best: whether a copy of the best weights is kept (validation).
        keeps_average: whether a moving average of the weights is kept.

    Raises:
        RunError: not enough memory; the message has the needed and the free amount.
    """
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    copies = _COPY_BYTES * weights * (keeps_best + keeps_average)  # on the CPU, wherever the model is trained
    work = (_GRADIENT_BYTES + _MOMENT_BYTES) * weights
    remedy = (
        f"That is for the gradients, the optimizer and the copies of {weights / 1e6:,.1f} million weights,"
        " before any batch. Make the model smaller first, or use a machine with more memory."
    )
    if device.type == "cuda":
        moved = sum(p.numel() * p.element_size() for p in model.parameters())
        require_memory(
            work + moved, "Training on the GPU", remedy, free_bytes=torch.cuda.mem_get_info(device)[0]
        )
        work = 0
    require_memory(work + copies, "Training", remedy, free_bytes=available_bytes())
