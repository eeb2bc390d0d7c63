"""Magnitude: compares |W| in a whole layer (the baseline of Wanda's and SparseGPT's papers)."""

from __future__ import annotations

from torch import Generator, Tensor

from smelt.compress.sparsify.pattern import SparsityInput, SparsityPattern


def sparsify_layer(layer: SparsityInput, pattern: SparsityPattern, draw: Generator) -> Tensor:
    """Return the weight with zeros at its smallest magnitudes, float32 [N, K]."""
    return layer.weight.masked_fill(pattern.zero_mask(layer.weight.abs(), "matrix", layer.zeros), 0.0)
