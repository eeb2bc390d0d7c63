"""Pruning of convolution channels: physical removal between two convolutions.

The model family defines which channels can be removed: the outputs of one convolution of a chain that only
the next one reads. The residual stream has one width for all blocks of a stage and is not pruned. Those of a
user's PyTorch module are found by torch-pruning (`smelt.compress.prune.module_channels`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from smelt.compress.model_input import load_float_model
from smelt.compress.prune.importances.registry import IMPORTANCES
from smelt.compress.prune.importances.scores import ScoredModel, UnitScores
from smelt.compress.prune.module_channels import cut_module_channels, find_module_channels
from smelt.compress.prune.settings import PruneSettings, check_units, count_kept_channels
from smelt.compress.prune.units import ChannelGroup, ChannelUnits, allocate_globally, find_convolution
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, RunError
from smelt.core.messages import Message, warning
from smelt.models.checkpoint import count_stored_parameters, save_model
from smelt.models.edits import Edit, replace_layer
from smelt.models.families.registry import family_of, is_user_module
from smelt.models.layers import conv_end_names, resize_batch_norm, resize_conv
from smelt.models.operations import MODULE_ERRORS, count_operations
from smelt.runtimes.images import DEFAULT_IMAGE_SIZE, read_processor
from smelt.stage import Context


def prune_channels(src: Artifact, settings: PruneSettings, ctx: Context) -> None:
    """Remove the least important channels of `src`, and write the model to `ctx.out`.

    Raises:
        InputError: the model has no such channels, or calibration samples are missing; `not-prunable`: the
            code of a user's module fails.
    """
    try:
        _prune_channels(src, settings, ctx)
    except RunError as error:
        if error.code not in MODULE_ERRORS:
            raise
        raise InputError(
            f"prune: {error} Change the module, or remove prune.", code="not-prunable"
        ) from error


def _prune_channels(src: Artifact, settings: PruneSettings, ctx: Context) -> None:
    model, edits = load_float_model(src, "prune")
    for error in check_units(settings.targets, model.config.to_dict()):
        raise InputError(f"prune: {error.message}", code=error.code, setting=error.setting)
    size = read_processor(src.path).shape or (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE)
    ctx.details["parameters_before"] = count_stored_parameters(model)
    ctx.details["flops_before"] = count_operations(model, size)
    is_module = is_user_module(model.config.to_dict())
    groups: Sequence[Any] = find_module_channels(model, size) if is_module else find_channels(model)
    scored_model = ScoredModel(model, src, settings, ctx)
    scores: UnitScores = IMPORTANCES[settings.importance].scorer("channels")(scored_model, groups)
    kept_counts = _kept_counts(model, groups, scores, settings)
    ctx.warnings.extend(_rounding_warnings(model, groups, kept_counts, settings))
    kept_channels = {
        group.name: scores.neurons[group.name].topk(kept_counts[group.name]).indices.sort().values
        for group in groups
        if kept_counts[group.name] < group.count(model)
    }
    if is_module:
        cut_module_channels(model, edits, groups, kept_channels, size)
    else:
        for group in groups:
            if group.name in kept_channels:
                cut_channels(model, edits, group, kept_channels[group.name])
    ctx.details["kept_channels"] = kept_counts
    ctx.details["parameters_after"] = count_stored_parameters(model)
    ctx.details["flops_after"] = count_operations(model, size)
    ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))


def find_channels(model: Any) -> list[ChannelGroup]:
    """Return the channel groups of `model` that can be pruned, in order."""
    family = family_of(model)
    assert family is not None
    convolution, norm = family.convs_and_norms[0]
    groups = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == family.conv_chain:
            links = [f"{name}.{child}" for child, _ in module.named_children()]
            groups += [
                ChannelGroup(block, f"{block}.{convolution}", f"{block}.{norm}", f"{following}.{convolution}")
                for block, following in pairwise(links)
            ]
    return groups


def cut_channels(model: Any, edits: list[Edit], group: ChannelGroup, kept_channels: Tensor) -> None:
    """Keep the channels `kept_channels` (int64, ascending) of `group`, in both convolutions and the norm."""
    for path, dim in (
        (conv_end_names(model, group.first)[1], 0),
        (conv_end_names(model, group.second)[0], 1),
    ):
        old = find_convolution(model, path)
        weight = old.weight.detach().index_select(dim, kept_channels)
        new = resize_conv(old, weight.shape[1], weight.shape[0])
        new.weight = nn.Parameter(weight)
        if old.bias is not None:
            bias = old.bias.detach()
            new.bias = nn.Parameter(bias[kept_channels] if dim == 0 else bias.clone())
        sizes = {"in_channels": new.in_channels, "out_channels": new.out_channels}
        replace_layer(model, edits, path, new.train(old.training), {"op": "conv", "module": path, **sizes})
    norm: Any = model.get_submodule(group.norm)
    smaller = resize_batch_norm(norm, len(kept_channels))
    smaller.load_state_dict({n: t[kept_channels] if t.dim() else t for n, t in norm.state_dict().items()})
    edit = {"op": "batch_norm", "module": group.norm, "num_features": len(kept_channels)}
    replace_layer(model, edits, group.norm, smaller.train(norm.training), edit)


def _kept_counts(
    model: Any, groups: Sequence[ChannelUnits], scores: UnitScores, settings: PruneSettings
) -> dict[str, int]:
    """Return the number of kept channels by group name."""
    if settings.scope == "global":
        normalized = scores.normalized()
        return allocate_globally(normalized.neurons, settings.keep_ratio_of("channels"), settings.multiple_of)
    return {group.name: count_kept_channels(group.count(model), settings) for group in groups}


def _rounding_warnings(
    model: Any, groups: Sequence[ChannelUnits], num_kept: Mapping[str, int], settings: PruneSettings
) -> list[Message]:
    """Return a warning about layers that keep all channels because of rounding."""
    unchanged = [g.count(model) for g in groups if num_kept[g.name] == g.count(model)]
    if settings.scope == "global" or settings.keep_ratio_of("channels") == 1 or not unchanged:
        return []
    sizes = " or ".join(map(str, sorted(set(unchanged))))
    return [
        warning(
            "nothing-to-remove",
            f"keep_ratio {settings.keep_ratio_of('channels'):g} of {sizes} channels, rounded to a multiple of"
            f" {settings.multiple_of}, keeps all of them: nothing is removed in {len(unchanged)} of"
            f" {len(groups)} layers. Lower keep_ratio or multiple_of.",
            setting="keep_ratio",
        )
    ]
