"""Batch norms, which become part of the convolution before them.

While a model is used, a batch norm multiplies and shifts each channel by numbers that do not change, and so
can the convolution before it. Optimizers of graphs fold the two as well, but then a constant of the graph is
of no layer that could be asked for it, and codes of a kernel would be those of another one.

Source: Jacob et al. 2018, arXiv:1712.05877, section 3.2; torch.nn.utils.fusion.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from smelt.families.registry import family_of
from smelt.runtime.layers.low_rank_conv import ends_of
from smelt.runtime.models.structure import Edit, replace_module


def fold_batch_norms(model: Any) -> list[Edit]:
    """Fold each batch norm of `model` into its convolution, in place; return the edits that say so.

    Which norm stands behind which convolution says the model's family.
    """
    family = family_of(model)
    if family is None or family.normed is None:
        return []
    convolution, norm = family.normed
    edits: list[Edit] = []
    for name, module in list(model.named_modules()):
        before, behind = (getattr(module, word, None) for word in (convolution, norm))
        if not isinstance(before, nn.Module) or not isinstance(behind, nn.BatchNorm2d):
            continue
        _, last = ends_of(model, f"{name}.{convolution}")
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


def make_room(model: nn.Module, convolution: str, norm: str) -> None:
    """Give `convolution` a bias and let `norm` do nothing, as `fold_batch_norms` leaves them.

    Raises:
        TypeError: they are no convolution and no batch norm.
    """
    layer, behind = model.get_submodule(convolution), model.get_submodule(norm)
    if not isinstance(layer, nn.Conv2d) or not isinstance(behind, nn.BatchNorm2d):
        raise TypeError("they are no Conv2d and BatchNorm2d")
    bias = torch.zeros(layer.out_channels, device=layer.weight.device, dtype=layer.weight.dtype)
    layer.bias = nn.Parameter(bias)
    replace_module(model, norm, nn.Identity())
