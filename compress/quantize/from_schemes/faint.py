"""Weights so small that scales, which are kept as float16, say little of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from smelt.compress.quantize.planned import Planned
from smelt.runtime.schemes.registry import SCHEMES

if TYPE_CHECKING:
    from torch import Tensor

# The share of a row that rounding its scales to float16 may cost, beside what its codes cost anyway.
_LOST = 0.02
# Weights of less are looked at: float16 ends at 2^-24, and steps of 8 bits are a 255th of the largest.
_SMALL = 1e-3


def faint(layers: Collection[Planned]) -> dict[str, Tensor]:
    """Return of each layer whose weights are all small the row with the largest, float32 [1, K], by name."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        weight = layer.module.weight.detach()
        largest = float(weight.abs().max()) if weight.numel() else 0.0
        if 0 < largest < _SMALL:
            row = int(weight.abs().amax(dim=1).argmax())
            found[layer.name] = weight[row : row + 1].float().clone()
    return found


def faint_warnings(layers: Collection[Planned], rows: Mapping[str, Tensor]) -> list[str]:
    """Return a warning for each matrix whose scales are float16 and have too few digits there, or none.

    rows: what `faint` found before any method worked: methods move weights to what their codes stand for.
    """
    said: dict[int, list[str]] = {}
    largest: dict[int, float] = {}
    for layer in layers:
        if layer.name in rows and _loses_digits(layer, rows[layer.name]):
            said.setdefault(layer.weight, []).append(layer.name)
            largest[layer.weight] = float(rows[layer.name].abs().max())
    return [
        f"quantize: {', '.join(names)}: the largest weight is {largest[weight]:g}, and scales are float16,"
        " which hold few digits of such small steps, or none: the codes may be far off, or all zero."
        f" Leave it float: skip: {json.dumps(names)}"
        for weight, names in said.items()
    ]


def _loses_digits(layer: Planned, row: Tensor) -> bool:
    """Say whether nearest codes of a row miss more of it than those of the same row made larger do."""
    stored = SCHEMES[layer.scheme].storage(1, row.shape[1], layer.options).get("scales")
    if stored is None or stored.filed != "float16":
        return False
    return _missed(layer, row) - _missed(layer, row / row.abs().max()) > _LOST


def _missed(layer: Planned, row: Tensor) -> float:
    """Return how far nearest codes are from `row`, as a share of its norm."""
    from smelt.compress.quantize.coding import round_to_nearest

    scheme = SCHEMES[layer.scheme]
    codes, grid = round_to_nearest(row, scheme, layer.options)
    values = scheme.values(codes, grid, layer.options).flatten(1)[:, : row.shape[1]]
    return float((values - row).double().norm() / row.double().norm())  # squares of 1e-25 are no float32
