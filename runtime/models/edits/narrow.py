"""The hidden states become narrower: channels go, from every tensor that reads, gives, norms or adds them.

Heads, their number and width, and neurons stay. What a model of another width would compute otherwise stays
too (the factor of an embedding, sines of positions, which are those of the channels that stay): the config
goes on to say the width that the model was made with, and the edit says which channels are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smelt.families.registry import family_of
from smelt.runtime.models.axes import hidden_axes

# Attributes of layers that say how long an axis is, by the axis of their weight.
_SIZES = {
    nn.Linear: ("out_features", "in_features"),
    nn.Embedding: (None, "embedding_dim"),
    nn.Conv2d: ("out_channels", None),
}


def narrow(model: Any, keep: list[int]) -> dict[str, Any]:
    """Keep the channels `keep` of the hidden states of `model`, in place; return the edit that says so.

    Args:
        model: of floats; layers may be low-rank pairs, and may be shared. Works on the meta device.
        keep: rising numbers of channels.

    Raises:
        InputError: another family, or a quantized layer.
        ValueError: there are no such channels.
    """
    axes = [axis for axis in hidden_axes(model) if axis.stream == "hidden"]
    width = _tensor(model, axes[0].name).shape[axes[0].dim]
    if not keep or any(type(at) is not int for at in keep) or sorted(set(keep)) != keep:
        raise ValueError("the channels that stay are no rising numbers")
    if keep[0] < 0 or keep[-1] >= width:
        raise ValueError(f"the model has {width} channels, from 0 to {width - 1}")
    _draw_sines(model)
    cuts: dict[tuple[str, ...], set[int]] = {}
    for axis in axes:
        cuts.setdefault(axis.names, set()).add(axis.dim)
    for names, dims in cuts.items():
        _cut(model, names, dims, torch.tensor(keep))
    for owner in {name.rpartition(".")[0] for names in cuts for name in names}:
        _say_sizes(model.get_submodule(owner))
    return {"op": "width", "module": "", "keep": keep}


@contextmanager
def narrowed(model: Any, keep: list[int]) -> Iterator[dict[str, Any]]:
    """Let `model` meanwhile have the channels `keep` alone; give the edit that says so.

    Its tensors are the same ones afterwards. Args and Raises: as of `narrow`.
    """
    axes = [axis for axis in hidden_axes(model) if axis.stream == "hidden"]
    before = {name: _tensor(model, name) for axis in axes for name in axis.names}
    edit = narrow(model, keep)
    try:
        yield edit
    finally:
        for name, tensor in before.items():
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, tensor)
        for owner in {name.rpartition(".")[0] for name in before}:
            _say_sizes(model.get_submodule(owner))


def width_of(model: Any) -> int:
    """Return how many channels the hidden states of `model` have now."""
    axis = next(axis for axis in hidden_axes(model) if axis.stream == "hidden")
    return int(_tensor(model, axis.name).shape[axis.dim])


def say_width_in_config(
    model: Any, before: list[dict[str, Any]], edit: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the edits that are left: where the config alone can say the width, it says so, and none is.

    It can where it says the width of a head apart and nothing else follows from the width, of a model whose
    structure is that of its config otherwise (`before` is empty).
    """
    family: Any = family_of(model)
    said = model.config.to_dict()
    attentions = [a for stack in family.stacks(said) for a in stack.attentions]
    after = said | {family.width: width_of(model)}
    scales = (family.embedding_scale, family.output_scale)
    alone = not before and not family.positions.computed and all(a.width_setting for a in attentions)
    inside = any(axis.stream == "head" for axis in hidden_axes(model))
    if not alone or inside or any(scale(said) != scale(after) for scale in scales):
        return [*before, edit]
    from smelt.families.walk import attentions_of

    for attention in attentions_of(model):
        width = int(getattr(model.get_submodule(attention.name), attention.width))
        setattr(model.config, str(attention.width_setting), width)
    setattr(model.config, family.width, after[family.width])
    return []


def _tensor(model: Any, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), last)
    return found


def _cut(model: Any, names: tuple[str, ...], dims: set[int], keep: Tensor) -> None:
    """Keep places of some axes of the tensor that has these names, and put the new one under all of them."""
    old = _tensor(model, names[0])
    new = old.detach()
    for dim in dims:
        new = new.index_select(dim, keep.to(new.device))
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    for name in names:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, new)


def _draw_sines(model: Any) -> None:
    """Draw up tables of sines that no file holds, as wide as they are, where they are on the meta device."""
    family: Any = family_of(model)
    if not family.positions.computed:
        return
    for stack in family.stacks(model.config.to_dict()):
        for name in stack.stream.tables[1:]:
            module = model.get_submodule(name.rpartition(".")[0])
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                module.to_empty(device="cpu", recurse=False)
                with torch.no_grad():
                    model._init_weights(module)


def _say_sizes(module: nn.Module) -> None:
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
