"""Layers of a group share one matrix, and each adds a low-rank difference of its own.

W_l ~ W_shared + B_l A_l, where B_l A_l is the truncated singular value decomposition of W_l - W_shared
(Bae et al. 2024, Relaxed Recursive Transformers, arXiv:2410.20672): at full rank the layers are unchanged.
W_shared is initialized as a layer of the group or their mean. In each further iteration it is the mean of
W_l - B_l A_l, and the differences are computed again. Both are least squares, so the error never grows.
Biases are not shared.

Shapes: N = outputs, K = inputs of a layer, r = rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smelt.compress.factorize.svd import ErrorMetric, low_rank_factors
from smelt.models.layers import SharedLinear

LowRankPair = tuple[Tensor, Tensor]


@torch.no_grad()
def decompose_shared(
    weights: Sequence[Tensor], start: Tensor, rank: int, iterations: int
) -> tuple[Tensor, list[LowRankPair], list[float]]:
    """Return the shared matrix of `weights`, each [N, K], their factors ([N, r], [r, K]), and the error.

    All float64. The error is the squared error of all weights relative to their squared distance from their
    mean, after each iteration; 0 if all are equal.

    Args:
        weights: of the group.
        start: initial shared matrix.
        rank: at most N and K.
        iterations: number of iterations.
    """
    exact = torch.stack([weight.detach().double() for weight in weights])
    variance = float((exact - exact.mean(dim=0)).square().sum())
    shared, lost = start.detach().double(), []
    products = torch.zeros_like(exact)
    for turn in range(iterations):
        if turn:
            shared = (exact - products).mean(dim=0)
        pairs = [low_rank_factors(weight - shared, rank, ErrorMetric())[:2] for weight in exact]
        products = torch.stack([up @ down for up, down in pairs])
        off = float((exact - shared - products).square().sum())
        lost.append(off / variance if variance else 0.0)
    return shared, pairs, lost


def make_shared_layers(
    layers: Sequence[nn.Linear], start: Tensor, rank: int, iterations: int
) -> tuple[list[SharedLinear], float]:
    """Return replacements of `layers` that share a module, in their order and mode, and the error.

    Args:
        layers: of one size, all with a bias or none.
        start: initial shared matrix, [N, K].
        rank: of the differences; limited by the smaller side of a layer.
        iterations: see `decompose_shared`.
    """
    first = layers[0]
    shared, pairs, lost = decompose_shared(
        [m.weight for m in layers], start, min(rank, *start.shape), iterations
    )
    replacements: list[SharedLinear] = []
    for layer, (up, down) in zip(layers, pairs, strict=True):
        new = SharedLinear(first.in_features, first.out_features, len(down), first.bias is not None)
        new.difference.up.weight.data, new.difference.down.weight.data = up.float(), down.float()
        if layer.bias is not None:
            new.difference.up.bias.data = layer.bias.detach().clone()
        if replacements:
            new.shared = replacements[0].shared
        else:
            new.shared.weight = nn.Parameter(shared.float())
        replacements.append(new.train(layer.training))
    return replacements, lost[-1]
