"""Removal of masked units from their linear layers, and of masked parts from their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from smelt.compress.prune.cut import update_config
from smelt.compress.prune.learned.masked_parts import MaskedPart
from smelt.compress.prune.reconstruct import cut_units
from smelt.core.stage import Context
from smelt.runtime.models.edits.skip_sublayer import skip_sublayer
from smelt.runtime.models.structure import Edit


def cut_masked(
    model: Any,
    edits: list[Edit],
    masked_parts: Sequence[MaskedPart],
    kept_units: Sequence[Tensor],
    kept_parts: Sequence[bool],
    ctx: Context,
) -> dict[str, Any]:
    """Remove masked units and parts of `model` in place, and append the edits.

    Args:
        model: float32, with the masks folded into the weights.
        edits: the edits of the model.
        masked_parts: the parts with masks.
        kept_units: the kept units of each part, int64, ascending.
        kept_parts: whether each part is kept.
        ctx: device, threads, progress.

    Returns:
        Details: the number of units of each kept part, and the removed parts by stack (if parts had masks).
    """
    for masked, there in zip(masked_parts, kept_parts, strict=True):
        for place in masked.positions if not there else ():
            edits.append(skip_sublayer(model, place.block.module_path, place.index))
    left = [
        (m, m.units, k)
        for m, k, there in zip(masked_parts, kept_units, kept_parts, strict=True)
        if m.units and there
    ]
    chosen = [(units, partial(_all_if_empty, k)) for m, units, k in left if len(k) < m.count]
    cut_units(model, edits, chosen, None, ctx)
    edits[:] = update_config(model, edits)
    details: dict[str, Any] = {"units": {units.name: units.count(model) for _, units, _ in left}}
    gone: dict[str, list[str]] = {place.stack: [] for masked in masked_parts for place in masked.positions}
    for masked, there in zip(masked_parts, kept_parts, strict=True):
        for place in masked.positions if not there else ():
            gone[place.stack].append(place.name)
    return details | ({"dropped_parts": gone} if gone else {})


def _all_if_empty(kept: Tensor) -> Tensor:
    return kept
