"""Layers of a group share one matrix, and each keeps a thin difference of its own.

W_l ~ W_shared + B_l A_l, where B_l A_l is the truncated singular value decomposition of W_l - W_shared
(Bae et al. 2024, Relaxed Recursive Transformers, arXiv:2410.20672): at full rank the layers are what they
were. Found once, W_shared is a layer of the group or their mean. Found in rounds, it is then the mean of what
the differences leave, W_l - B_l A_l, and the differences are found again. Both are least squares, so that
what is lost never grows. Biases stay each layer's own.

Shapes: N = outputs, K = inputs of a layer, r = rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smelt.compress.factorize.svd import Metric, factors
from smelt.runtime.layers.shared import SharedLinear

Pair = tuple[Tensor, Tensor]


@torch.no_grad()
def divided(
    weights: Sequence[Tensor], start: Tensor, rank: int, iterations: int
) -> tuple[Tensor, list[Pair], list[float]]:
    """Return what `weights`, each [N, K], share, the pair of each ([N, r], [r, K]), and what is lost.

    All float64. What is lost is the squared error of all weights in parts of their squared distance from
    their mean, after each round; 0 where they are alike.

    Args:
        weights: of the group.
        start: what they share at first.
        rank: at most N and K.
        iterations: rounds.
    """
    exact = torch.stack([weight.detach().double() for weight in weights])
    apart = float((exact - exact.mean(dim=0)).square().sum())
    shared, lost = start.detach().double(), []
    products = torch.zeros_like(exact)
    for turn in range(iterations):
        if turn:
            shared = (exact - products).mean(dim=0)
        pairs = [factors(weight - shared, rank, Metric())[:2] for weight in exact]
        products = torch.stack([up @ down for up, down in pairs])
        off = float((exact - shared - products).square().sum())
        lost.append(off / apart if apart else 0.0)
    return shared, pairs, lost


def divide(
    layers: Sequence[nn.Linear], start: Tensor, rank: int, iterations: int
) -> tuple[list[SharedLinear], float]:
    """Return what stands for `layers`, which share a module, in their order and mode, and what is lost.

    Args:
        layers: of one size, all with a bias or none.
        start: what they share at first, [N, K].
        rank: of the differences; of a smaller layer its smaller side.
        iterations: see `divided`.
    """
    first = layers[0]
    shared, pairs, lost = divided([m.weight for m in layers], start, min(rank, *start.shape), iterations)
    made: list[SharedLinear] = []
    for layer, (up, down) in zip(layers, pairs, strict=True):
        new = SharedLinear(first.in_features, first.out_features, len(down), first.bias is not None)
        new.difference.up.weight.data, new.difference.down.weight.data = up.float(), down.float()
        if layer.bias is not None:
            new.difference.up.bias.data = layer.bias.detach().clone()
        if made:
            new.shared = made[0].shared
        else:
            new.shared.weight = nn.Parameter(shared.float())
        made.append(new.train(layer.training))
    return made, lost[-1]
