"""GPT-2's linear layers, which transformers stores as `Conv1D` with a transposed weight.

In memory they are plain `nn.Linear`, so that pruning, factorization and quantization need no special case;
in the file a plain one keeps transformers' layout [in, out], so that `from_pretrained` can still read a model
whose structure no stage has changed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from smelt.models.families.registry import family_of


def replace_conv1d(model: Any) -> None:
    """Replace every `Conv1D` of `model` by an `nn.Linear` of the same sizes; works on the meta device."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            parent, _, child = name.rpartition(".")
            rows, columns = module.weight.shape
            new = nn.Linear(rows, columns, bias=True, device="meta")
            if not module.weight.is_meta:
                new.weight = nn.Parameter(module.weight.detach().t().contiguous())
                new.bias = nn.Parameter(module.bias.detach())
            setattr(model.get_submodule(parent), child, new)


def transpose_conv1d_tensors(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with those transposed whose layout in the file differs from the one in memory."""
    family = family_of(model)
    if family is None or not family.transposed_suffixes:
        return tensors
    names = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name.endswith(family.transposed_suffixes)
    }
    return {n: t.t().contiguous() if n in names else t for n, t in tensors.items()}
