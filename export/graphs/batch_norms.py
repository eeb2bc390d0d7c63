"""Batch norms, which leave as part of the convolution before them.

While a model is used, a batch norm multiplies and shifts each channel by numbers that do not change, and so
can the convolution before it. Optimizers of graphs fold the two as well, but then a constant of the graph is
of no layer that could be asked for it.

Source: Jacob et al. 2018, arXiv:1712.05877, section 3.2; torch.nn.utils.fusion.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from smelt.families.registry import family_of
from smelt.runtime.layers.low_rank_conv import last_of


def fold_batch_norms(model: Any) -> int:
    """Fold each batch norm of `model` into its convolution, in place; return how many there were.

    Which norm stands behind which convolution says the model's family.
    """
    family = family_of(model)
    if family is None or family.normed is None:
        return 0
    convolution, norm = family.normed
    found = 0
    for module in model.modules():
        before, behind = (getattr(module, name, None) for name in (convolution, norm))
        layer = last_of(before) if isinstance(before, nn.Module) else None
        if layer is None or not isinstance(behind, nn.BatchNorm2d):
            continue
        mean, variance = behind.running_mean, behind.running_var
        assert mean is not None
        assert variance is not None
        with torch.no_grad():
            layer.weight, layer.bias = fuse_conv_bn_weights(
                layer.weight, layer.bias, mean, variance, behind.eps, behind.weight, behind.bias
            )  # fmt: skip
        setattr(module, norm, nn.Identity())
        found += 1
    return found
