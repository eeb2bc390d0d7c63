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

from smelt.families.family import RmsNormForm


@contextmanager
def exportable_norms(model: nn.Module, kind: RmsNormForm) -> Iterator[None]:
    """Replace RMS norms of this kind and tanh-GELUs in `model` for the export."""
    changed = []
    for module in model.modules():
        if hasattr(module, kind.epsilon_attribute) and not isinstance(module, nn.LayerNorm):
            module.forward = partial(rms_norm, module, kind)
            changed.append(module)
        elif type(module).__name__ == "NewGELUActivation":  # expanded there, one operator in ONNX
            module.forward = partial(F.gelu, approximate="tanh")
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def rms_norm(module: Any, kind: RmsNormForm, x: Tensor) -> Tensor:
    """Compute an RMS norm (Zhang & Sennrich 2019, arXiv:1910.07467).

    Runtimes fuse x / sqrt(mean(x^2) + eps) * w into one operator. It remains float32 in fp16 graphs, because
    x^2 overflows in fp16 from 256 on (`export/precision`).
    """
    weight, epsilon = module.weight, getattr(module, kind.epsilon_attribute)
    weight = 1 + weight if kind.adds_one_to_weight else weight
    normal: Tensor = (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)) * weight
    return normal
