"""Taking units out of a model: the rows and columns that heads and neurons own go, and the edits say so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.float_model import note_cut
from smelt.compress.prune.groups import (
    AttentionGroup,
    FeedForwardGroup,
    columns_of,
    find_groups,
    path_of,
    rows_of,
)
from smelt.families.registry import family_of
from smelt.families.relative_bias import RelativeBias
from smelt.runtime.models.structure import Edit, keep_zeros, keeps_zeros, replace_layer


def cut_heads(model: Any, edits: list[Edit], group: AttentionGroup, stay: Tensor) -> Tensor:
    """Keep the heads `stay` (int64, rising) of an attention; return the inputs of `out` that are left."""
    width = group.head_dim(model)
    bias = _relative_bias(model) if group.parts.relative else None
    if bias is not None:
        bias.own_all(model, edits)
    places = (stay.unsqueeze(1) * width + torch.arange(width)).flatten()
    for name, rows in group.row_places(model, stay).items():
        _cut(model, edits, name, rows, dim=0)
    _cut(model, edits, group.parts.out, places, dim=1)
    values = {group.parts.heads: len(stay)} if group.parts.heads else {}
    values |= {group.parts.size: len(places)} if group.parts.size else {}
    for name in group.modules:
        for attribute, value in values.items():
            setattr(model.get_submodule(name), attribute, value)
            edits.append({"op": "set", "module": name, "attribute": attribute, "value": value})
        if bias is not None:
            bias.prune(model, edits, name, stay)
    return places


def cut_neurons(model: Any, edits: list[Edit], block: FeedForwardGroup, stay: Tensor) -> Tensor:
    """Keep the neurons `stay` (int64, rising) of a feed-forward part; return them, the inputs of `down`."""
    for name, rows in block.row_places(model, stay).items():
        _cut(model, edits, name, rows, dim=0)
    _cut(model, edits, block.parts.down, stay, dim=1)
    return stay


def say_in_config(model: Any, edits: list[Edit]) -> list[Edit]:
    """Return the edits that are left: where all blocks of a kind are equally wide, the config says so."""
    _, blocks = find_groups(model)
    for setting in {block.parts.setting for block in blocks}:
        kind = [block for block in blocks if block.parts.setting == setting]
        widths = {block.count(model) for block in kind}
        if len(widths) > 1:
            continue
        setattr(model.config, setting, widths.pop())
        names = {
            n
            for b in kind
            for i in b.parts.inputs
            for n in (i, f"{i}.up", b.parts.down, f"{b.parts.down}.down")
        }
        edits = [e for e in edits if not (e["op"] == "linear" and e["module"] in names)]
    return edits


def _relative_bias(model: Any) -> RelativeBias | None:
    family = family_of(model)
    return family.relative_bias() if family and family.relative_bias else None


def _cut(model: Any, edits: list[Edit], name: str, places: Tensor, dim: int) -> None:
    """Keep `places` of the rows (dim 0, with their biases) or columns (dim 1) of a Linear or a pair."""
    old = rows_of(model, name) if dim == 0 else columns_of(model, name)
    weight = old.weight.detach().index_select(dim, places)
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=old.bias is not None)
    new.weight = nn.Parameter(weight.clone())
    if old.bias is not None:
        bias = old.bias.detach()
        new.bias = nn.Parameter((bias.index_select(0, places) if dim == 0 else bias).clone())
    if keeps_zeros(old):
        keep_zeros(new)
    note_cut(old, new, places, dim)
    path = path_of(model, name, "up" if dim == 0 else "down")
    sizes = {"in_features": new.in_features, "out_features": new.out_features}
    replace_layer(model, edits, path, new, {"op": "linear", "module": path, **sizes})
