"""How much each layer hurts when it alone is quantized, and which ones stay float for it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from smelt.compress.calibration.retried import Retried
from smelt.compress.calibration.rows import CalibrationRows, outputs
from smelt.compress.quantize.planned import Planned, quantized
from smelt.compress.quantize.sensitivity.settings import MaxExcluded
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.families.walk import blocks_of
from smelt.runtime.models.structure import replace_layer

Unit = TypeVar("Unit")  # what is changed at once

# of all layers, where nothing is said
_SHARE = 0.1


def damages(
    model: Any, layers: Sequence[Planned], ranges: Mapping[int, float], rows: CalibrationRows, ctx: Context
) -> dict[str, float]:
    """Quantize one product at a time and return what that does to the model's outputs, the worst first.

    It is the mean squared change of all outputs (logits, vectors) in parts of their variance: 0.01 is noise
    of a tenth of their spread.

    Args:
        model: left as it was.
        layers: of it; those that only look rows up are left out.
        ranges: as `quantize_layers` takes them.
        rows: what the model reads.
        ctx: its `progress` is told.

    Raises:
        InputError: its outputs are not finite.
    """
    whole = [out.clone() for out in outputs(model, rows.batches)]
    spread = spread_of(whole, rows)
    products = [layer for layer in layers if layer.product]
    found = dict.fromkeys((layer.name for layer in products), 0.0)
    each = from_their_blocks(model, products, lambda layer: [layer], rows, whole, ctx)
    for done, (layer, off_by) in enumerate(each, start=1):
        new = quantized(layer, ranges)
        replace_layer(model, [], layer.name, new, {})
        try:
            off = off_by()
        finally:
            replace_layer(model, [], layer.name, layer.module, {})
        found[layer.name] = off / sum(right.numel() for right in whole) / spread
        ctx.progress(done, len(products), "damage of each layer")
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def from_their_blocks(
    model: Any,
    units: Sequence[Unit],
    layers_of: Callable[[Unit], Sequence[Planned]],
    rows: CalibrationRows,
    whole: Sequence[Tensor],
    ctx: Context,
) -> Iterator[tuple[Unit, Callable[[], float]]]:
    """Yield each of `units`, with what says how far off the outputs are while something in it is changed.

    The model goes on from the unit's block, since nothing before it changes (see `Retried`).

    Args:
        model: as it is, whenever the next unit is asked for.
        units: come in the order of their blocks; those that lie in none, or in several, first.
        layers_of: the layers of a unit.
        rows: what the model reads.
        whole: its outputs on each batch as it is.
        ctx: a temporary folder beside `ctx.out` where memory is short.

    Returns:
        The unit, and what gives the sum of the squared changes of all outputs.
    """
    blocks = blocks_of(model)

    def block_of(unit: Unit) -> int:
        inside = [
            next((at for at, b in enumerate(blocks) if layer.name.startswith(f"{b.place}.")), -1)
            for layer in layers_of(unit)
        ]
        return inside[0] if len(set(inside)) == 1 else -1

    with tempfile.TemporaryDirectory(dir=ctx.out.parent) as space:
        retried = Retried(model, rows.batches, Path(space))

        def off_by() -> float:
            pairs = zip(retried.outputs(), whole, strict=True)
            return sum((float((out - right).square().sum(dtype=torch.float64)) for out, right in pairs), 0.0)

        for unit in sorted(units, key=block_of):
            block = block_of(unit)
            if block >= 0:
                retried.start_at(blocks[block].stack.name, blocks[block].number)
            yield unit, off_by


def spread_of(parts: Sequence[Tensor], rows: CalibrationRows) -> float:
    """Return the variance of the outputs `parts` on `rows`, in parts of which damage is told.

    Raises:
        InputError: they are not finite.
    """
    found = variance_of(parts)
    if not math.isfinite(found):
        raise InputError(
            f"quantize: on rows of {rows.origin} the model's outputs are not finite, so that no layer's"
            " damage can be told. The training before it has probably gone astray.",
            code="non-finite-outputs",
        )
    return found


def variance_of(parts: Sequence[Tensor]) -> float:
    """Return the variance of all numbers of `parts`; 1 where they are all the same."""
    count = sum(part.numel() for part in parts)
    mean = sum(float(part.sum(dtype=torch.float64)) for part in parts) / count
    return sum(float((part.double() - mean).square().sum()) for part in parts) / count or 1.0


def sensitive(damage: Mapping[str, float], budget: MaxExcluded) -> list[str]:
    """Return the layers that stay float: the worst ones, as many as `budget` lets.

    Args:
        damage: by layer, the worst first.
        budget: how many at most; and the share of all damage that the others may do together.
    """
    most = budget.layers
    if most is None:
        most = len(damage) if budget.sensitivity is not None else math.ceil(_SHARE * len(damage))
    left, whole = sum(damage.values()), sum(damage.values())
    found: list[str] = []
    for name, value in damage.items():
        if len(found) >= most or left <= (budget.sensitivity or 0.0) * whole:
            break
        found.append(name)
        left -= value
    return found
