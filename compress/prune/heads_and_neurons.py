"""Pruning of heads and neurons: remove the least important ones, and refit the layers that read the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from smelt.compress.prune.budget import BudgetAllocation
from smelt.compress.prune.importances.registry import IMPORTANCES
from smelt.compress.prune.importances.scores import Groups, ScoredModel, UnitScores
from smelt.compress.prune.reconstruct import UnitSelection, cut_units, load_reconstruction_samples
from smelt.compress.prune.settings import PruneSettings, fixed_heads_warnings
from smelt.compress.prune.units import (
    AttentionGroup,
    FeedForwardGroup,
    allocate_globally,
    count_kept_heads,
    count_kept_neurons,
    find_groups,
    rounding_warnings,
    update_config,
)
from smelt.compress.quantize.requantize import Requantizer, dequantize_model, save_requantized
from smelt.core.artifact import Artifact
from smelt.core.files import read_json_object
from smelt.models.checkpoint import count_stored_parameters, load_model
from smelt.models.edits import Edit
from smelt.models.families.registry import find_family
from smelt.models.streamed_model import StreamedModel, open_streamed
from smelt.runtimes.device import torch_device
from smelt.stage import Context


def prune_heads_and_neurons(src: Artifact, settings: PruneSettings, ctx: Context) -> None:
    """Score and prune the units of `src`, and write the smaller model to `ctx.out`."""
    streamed, codes = _open_streamed(src, settings, ctx), None
    model, edits = (streamed.model, streamed.edits) if streamed else load_model(src.path)
    if any(edit["op"] == "quantize" for edit in edits):
        edits, codes = dequantize_model(model, edits, src, ctx, "prune")
    ctx.details["parameters_before"] = count_stored_parameters(model)
    groups = target_groups(model, settings)
    ctx.warnings.extend(fixed_heads_warnings(settings.targets, model.config.to_dict()))
    allocation = None
    if settings.budget is not None and any(groups):
        allocation = BudgetAllocation(model, groups, src, settings, ctx)
    edits = cut_groups(model, edits, groups, allocation, src, settings, ctx, streamed, codes)
    ctx.details["parameters_after"] = count_stored_parameters(model)
    save_requantized(model, edits, src, settings.dtype, ctx, codes, streamed)


def target_groups(model: Any, settings: PruneSettings) -> Groups:
    """Return the attentions and feed-forward blocks of `model` that may lose units."""
    attentions, blocks = find_groups(model)
    return (
        attentions if "heads" in settings.targets else [],
        blocks if "ffn" in settings.targets else [],
    )


def cut_groups(
    model: Any,
    edits: list[Edit],
    groups: Groups,
    allocation: BudgetAllocation | None,
    src: Artifact,
    settings: PruneSettings,
    ctx: Context,
    streamed: StreamedModel | None = None,
    codes: Requantizer | None = None,
) -> list[Edit]:
    """Score the units of `groups`, remove the least important ones and refit; return the edits.

    Args:
        model: float32, in eval mode, on the CPU; changed in place.
        edits: the edits of the model.
        groups: groups that may lose units.
        allocation: the budget; None to keep the fraction of the settings.
        src: the artifact with the tokenizer.
        settings: of the stage.
        ctx: data, device, threads, progress; gets details and warnings.
        streamed: the model, if its blocks are read and written one by one.
        codes: quantizes each refitted layer if the model was quantized.
    """
    attentions, blocks = groups
    score = partial(IMPORTANCES[settings.importance].scorer("heads"), ScoredModel(model, src, settings, ctx))
    scores: UnitScores | None = score(groups) if streamed is None else None
    if settings.scope == "layer" and allocation is None:
        ctx.warnings.extend(rounding_warnings(model, attentions, blocks, settings))
    if allocation is not None and scores is not None:
        kept_counts = allocation.allocate(scores)
    else:
        kept_counts = _unit_counts(model, attentions, blocks, scores, settings)
    selection = _select_units(model, attentions, blocks, scores, score, kept_counts)
    samples = load_reconstruction_samples(model, src, settings, ctx) if selection else None
    ctx.details["reconstruction_error"] = cut_units(model, edits, selection, samples, ctx, streamed, codes)
    edits = update_config(model, edits)
    ctx.details["kept_heads"] = {group.name: group.count(model) for group in attentions}
    ctx.details["kept_neurons"] = {block.name: block.count(model) for block in blocks}
    if allocation is not None:
        ctx.details["budget"] = allocation.details(model)
    return edits


def _select_units(
    model: Any,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    scores: UnitScores | None,
    score: Callable[[Groups], UnitScores],
    num_kept: Mapping[str, int],
) -> UnitSelection:
    """Return each group that loses units, with a function that returns its kept units.

    Without `scores` a group is scored by `score` when it is cut, because only then are the weights of a large
    model in memory. kept: the number of kept units by group name.
    """

    def kept_heads(group: AttentionGroup) -> Tensor:
        group_scores = (scores or score(([group], []))).heads[group.name]
        return group_scores.topk(num_kept[group.name]).indices.sort().values

    def kept_neurons(block: FeedForwardGroup) -> Tensor:
        group_scores = (scores or score(([], [block]))).neurons[block.name]
        return group_scores.topk(num_kept[block.name]).indices.sort().values

    selection: list[tuple[AttentionGroup | FeedForwardGroup, Callable[[], Tensor]]] = []
    selection += [(group, partial(kept_heads, group)) for group in attentions]
    selection += [(block, partial(kept_neurons, block)) for block in blocks]
    return [(group, select) for group, select in selection if num_kept[group.name] < group.count(model)]


def _open_streamed(src: Artifact, settings: PruneSettings, ctx: Context) -> StreamedModel | None:
    """Return a large model to be pruned block by block; None where the whole model has to be loaded.

    Gradients and comparisons across layers need the whole model. So does a relative position bias that all
    blocks of a stack share, because each block gets its own when heads are removed.
    """
    is_local = IMPORTANCES[settings.importance].is_local
    is_layerwise = is_local and settings.scope == "layer" and settings.budget is None
    if not is_layerwise or torch_device(ctx.device) != "cpu":
        return None
    family = find_family(read_json_object(src.path / "config.json"))
    if family is not None and family.relative_bias is not None and "heads" in settings.targets:
        return None
    return open_streamed(src.path, ctx.out, settings.dtype)


def _unit_counts(
    model: Any,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    scores: UnitScores | None,
    settings: PruneSettings,
) -> dict[str, int]:
    """Return the number of kept units by group name, from `keep_ratio`."""
    if settings.scope == "global" and scores is not None:
        normalized = scores.normalized()
        heads = (
            allocate_globally(normalized.heads, settings.keep_ratio_of("heads"), 1)
            if "heads" in settings.targets
            else {}
        )
        if "ffn" not in settings.targets:
            return heads
        return heads | allocate_globally(
            normalized.neurons, settings.keep_ratio_of("ffn"), settings.multiple_of
        )
    heads = {g.name: count_kept_heads(g.count(model), settings) for g in attentions}
    return heads | {b.name: count_kept_neurons(b.count(model), settings) for b in blocks}
