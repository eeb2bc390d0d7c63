"""RIA, relative importance and activations: (|W_ij| / Σ_k |W_ik| + |W_ij| / Σ_k |W_kj|) · |X_j|^½ in a layer.

Zhang et al. 2024, Plug-and-Play: An Efficient Post-training Pruning Method for Large Language Models, ICLR,
with the power ½ of the authors' code. X_j is input j over all calibration tokens. Kept weights are not
updated.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from smelt.compress.sparsify.pattern import SparsityInput, SparsityPattern


def sparsify_layer(layer: SparsityInput, pattern: SparsityPattern, draw: Generator) -> Tensor:
    """Return the weight with zeros at the smallest scores, float32 [N, K]."""
    assert layer.statistics is not None
    sizes = layer.weight.abs()
    # A row or column of zeros has the score 0, not 0 / 0.
    smallest = torch.finfo(sizes.dtype).tiny
    row_sums = sizes.sum(dim=1, keepdim=True).clamp(min=smallest)
    column_sums = sizes.sum(dim=0).clamp(min=smallest)
    scores = (sizes / row_sums + sizes / column_sums) * layer.statistics.l2_norms.to(sizes).sqrt()
    return layer.weight.masked_fill(pattern.zero_mask(scores, "matrix", layer.zeros), 0.0)
