"""Select and remove attention and feed-forward parts of layers."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from smelt.calibration.samples import load_calibration_samples
from smelt.compress.drop_layers.layer_parts import LayerPart, layer_parts, part_influence, without_parts
from smelt.compress.drop_layers.select_layers import (
    UnitId,
    ablation_losses,
    batches_on_device_one_by_one,
    drop_units_by_loss,
    max_trials,
    model_on_device,
)
from smelt.compress.drop_layers.settings import DropLayersSettings, check_parts, kept_fraction
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.models.skip_sublayer import skip_sublayer
from smelt.models.structure import Edit
from smelt.training.train import missing_scores_errors


@dataclass(frozen=True)
class _PartRequest:
    """The parts of the stacks that the settings concern: those removed by index, and how many to keep.

    num_kept: of the stacks without explicit indices.
    """

    model: Any
    parts: list[LayerPart]
    stacks: Mapping[str, list[LayerPart]]
    named: list[LayerPart]
    num_kept: dict[str, int]

    @property
    def num_present(self) -> dict[str, int]:
        """The number of parts in the stacks of `num_kept`."""
        return {name: len(self.stacks[name]) for name in self.num_kept}

    def is_last(self, unit: UnitId, gone: Collection[UnitId]) -> bool:
        """Return whether the part is the last of its kind in its stack."""
        stack = self.stacks[unit[0]]
        same = [at for at, other in enumerate(stack) if other.kind == stack[unit[1]].kind]
        return all((unit[0], at) in gone for at in same if at != unit[1])


def drop_parts(
    model: Any, edits: list[Edit], src: Artifact, settings: DropLayersSettings, ctx: Context
) -> None:
    """Remove the least important parts of `model` in place; append the edits, report the details.

    One part of each kind is kept in each stack.

    Raises:
        InputError: parts that the model lacks, or settings that keep none of a kind.
    """
    if mistakes := check_parts(settings, model.config.to_dict()):
        raise InputError(
            "drop-layers: " + " ".join(f"{mistake.setting}: {mistake.message}" for mistake in mistakes),
            code=mistakes[0].code,
            found=mistakes,
        )
    parts = layer_parts(model)
    stacks: dict[str, list[LayerPart]] = {}
    for part in parts:
        if part.kind in settings.parts:
            stacks.setdefault(part.stack, []).append(part)
    asked = _PartRequest(model, parts, stacks, *_num_kept(settings, stacks, ctx))
    gone = {*asked.named, *_select_parts(asked, src, settings, ctx)}
    for part in (part for part in parts if part in gone):
        edits.append(skip_sublayer(model, part.block.module_path, part.index))
    ctx.details["dropped_parts"] = {
        name: [part.name for part in parts if part in gone] for name, parts in stacks.items()
    }


def _num_kept(
    settings: DropLayersSettings, stacks: Mapping[str, list[LayerPart]], ctx: Context
) -> tuple[list[LayerPart], dict[str, int]]:
    """Return the parts to remove by explicit index, and the number of parts to keep of other stacks."""
    removed: list[LayerPart] = []
    numbers: dict[str, int] = {}
    for name, parts in stacks.items():
        choice = getattr(settings, name)
        kinds = len({part.kind for part in parts})
        if isinstance(choice, list):
            removed += [part for part in parts if part.block.index not in choice]
            continue
        wanted = math.floor(kept_fraction(settings) * len(parts) + 0.5) if choice is None else choice
        if wanted > len(parts):
            raise InputError(
                f"drop-layers: {name}: cannot keep {wanted} parts, because there are only"
                f" {len(parts)}. Lower the number.",
                code="more-than-model-has",
                setting=name,
            )
        if choice is not None and wanted < kinds:
            raise InputError(
                f"drop-layers: {name}: {wanted} is too few; one part of each kind must be kept, so at"
                f" least {kinds}.",
                code="too-few-kept",
                setting=name,
            )
        numbers[name] = max(kinds, wanted)
        if numbers[name] == len(parts) and choice is None and kept_fraction(settings) < 1:
            ctx.warn(
                "nothing-to-remove",
                f"keep_ratio {kept_fraction(settings):g} of the {len(parts)} {' and '.join(settings.parts)}"
                " of"
                f" {name}, rounded to at least one of each kind, keeps all of them; none is removed. Lower"
                " keep_ratio.",
            )
    left = {(part.stack, part.kind) for parts in stacks.values() for part in parts if part not in removed}
    for name, parts in stacks.items():
        for kind in {part.kind for part in parts}:
            if (name, kind) not in left:
                raise InputError(
                    f"drop-layers: {name}: {getattr(settings, name)} keeps no {kind}; keep at least one.",
                    code="no-part-left",
                    setting=name,
                )
    return removed, numbers


def _select_parts(
    asked: _PartRequest, src: Artifact, settings: DropLayersSettings, ctx: Context
) -> list[LayerPart]:
    """Return the parts to remove in addition to those given by index."""
    model, stacks, numbers, num_present = asked.model, asked.stacks, asked.num_kept, asked.num_present
    if numbers == num_present:
        return []
    if settings.importance == "loss":
        return _select_by_loss(asked, src, settings, ctx)
    if settings.importance == "random":
        draw = random.Random(ctx.seed)
        scores = {name: [draw.random() for _ in stacks[name]] for name in numbers}
    else:
        rows = load_calibration_samples(model, src, settings.calibration_samples, ctx, "drop-layers")
        with model_on_device(model, ctx) as device, without_parts(model, asked.parts, asked.named):
            found = part_influence(
                model, asked.parts, batches_on_device_one_by_one(rows.batches, device, ctx)
            )
        scores = {name: [found[part] for part in stacks[name]] for name in numbers}
        ctx.details["part_influence"] = {
            name: {part.name: round(found[part], 6) for part in stacks[name]} for name in numbers
        }
    gone: list[UnitId] = []
    for name, count in numbers.items():
        for at in sorted(range(num_present[name]), key=lambda at: scores[name][at]):
            if num_present[name] - sum(stack == name for stack, _ in gone) > count and not asked.is_last(
                (name, at), gone
            ):
                gone.append((name, at))
    return [stacks[name][at] for name, at in gone]


def _select_by_loss(
    asked: _PartRequest, src: Artifact, settings: DropLayersSettings, ctx: Context
) -> list[LayerPart]:
    """Remove one by one the part with the smallest loss without it; all stacks compete.

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
    model, stacks = asked.model, asked.stacks
    batches = load_calibration_samples(
        model, src, settings.calibration_samples, ctx, "drop-layers", labels=True, padded=True
    ).batches

    def without(gone: Collection[UnitId]) -> AbstractContextManager[None]:
        return without_parts(model, asked.parts, {*asked.named, *(stacks[name][at] for name, at in gone)})

    def place(part: UnitId) -> UnitId:
        return part[0], stacks[part[0]][part[1]].block.index

    most = max_trials(asked.num_kept, asked.num_present)
    with ablation_losses(model, batches, without, ctx, most, place) as loss_without:
        ctx.details["loss_before"] = round(loss_without(frozenset()), 6)
        gone, losses = drop_units_by_loss(asked.num_kept, asked.num_present, (), loss_without, asked.is_last)
    dropped = [stacks[name][at] for name, at in gone]
    ctx.details["dropped"] = [
        {"stack": part.stack, "layer": part.block.index, "part": part.kind, "loss": round(loss, 6)}
        for part, loss in zip(dropped, losses, strict=True)
    ]
    return dropped
