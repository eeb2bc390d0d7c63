"""Random weights, by the recipe's seed: a control for the other methods."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from smelt.compress.sparsify.pattern import SparsityInput, SparsityPattern


def sparsify_layer(layer: SparsityInput, pattern: SparsityPattern, draw: Generator) -> Tensor:
    """Return the weight with zeros at random positions, float32 [N, K]."""
    scores = torch.rand(layer.weight.shape, generator=draw)
    return layer.weight.masked_fill(pattern.zero_mask(scores, "matrix", layer.zeros), 0.0)
