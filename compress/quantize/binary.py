"""Which signs and scales stand for a matrix: scheme binary.

For a group w of a row, the best values of the form alpha * sign are alpha = mean |w| and the signs of w
(Rastegari et al. 2016, XNOR-Net, arXiv:1603.05279, section 3.1, Binary-Weight-Networks); sign(0) is +1.
Training moves float weights behind the signs and looks through them everywhere, as for the weights of
transformers in Liu et al. 2022, BiT, arXiv:2205.13016 (github.com/facebookresearch/bit,
transformer/utils_quant.py, BwnQuantizer). The clip at 1 of BinaryConnect (Courbariaux et al. 2015,
arXiv:1511.00363) belongs to weights that stand for -1 and 1 themselves: here they are a hundredth of that.

Shapes: N = outputs, K = inputs, g = group size, G = ceil(K / g).
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compress.quantize.straight_through import straight_through
from smelt.runtime.layers.quantized_binary import BinaryMatrix
from smelt.runtime.layers.quantized_groups import groups_of


def decide(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return signs (bool [N, G, g], true for +1) and scales (float32 [N, G], each a float16)."""
    groups = groups_of(weight.detach().float(), group_size)
    counts = torch.full((groups.shape[1],), float(group_size), device=weight.device)
    counts[-1] -= -weight.shape[1] % group_size  # what fills up the last group is no weight
    scales = (groups.abs().sum(dim=-1) / counts).half().float()
    return groups >= 0, scales


def fill_(matrix: BinaryMatrix, weight: Tensor) -> None:
    """Put the signs and scales of `weight` into `matrix`."""
    matrix.set_(*decide(weight, matrix.group_size))


def fake(weight: Tensor, matrix: BinaryMatrix) -> Tensor:
    """Return what the signs of `weight` would stand for, [N, K]; gradients pass straight through."""
    with torch.no_grad():
        positive, scales = decide(weight, matrix.group_size)
        scales = scales[..., None]
        values = torch.where(positive, scales, -scales).flatten(1)[:, : weight.shape[1]]
    return straight_through(weight, values)
