"""Embeddings of an image's patches as the exported graph computes them.

A class token in front of the patches is a constant, as is the position that is added to it. So the graph adds
one table to the patches after a row of zeros, without repeating the token for each image.

Shapes: B = batch, N = patches, D = width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

_PARTS = ("cls_token", "position_embeddings", "patch_embeddings")


@contextmanager
def exportable_patches(model: nn.Module) -> Iterator[None]:
    """Replace the forward of embeddings with a class token in `model` for the export, if it has them."""
    modules = [m for m in model.modules() if all(hasattr(m, part) for part in _PARTS)]
    for module in modules:
        module.forward = partial(_embed_patches, module)
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


def _embed_patches(module: Any, pixel_values: Tensor, **unused: Any) -> Tensor:
    """Return the class token and the patches with their positions, [B, 1 + N, D].

    DINOv2 interpolates positions of another image size, by transformers' code; ViT does on request only.
    """
    patches, positions = (
        F.pad(module.patch_embeddings(pixel_values), (0, 0, 1, 0)),
        module.position_embeddings,
    )
    if "interpolate_pos_encoding" not in signature(type(module).forward).parameters:
        positions = module.interpolate_pos_encoding(patches, *pixel_values.shape[-2:])
    embeddings: Tensor = patches + (positions + F.pad(module.cls_token, (0, 0, 0, positions.shape[1] - 1)))
    return embeddings
