"""Which layers stay, decided by what they do on rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from smelt.compress.calibration.rows import calibration_rows
from smelt.compress.depth.influence import Layer, block_influence, drop_by_loss, without
from smelt.compress.depth.losses import losses_of, most_tries, on_device
from smelt.compress.depth.settings import DropLayersSettings
from smelt.compress.train.data import TensorBatch
from smelt.compress.train.run import scores_lacking
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.families.family import Stack
from smelt.families.registry import family_of
from smelt.families.walk import skipped_parts


def by_influence(
    model: Any,
    stacks: list[Stack],
    numbers: dict[str, int],
    src: Artifact,
    settings: DropLayersSettings,
    ctx: Context,
) -> dict[str, list[int]]:
    """Return by stack the layers with the largest block influence, as many as `numbers` says, rising."""
    rows = calibration_rows(model, src, settings.calibration_samples, ctx, "drop-layers")
    with on_device(model, ctx) as device:
        influence = block_influence(model, stacks, moved(rows.batches, device, ctx))
    ctx.details["block_influence"] = {n: [round(v, 6) for v in values] for n, values in influence.items()}
    first = _first_stays(model)
    lasts = _lasts(model, stacks)
    kept = {}
    for name, count in numbers.items():
        order = sorted((not (first and at == 0), -value, at) for at, value in enumerate(influence[name]))
        gone: list[Layer] = []
        for layer in [(name, at) for _, _, at in reversed(order)]:
            if len(order) - len(gone) > count and not lasts(layer, gone):
                gone.append(layer)
        kept[name] = [at for at in range(len(order)) if (name, at) not in gone]
    return kept


def by_loss(
    model: Any,
    stacks: list[Stack],
    kept: dict[str, list[int]],
    numbers: dict[str, int],
    src: Artifact,
    settings: DropLayersSettings,
    ctx: Context,
) -> dict[str, list[int]]:
    """Return by stack the layers that are left when those go one by one without which the loss is smallest.

    kept: by stack the layers that were told to stay; the others of these are gone from the beginning.

    Raises:
        InputError: there are no rows, or the pairs of a sentence embedder have no scores.
    """
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is not None and (found := scores_lacking(ctx.task, {"rows": split}, ("rows",))):
        raise InputError(
            f"drop-layers: importance: loss: {found[0].message} Or take block-influence.",
            code=found[0].code,
            setting="importance",
        )
    there = {stack.name: len(model.get_submodule(stack.place)) for stack in stacks}
    plain: set[torch.nn.Module] = set()
    told: set[Layer] = {(n, at) for n, stay in kept.items() for at in range(there[n]) if at not in stay}
    batches = calibration_rows(
        model, src, settings.calibration_samples, ctx, "drop-layers", labels=True, padded=True
    ).batches
    lasts = _lasts(model, stacks, told)

    def without_more(gone: Collection[Layer]) -> AbstractContextManager[None]:
        return without(model, stacks, {*gone, *told}, plain)

    with losses_of(model, batches, without_more, ctx, most_tries(numbers, there)) as loss_without:
        ctx.details["loss_before"] = round(loss_without(frozenset()), 6)
        fixed = {(name, 0) for name in numbers} if _first_stays(model) else set()
        gone, losses = drop_by_loss(numbers, {n: there[n] for n in numbers}, fixed, loss_without, lasts)
    ctx.details["dropped"] = [
        {"stack": name, "layer": number, "loss": round(loss, 6)}
        for (name, number), loss in zip(gone, losses, strict=True)
    ]
    return {name: [at for at in range(there[name]) if (name, at) not in gone] for name in numbers}


def _lasts(
    model: Any, stacks: list[Stack], told: Collection[Layer] = ()
) -> Callable[[Layer, Collection[Layer]], bool]:
    """Return what says of a layer whether, once others are gone, it alone has one of its parts.

    An earlier step may have taken parts out of the other layers, and of each kind one stays in a stack.

    told: layers that are gone from the beginning.
    """
    there = {
        stack.name: [
            set(range(len(stack.attentions) + 1)) - skipped_parts(layer)
            for layer in model.get_submodule(stack.place)
        ]
        for stack in stacks
    }

    def is_last(layer: Layer, gone: Collection[Layer]) -> bool:
        name, number = layer
        away = {*gone, *told, layer}
        left = [parts for at, parts in enumerate(there[name]) if (name, at) not in away]
        return not there[name][number] <= set().union(*left)

    return is_last


def _first_stays(model: Any) -> bool:
    family = family_of(model)
    return family is not None and family.first_stays is not None


def moved(batches: list[TensorBatch], device: torch.device, ctx: Context) -> Iterator[TensorBatch]:
    """Yield `batches` on `device`, and tell `ctx` how far that is."""
    for done, batch in enumerate(batches, start=1):
        yield {name: value.to(device) for name, value in batch.items()}
        ctx.progress(done, len(batches), "block influence")
