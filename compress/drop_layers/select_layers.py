"""Select the layers to keep by their importance on samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from smelt.compress.calibration.samples import load_calibration_samples
from smelt.compress.drop_layers.ablation_losses import ablation_losses, max_trials, model_on_device
from smelt.compress.drop_layers.block_influence import (
    UnitId,
    block_influence,
    drop_units_by_loss,
    without_layers,
)
from smelt.compress.drop_layers.settings import DropLayersSettings
from smelt.compress.train.encoded_samples import TensorBatch
from smelt.compress.train.train import missing_scores_errors
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.families.family import Stack
from smelt.families.model_blocks import skipped_parts
from smelt.families.registry import family_of


def select_by_influence(
    model: Any,
    stacks: list[Stack],
    num_kept: dict[str, int],
    src: Artifact,
    settings: DropLayersSettings,
    ctx: Context,
) -> dict[str, list[int]]:
    """Return the layers with the largest block influence by stack, `num_kept` of each, rising."""
    rows = load_calibration_samples(model, src, settings.calibration_samples, ctx, "drop-layers")
    with model_on_device(model, ctx) as device:
        influence = block_influence(model, stacks, batches_on_device_one_by_one(rows.batches, device, ctx))
    ctx.details["block_influence"] = {n: [round(v, 6) for v in values] for n, values in influence.items()}
    first = _keeps_first_layer(model)
    lasts = _last_part_test(model, stacks)
    kept = {}
    for name, count in num_kept.items():
        order = sorted((not (first and at == 0), -value, at) for at, value in enumerate(influence[name]))
        gone: list[UnitId] = []
        for layer in [(name, at) for _, _, at in reversed(order)]:
            if len(order) - len(gone) > count and not lasts(layer, gone):
                gone.append(layer)
        kept[name] = [at for at in range(len(order)) if (name, at) not in gone]
    return kept


def select_by_loss(
    model: Any,
    stacks: list[Stack],
    kept: dict[str, list[int]],
    num_kept: dict[str, int],
    src: Artifact,
    settings: DropLayersSettings,
    ctx: Context,
) -> dict[str, list[int]]:
    """Return the layers to keep by stack after removing one by one the layer with the smallest loss without.

    kept: by stack, the layers that settings keep by index; the others of these stacks are removed first.

    Raises:
        InputError: there are no samples, or the pairs of a sentence embedder have no scores.
    """
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is not None and (found := missing_scores_errors(ctx.task, {"rows": split}, ("rows",))):
        raise InputError(
            f"drop-layers: importance: loss: {found[0].message} Or set importance: block-influence.",
            code=found[0].code,
            setting="importance",
        )
    there = {stack.name: len(model.get_submodule(stack.module_path)) for stack in stacks}
    plain: set[torch.nn.Module] = set()
    told: set[UnitId] = {(n, at) for n, stay in kept.items() for at in range(there[n]) if at not in stay}
    batches = load_calibration_samples(
        model, src, settings.calibration_samples, ctx, "drop-layers", labels=True, padded=True
    ).batches
    lasts = _last_part_test(model, stacks, told)

    def without_more(gone: Collection[UnitId]) -> AbstractContextManager[None]:
        return without_layers(model, stacks, {*gone, *told}, plain)

    with ablation_losses(model, batches, without_more, ctx, max_trials(num_kept, there)) as loss_without:
        ctx.details["loss_before"] = round(loss_without(frozenset()), 6)
        fixed = {(name, 0) for name in num_kept} if _keeps_first_layer(model) else set()
        gone, losses = drop_units_by_loss(
            num_kept, {n: there[n] for n in num_kept}, fixed, loss_without, lasts
        )
    ctx.details["dropped"] = [
        {"stack": name, "layer": number, "loss": round(loss, 6)}
        for (name, number), loss in zip(gone, losses, strict=True)
    ]
    return {name: [at for at in range(there[name]) if (name, at) not in gone] for name in num_kept}


def _last_part_test(
    model: Any, stacks: list[Stack], told: Collection[UnitId] = ()
) -> Callable[[UnitId, Collection[UnitId]], bool]:
    """Return a function that tests whether a layer has the last part of some kind once others are removed.

    An earlier step may have removed parts of the other layers, and one of each kind must be kept in a stack.

    told: layers that are removed first.
    """
    there = {
        stack.name: [
            set(range(len(stack.attentions) + 1)) - skipped_parts(layer)
            for layer in model.get_submodule(stack.module_path)
        ]
        for stack in stacks
    }

    def is_last(layer: UnitId, gone: Collection[UnitId]) -> bool:
        name, number = layer
        away = {*gone, *told, layer}
        left = [parts for at, parts in enumerate(there[name]) if (name, at) not in away]
        return not there[name][number] <= set().union(*left)

    return is_last


def _keeps_first_layer(model: Any) -> bool:
    family = family_of(model)
    return family is not None and family.first_layer_reason is not None


def batches_on_device_one_by_one(
    batches: list[TensorBatch], device: torch.device, ctx: Context
) -> Iterator[TensorBatch]:
    """Yield `batches` on `device`, and report progress to `ctx`."""
    for done, batch in enumerate(batches, start=1):
        yield {name: value.to(device) for name, value in batch.items()}
        ctx.progress(done, len(batches), "block influence")
