"""Pooling of whole feature maps as the exported graph computes it.

EfficientNet's last pooling has a window as large as its number of channels, which covers any map. OpenVINO
refuses a window that is larger than the map, so the graph reduces the map.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def exportable_pooling(model: nn.Module) -> Iterator[None]:
    """Replace the forward of poolings in `model` with windows that may be larger than the map."""
    modules: list[Any] = [
        m
        for m in model.modules()
        if isinstance(m, nn.AvgPool2d | nn.MaxPool2d) and m.ceil_mode and m.padding in (0, (0, 0))
    ]
    for module in modules:
        module.forward = partial(_pool, module)
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


def _pool(module: Any, maps: Tensor) -> Tensor:
    """Return the pooled maps: [B, C, h, w] -> [B, C, 1, 1] where a window covers them."""
    kernel = module.kernel_size
    height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    if maps.shape[2] > height or maps.shape[3] > width:
        pooled: Tensor = type(module).forward(module, maps)
        return pooled
    reduce = torch.mean if isinstance(module, nn.AvgPool2d) else torch.amax
    return reduce(maps, dim=(2, 3), keepdim=True)
