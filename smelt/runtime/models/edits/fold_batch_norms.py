"""Folds batch norms into the convolution before them.

In inference a batch norm multiplies and shifts each channel by constants, and so can the convolution
before it. Graph optimizers fold the two as well, but then a constant of the graph belongs to no layer of the
model, and quantized kernels would differ.

Source: Jacob et al. 2018, arXiv:1712.05877, section 3.2; torch.nn.utils.fusion.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from smelt.families.registry import family_of
from smelt.runtime.layers.low_rank_conv import conv_end_names
from smelt.runtime.models.structure import Edit, replace_module


def fold_batch_norms(model: Any) -> list[Edit]:
    """Fold each batch norm of `model` into its convolution, in place; return the edits.

    The model's family defines which norm follows which convolution.
    """
    family = family_of(model)
    if family is None or family.conv_and_norm is None:
        return []
    convolution, norm = family.conv_and_norm
    edits: list[Edit] = []
    for name, module in list(model.named_modules()):
        before, behind = (getattr(module, word, None) for word in (convolution, norm))
        if not isinstance(before, nn.Module) or not isinstance(behind, nn.BatchNorm2d):
            continue
        _, last = conv_end_names(model, f"{name}.{convolution}")
        layer = model.get_submodule(last)
        if not isinstance(layer, nn.Conv2d):
            continue
        mean, variance = behind.running_mean, behind.running_var
        assert mean is not None
        assert variance is not None
        with torch.no_grad():
            layer.weight, layer.bias = fuse_conv_bn_weights(
                layer.weight, layer.bias, mean, variance, behind.eps, behind.weight, behind.bias
            )  # fmt: skip
        setattr(module, norm, nn.Identity())
        edits.append({"op": "fold", "module": last, "norm": f"{name}.{norm}"})
    return edits


def prepare_folded_conv(model: nn.Module, convolution: str, norm: str) -> None:
    """Give `convolution` a bias and replace `norm` by an identity, as `fold_batch_norms` does.

    Raises:
        TypeError: they are not a convolution and a batch norm.
    """
    layer, behind = model.get_submodule(convolution), model.get_submodule(norm)
    if not isinstance(layer, nn.Conv2d) or not isinstance(behind, nn.BatchNorm2d):
        raise TypeError("they are not a Conv2d and a BatchNorm2d")
    bias = torch.zeros(layer.out_channels, device=layer.weight.device, dtype=layer.weight.dtype)
    layer.bias = nn.Parameter(bias)
    replace_module(model, norm, nn.Identity())
