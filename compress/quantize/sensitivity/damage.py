"""How much each layer hurts when it alone is quantized, and which ones stay float for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smelt.compress.calibration.rows import CalibrationRows, outputs
from smelt.compress.quantize.planned import Planned, quantized
from smelt.compress.quantize.sensitivity.settings import Budget
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.models.structure import replace_layer

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
    found = {}
    for done, layer in enumerate(products, start=1):
        new = quantized(layer, ranges)
        replace_layer(model, [], layer.name, new, {})
        try:
            off = sum(
                float((out - right).square().sum(dtype=torch.float64))
                for out, right in zip(outputs(model, rows.batches), whole, strict=True)
            )
        finally:
            replace_layer(model, [], layer.name, layer.module, {})
        found[layer.name] = off / sum(right.numel() for right in whole) / spread
        ctx.progress(done, len(products), "damage of each layer")
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def spread_of(parts: Sequence[Tensor], rows: CalibrationRows) -> float:
    """Return the variance of the outputs `parts` on `rows`, in parts of which damage is told.

    Raises:
        InputError: they are not finite.
    """
    found = variance_of(parts)
    if not math.isfinite(found):
        raise InputError(
            f"quantize: on rows of {rows.origin} the model's outputs are not finite, so that no layer's"
            " damage can be told. The training before it has probably gone astray."
        )
    return found


def variance_of(parts: Sequence[Tensor]) -> float:
    """Return the variance of all numbers of `parts`; 1 where they are all the same."""
    count = sum(part.numel() for part in parts)
    mean = sum(float(part.sum(dtype=torch.float64)) for part in parts) / count
    return sum(float((part.double() - mean).square().sum()) for part in parts) / count or 1.0


def sensitive(damage: Mapping[str, float], budget: Budget) -> list[str]:
    """Return the layers that stay float: the worst ones, as many as `budget` lets.

    Args:
        damage: by layer, the worst first.
        budget: how many at most; and the share of all damage that the others may do together.
    """
    most = budget.layers
    if most is None:
        most = len(damage) if budget.damage is not None else math.ceil(_SHARE * len(damage))
    left, whole = sum(damage.values()), sum(damage.values())
    found: list[str] = []
    for name, value in damage.items():
        if len(found) >= most or left <= (budget.damage or 0.0) * whole:
            break
        found.append(name)
        left -= value
    return found
