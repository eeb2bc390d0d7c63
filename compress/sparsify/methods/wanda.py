"""Wanda: compares |W_ij| |X_j| inside each output's row, X_j being input j over all calibration tokens.

Sun et al. 2024, A Simple and Effective Pruning Approach for Large Language Models, arXiv:2306.11695,
equation 1. Kept weights are not updated.
"""

from __future__ import annotations

from torch import Generator, Tensor

from smelt.compress.sparsify.pattern import SparsityInput, SparsityPattern


def sparsify_layer(layer: SparsityInput, pattern: SparsityPattern, draw: Generator) -> Tensor:
    """Return the weight with zeros at the smallest scores, float32 [N, K]."""
    assert layer.statistics is not None
    scores = layer.weight.abs() * layer.statistics.l2_norms.to(layer.weight)
    return layer.weight.masked_fill(pattern.zero_mask(scores, "row", layer.zeros), 0.0)
