"""Which attentions and feed-forward parts of layers go, and taking them out."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from smelt.compress.calibration.rows import calibration_rows
from smelt.compress.depth.choose import moved
from smelt.compress.depth.fit import check_parts, fraction_kept
from smelt.compress.depth.influence import Layer, drop_by_loss
from smelt.compress.depth.losses import losses_of, most_tries, on_device
from smelt.compress.depth.parts import Part, part_influence, parts_of, without_parts
from smelt.compress.depth.settings import DropLayersSettings
from smelt.compress.train.run import scores_lacking
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.models.edits.skip import skip
from smelt.runtime.models.structure import Edit


@dataclass(frozen=True)
class _Asked:
    """Of a model's parts, those of the stacks that are asked for, which are told to go, and how many stay.

    numbers: of the stacks of which nothing was told by number.
    """

    model: Any
    parts: list[Part]
    stacks: Mapping[str, list[Part]]
    told: list[Part]
    numbers: dict[str, int]

    @property
    def there(self) -> dict[str, int]:
        """How many there are where some may go."""
        return {name: len(self.stacks[name]) for name in self.numbers}

    def is_last(self, unit: Layer, gone: Collection[Layer]) -> bool:
        """Say whether the part is the last of its kind in its stack."""
        stack = self.stacks[unit[0]]
        same = [at for at, other in enumerate(stack) if other.kind == stack[unit[1]].kind]
        return all((unit[0], at) in gone for at in same if at != unit[1])


def drop_parts(
    model: Any, edits: list[Edit], src: Artifact, settings: DropLayersSettings, ctx: Context
) -> None:
    """Take out of `model`, in place, the parts that do least; append the edits, tell the details.

    Of each kind one stays in each stack.

    Raises:
        InputError: parts that the model has not, or settings that leave none of a kind.
    """
    if mistakes := check_parts(settings, model.config.to_dict()):
        raise InputError(
            "drop-layers: " + " ".join(f"{one.setting}: {one.message}" for one in mistakes),
            code=mistakes[0].code,
            found=mistakes,
        )
    parts = parts_of(model)
    stacks: dict[str, list[Part]] = {}
    for part in parts:
        if part.kind in settings.parts:
            stacks.setdefault(part.stack, []).append(part)
    asked = _Asked(model, parts, stacks, *_numbers(settings, stacks, ctx))
    gone = {*asked.told, *_chosen(asked, src, settings, ctx)}
    for part in (part for part in parts if part in gone):
        edits.append(skip(model, part.block.place, part.number))
    ctx.details["dropped_parts"] = {
        name: [part.name for part in there if part in gone] for name, there in stacks.items()
    }


def _numbers(
    settings: DropLayersSettings, stacks: Mapping[str, list[Part]], ctx: Context
) -> tuple[list[Part], dict[str, int]]:
    """Return the parts that were told to go, and of the other stacks how many stay."""
    told: list[Part] = []
    numbers: dict[str, int] = {}
    for name, there in stacks.items():
        said = getattr(settings, name)
        kinds = len({part.kind for part in there})
        if isinstance(said, list):
            told += [part for part in there if part.block.number not in said]
            continue
        wanted = math.floor(fraction_kept(settings) * len(there) + 0.5) if said is None else said
        if wanted > len(there):
            raise InputError(
                f"drop-layers: {name}: {wanted} parts cannot stay of {len(there)}.",
                code="more-than-model-has",
                setting=name,
            )
        if said is not None and wanted < kinds:
            raise InputError(
                f"drop-layers: {name}: {wanted}: one of each kind stays, which makes {kinds}.",
                code="too-few-kept",
                setting=name,
            )
        numbers[name] = max(kinds, wanted)
        if numbers[name] == len(there) and said is None and fraction_kept(settings) < 1:
            ctx.warn(
                "nothing-to-remove",
                f"keep {fraction_kept(settings):g} of the {len(there)} {' and '.join(settings.parts)} of"
                f" {name}, rounded to at least one of each kind, keeps all of them; none is removed. Lower"
                " keep.",
            )
    left = {(part.stack, part.kind) for there in stacks.values() for part in there if part not in told}
    for name, there in stacks.items():
        for kind in {part.kind for part in there}:
            if (name, kind) not in left:
                raise InputError(
                    f"drop-layers: {name}: {getattr(settings, name)} leaves no {kind}; one stays.",
                    code="no-part-left",
                    setting=name,
                )
    return told, numbers


def _chosen(asked: _Asked, src: Artifact, settings: DropLayersSettings, ctx: Context) -> list[Part]:
    """Return the parts that go besides those that were told to."""
    model, stacks, numbers, there = asked.model, asked.stacks, asked.numbers, asked.there
    if numbers == there:
        return []
    if settings.importance == "loss":
        return _by_loss(asked, src, settings, ctx)
    if settings.importance == "random":
        draw = random.Random(ctx.seed)
        scores = {name: [draw.random() for _ in stacks[name]] for name in numbers}
    else:
        rows = calibration_rows(model, src, settings.calibration_samples, ctx, "drop-layers")
        with on_device(model, ctx) as device, without_parts(model, asked.parts, asked.told):
            found = part_influence(model, asked.parts, moved(rows.batches, device, ctx))
        scores = {name: [found[part] for part in stacks[name]] for name in numbers}
        ctx.details["part_influence"] = {
            name: {part.name: round(found[part], 6) for part in stacks[name]} for name in numbers
        }
    gone: list[Layer] = []
    for name, count in numbers.items():
        for at in sorted(range(there[name]), key=lambda at: scores[name][at]):
            if there[name] - sum(stack == name for stack, _ in gone) > count and not asked.is_last(
                (name, at), gone
            ):
                gone.append((name, at))
    return [stacks[name][at] for name, at in gone]


def _by_loss(asked: _Asked, src: Artifact, settings: DropLayersSettings, ctx: Context) -> list[Part]:
    """Drop one after another the part without which the loss is smallest; all stacks are tried together.

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
    model, stacks = asked.model, asked.stacks
    batches = calibration_rows(
        model, src, settings.calibration_samples, ctx, "drop-layers", labels=True, padded=True
    ).batches

    def without(gone: Collection[Layer]) -> AbstractContextManager[None]:
        return without_parts(model, asked.parts, {*asked.told, *(stacks[name][at] for name, at in gone)})

    def place(part: Layer) -> Layer:
        return part[0], stacks[part[0]][part[1]].block.number

    most = most_tries(asked.numbers, asked.there)
    with losses_of(model, batches, without, ctx, most, place) as loss_without:
        ctx.details["loss_before"] = round(loss_without(frozenset()), 6)
        gone, losses = drop_by_loss(asked.numbers, asked.there, (), loss_without, asked.is_last)
    dropped = [stacks[name][at] for name, at in gone]
    ctx.details["dropped"] = [
        {"stack": part.stack, "layer": part.block.number, "part": part.kind, "loss": round(loss, 6)}
        for part, loss in zip(dropped, losses, strict=True)
    ]
    return dropped
