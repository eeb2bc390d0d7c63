"""Weights so small that scales, which are kept as float16, say little of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from smelt.compress.quantize.planned import Planned
from smelt.core.messages import Message, warning
from smelt.runtime.schemes.registry import SCHEMES

if TYPE_CHECKING:
    from torch import Tensor

# The share of a matrix that rounding its scales to float16 may cost, beside what its codes cost anyway.
_LOST = 0.02
# Weights of less are looked at: float16 ends at 2^-24, and steps of 8 bits are a 255th of the largest.
_SMALL = 1e-3


def faint(layers: Collection[Planned]) -> dict[str, Tensor]:
    """Return copies of the weights of layers that have none but small ones, float32 [N, K], by name."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        weight = layer.module.weight.detach()
        # without a copy, which of an embedding may be large
        largest = max(map(abs, map(float, weight.aminmax()))) if weight.numel() else 0.0
        if 0 < largest < _SMALL:
            found[layer.name] = weight.float().clone()
    return found


def faint_warnings(layers: Collection[Planned], weights: Mapping[str, Tensor]) -> list[Message]:
    """Return a warning for each matrix whose scales are float16 and have too few digits there, or none.

    weights: what `faint` found before any method worked: methods move weights to what their codes stand for.
    """
    said: dict[int, list[str]] = {}
    largest: dict[int, float] = {}
    for layer in layers:
        if layer.name in weights and _loses_digits(layer, weights[layer.name]):
            said.setdefault(layer.weight, []).append(layer.name)
            largest[layer.weight] = float(weights[layer.name].abs().max())
    return [
        warning(
            "scale-underflow",
            f"{', '.join(names)}: the largest weight is {largest[weight]:g}, and float16 scales hold such"
            " small steps with few digits or as 0: the quantized weights may be far off. Keep it float with"
            f" exclude: {json.dumps(names)}.",
        )
        for weight, names in said.items()
    ]


def _loses_digits(layer: Planned, weight: Tensor) -> bool:
    """Say whether nearest codes of a matrix miss more of it than those of the same made larger do."""
    rows, width = weight.shape
    stored = SCHEMES[layer.scheme].storage(rows, width, layer.options).get("scales")
    if stored is None or stored.filed != "float16":
        return False
    return _missed(layer, weight) - _missed(layer, weight / weight.abs().max()) > _LOST


def _missed(layer: Planned, weight: Tensor) -> float:
    """Return how far nearest codes are from `weight`, as a share of its norm."""
    from smelt.compress.quantize.coding import round_to_nearest

    scheme = SCHEMES[layer.scheme]
    codes, grid = round_to_nearest(weight, scheme, layer.options)
    values = scheme.values(codes, grid, layer.options).flatten(1)[:, : weight.shape[1]]
    # squares of 1e-25 are no float32
    return float((values - weight).double().norm() / weight.double().norm())
