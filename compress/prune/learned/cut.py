"""What masks close goes: units are cut from their products, parts are taken out of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from smelt.compress.prune.compensate import cut_units
from smelt.compress.prune.cut import say_in_config
from smelt.compress.prune.learned.masked import Masked
from smelt.core.stage import Context
from smelt.runtime.models.edits.skip import skip
from smelt.runtime.models.structure import Edit


def cut_masked(
    model: Any,
    edits: list[Edit],
    found: Sequence[Masked],
    kept: Sequence[Tensor],
    stay: Sequence[bool],
    ctx: Context,
) -> dict[str, Any]:
    """Cut `model` in place, and append the edits.

    Args:
        model: float32, its masks in the weights.
        edits: its structure.
        found: what had masks.
        kept: the units of each that stay, int64, rising.
        stay: whether it stays itself.
        ctx: device, threads, progress.

    Returns:
        Facts: how many units each part has that stays, and by stack which parts went (where parts had masks).
    """
    for masked, there in zip(found, stay, strict=True):
        for place in masked.places if not there else ():
            edits.append(skip(model, place.block.place, place.number))
    left = [(m, m.units, k) for m, k, there in zip(found, kept, stay, strict=True) if m.units and there]
    chosen = [(units, partial(_same, k)) for m, units, k in left if len(k) < m.count]
    cut_units(model, edits, chosen, None, ctx)
    edits[:] = say_in_config(model, edits)
    details: dict[str, Any] = {"units": {units.name: units.count(model) for _, units, _ in left}}
    gone: dict[str, list[str]] = {place.stack: [] for masked in found for place in masked.places}
    for masked, there in zip(found, stay, strict=True):
        for place in masked.places if not there else ():
            gone[place.stack].append(place.name)
    return details | ({"dropped_parts": gone} if gone else {})


def _same(stay: Tensor) -> Tensor:
    return stay
