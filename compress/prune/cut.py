"""Removal of heads and neurons from a model, with their rows and columns, recorded in the edits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.float_model import record_kept_indices
from smelt.compress.prune.unit_groups import (
    AttentionGroup,
    FeedForwardGroup,
    find_groups,
    half_path,
    linear_with_inputs,
    linear_with_outputs,
)
from smelt.families.registry import family_of
from smelt.families.relative_bias import RelativeBias
from smelt.runtime.models.structure import Edit, is_masked, mark_masked, replace_layer


def cut_heads(model: Any, edits: list[Edit], group: AttentionGroup, kept: Tensor) -> Tensor:
    """Keep the heads `kept` (int64, ascending) of an attention; return the kept inputs of `out`."""
    width = group.head_dim(model)
    bias = _relative_bias(model) if group.structure.relative_bias else None
    if bias is not None:
        bias.make_all_independent(model, edits)
    places = (kept.unsqueeze(1) * width + torch.arange(width)).flatten()
    for name, rows in group.row_indices(model, kept).items():
        _cut_linear(model, edits, name, rows, dim=0)
    _cut_linear(model, edits, group.structure.out, places, dim=1)
    values = {group.structure.heads_attribute: len(kept)} if group.structure.heads_attribute else {}
    values |= (
        {group.structure.all_head_size_attribute: len(places)}
        if group.structure.all_head_size_attribute
        else {}
    )
    for name in group.modules:
        for attribute, value in values.items():
            setattr(model.get_submodule(name), attribute, value)
            edits.append({"op": "set", "module": name, "attribute": attribute, "value": value})
        if bias is not None:
            bias.prune_bias_heads(model, edits, name, kept)
    return places


def cut_neurons(model: Any, edits: list[Edit], block: FeedForwardGroup, kept: Tensor) -> Tensor:
    """Keep the neurons `kept` (int64, ascending) of a feed-forward part; return the kept inputs of `down`."""
    for name, rows in block.row_indices(model, kept).items():
        _cut_linear(model, edits, name, rows, dim=0)
    _cut_linear(model, edits, block.structure.down, kept, dim=1)
    return kept


def update_config(model: Any, edits: list[Edit]) -> list[Edit]:
    """Write common widths to the config; return the edits without those that the config replaces."""
    _, blocks = find_groups(model)
    for setting in {block.structure.intermediate_size_key for block in blocks}:
        kind = [block for block in blocks if block.structure.intermediate_size_key == setting]
        widths = {block.count(model) for block in kind}
        if len(widths) > 1:
            continue
        setattr(model.config, setting, widths.pop())
        names = {
            n
            for b in kind
            for i in b.structure.input_layers
            for n in (i, f"{i}.up", b.structure.down, f"{b.structure.down}.down")
        }
        edits = [e for e in edits if not (e["op"] == "linear" and e["module"] in names)]
    return edits


def _relative_bias(model: Any) -> RelativeBias | None:
    family = family_of(model)
    return family.relative_bias() if family and family.relative_bias else None


def _cut_linear(model: Any, edits: list[Edit], name: str, indices: Tensor, dim: int) -> None:
    """Keep `indices` of the rows (dim 0, with biases) or columns (dim 1) of a linear or factorized layer."""
    old = linear_with_outputs(model, name) if dim == 0 else linear_with_inputs(model, name)
    weight = old.weight.detach().index_select(dim, indices)
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=old.bias is not None)
    new.weight = nn.Parameter(weight.clone())
    if old.bias is not None:
        bias = old.bias.detach()
        new.bias = nn.Parameter((bias.index_select(0, indices) if dim == 0 else bias).clone())
    if is_masked(old):
        mark_masked(new)
    record_kept_indices(old, new, indices, dim)
    path = half_path(model, name, "up" if dim == 0 else "down")
    sizes = {"in_features": new.in_features, "out_features": new.out_features}
    replace_layer(model, edits, path, new, {"op": "linear", "module": path, **sizes})
