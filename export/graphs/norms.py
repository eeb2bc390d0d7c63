"""Norms and activations as the exported graph computes them.

Shapes: [..., D], D = width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.families.family import RmsNorm


@contextmanager
def graph_norms(model: nn.Module, kind: RmsNorm) -> Iterator[None]:
    """Let RMS norms of this kind and tanh-GELUs below `model` compute as the graph should."""
    changed = []
    for module in model.modules():
        if hasattr(module, kind.epsilon) and not isinstance(module, nn.LayerNorm):
            module.forward = partial(root_mean_square, module, kind)
            changed.append(module)
        elif type(module).__name__ == "NewGELUActivation":  # written out there, one operator in ONNX
            module.forward = partial(F.gelu, approximate="tanh")
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def root_mean_square(module: Any, kind: RmsNorm, x: Tensor) -> Tensor:
    """Compute an RMS norm (Zhang & Sennrich 2019, arXiv:1910.07467).

    Runtimes fuse x / sqrt(mean(x^2) + eps) * w to one operator. It stays float32 where the graph becomes
    fp16, in which x^2 overflows from 256 on (`export/precision`).
    """
    weight, epsilon = module.weight, getattr(module, kind.epsilon)
    weight = 1 + weight if kind.plus_one else weight
    normal: Tensor = (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)) * weight
    return normal
