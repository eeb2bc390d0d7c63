"""Pruning of the hidden width: channels are removed from every tensor that reads, gives, norms or adds them.

The number and width of heads, and neurons, are kept. Values that depend on the width in other models are kept
too (the factor of an embedding, sines of positions, which are those of the kept channels): the config
still has the original width, and the edit lists the kept channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smelt.families.registry import family_of
from smelt.runtime.models.hidden_axes import hidden_axes

# Attributes of layers with the length of an axis, by the axis of their weight.
_SIZES = {
    nn.Linear: ("out_features", "in_features"),
    nn.Embedding: (None, "embedding_dim"),
    nn.Conv2d: ("out_channels", None),
}


def prune_hidden_width(model: Any, keep: list[int]) -> dict[str, Any]:
    """Keep the channels `keep` of the hidden states of `model`, in place; return the edit.

    Args:
        model: of floats; layers may be low-rank, and may be shared. Works on the meta device.
        keep: rising channel indices.

    Raises:
        InputError: another family, or a quantized layer.
        ValueError: the channels do not exist.
    """
    axes = [axis for axis in hidden_axes(model) if axis.stream == "hidden"]
    width = _tensor(model, axes[0].name).shape[axes[0].dim]
    if not keep or any(type(at) is not int for at in keep) or sorted(set(keep)) != keep:
        raise ValueError("the kept channels are not in increasing order")
    if keep[0] < 0 or keep[-1] >= width:
        raise ValueError(f"the model has {width} channels, from 0 to {width - 1}")
    _init_sinusoidal(model)
    cuts: dict[tuple[str, ...], set[int]] = {}
    for axis in axes:
        cuts.setdefault(axis.names, set()).add(axis.dim)
    for names, dims in cuts.items():
        _select_channels(model, names, dims, torch.tensor(keep))
    for owner in {name.rpartition(".")[0] for names in cuts for name in names}:
        _update_sizes(model.get_submodule(owner))
    return {"op": "width", "module": "", "keep": keep}


@contextmanager
def temporary_hidden_width(model: Any, keep: list[int]) -> Iterator[dict[str, Any]]:
    """Reduce `model` to the channels `keep` within the context; yield the edit.

    Its tensors are restored afterwards. Args and Raises: as in `prune_hidden_width`.
    """
    axes = [axis for axis in hidden_axes(model) if axis.stream == "hidden"]
    before = {name: _tensor(model, name) for axis in axes for name in axis.names}
    edit = prune_hidden_width(model, keep)
    try:
        yield edit
    finally:
        for name, tensor in before.items():
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, tensor)
        for owner in {name.rpartition(".")[0] for name in before}:
            _update_sizes(model.get_submodule(owner))


def hidden_width(model: Any) -> int:
    """Return the current number of channels of the hidden states of `model`."""
    axis = next(axis for axis in hidden_axes(model) if axis.stream == "hidden")
    return int(_tensor(model, axis.name).shape[axis.dim])


def write_width_to_config(
    model: Any, before: list[dict[str, Any]], edit: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the remaining edits: none if the config alone can hold the width, which is then changed.

    It can where it has the width of a head separately and nothing else depends on the width, for a model
    whose structure is otherwise that of its config (`before` is empty).
    """
    family: Any = family_of(model)
    said = model.config.to_dict()
    attentions = [a for stack in family.stacks(said) for a in stack.attentions]
    after = said | {family.hidden_size_key: hidden_width(model)}
    scales = (family.embedding_scale, family.output_scale)
    alone = (
        not before and not family.position_encoding.is_sinusoidal and all(a.head_dim_key for a in attentions)
    )
    inside = any(axis.stream == "head" for axis in hidden_axes(model))
    if not alone or inside or any(scale(said) != scale(after) for scale in scales):
        return [*before, edit]
    from smelt.families.model_blocks import model_attentions

    for attention in model_attentions(model):
        width = int(getattr(model.get_submodule(attention.name), attention.head_dim_attribute))
        setattr(model.config, str(attention.head_dim_key), width)
    setattr(model.config, family.hidden_size_key, after[family.hidden_size_key])
    return []


def _tensor(model: Any, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), last)
    return found


def _select_channels(model: Any, names: tuple[str, ...], dims: set[int], keep: Tensor) -> None:
    """Keep some indices of some axes of the tensor with these names; set the result under all of them."""
    old = _tensor(model, names[0])
    new = old.detach()
    for dim in dims:
        new = new.index_select(dim, keep.to(new.device))
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    for name in names:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, new)


def _init_sinusoidal(model: Any) -> None:
    """Compute tables of sines that are in no file, in their current width, if they are on the meta device."""
    family: Any = family_of(model)
    if not family.position_encoding.is_sinusoidal:
        return
    for stack in family.stacks(model.config.to_dict()):
        for name in stack.stream.embeddings[1:]:
            module = model.get_submodule(name.rpartition(".")[0])
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                module.to_empty(device="cpu", recurse=False)
                with torch.no_grad():
                    model._init_weights(module)


def _update_sizes(module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    if weight is None:
        return
    if isinstance(module, nn.LayerNorm):
        module.normalized_shape = tuple(weight.shape)
    for kind, words in _SIZES.items():
        if isinstance(module, kind):
            for dim, word in enumerate(words):
                if word is not None:
                    setattr(module, word, weight.shape[dim])
