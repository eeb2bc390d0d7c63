"""Warnings about weights so small that their float16 scales underflow or lose precision."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from smelt.compress.quantize.plan_layers import PlannedLayer
from smelt.core.messages import Message, warning
from smelt.runtime.schemes.registry import SCHEMES

if TYPE_CHECKING:
    from torch import Tensor

# Maximum relative error of a matrix that rounding its scales to float16 may add.
_MAX_EXTRA_ERROR = 0.02
# Smaller weights are checked: float16 ends at 2^-24, and 8-bit steps are 1/255 of the largest weight.
_SMALL_MAGNITUDE = 1e-3


def small_weights(layers: Collection[PlannedLayer]) -> dict[str, Tensor]:
    """Return copies of the weights of layers whose weights are all small, float32 [N, K], by name."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        weight = layer.module.weight.detach()
        # without abs(), which would copy a large embedding
        largest = max(map(abs, map(float, weight.aminmax()))) if weight.numel() else 0.0
        if 0 < largest < _SMALL_MAGNITUDE:
            found[layer.name] = weight.float().clone()
    return found


def scale_underflow_warnings(
    layers: Collection[PlannedLayer], weights: Mapping[str, Tensor]
) -> list[Message]:
    """Return a warning for each matrix whose scales lose too much precision in float16.

    weights: the result of `small_weights` before any method changed the weights to their quantized values.
    """
    said: dict[int, list[str]] = {}
    largest: dict[int, float] = {}
    for layer in layers:
        if layer.name in weights and _loses_digits(layer, weights[layer.name]):
            said.setdefault(layer.weight_id, []).append(layer.name)
            largest[layer.weight_id] = float(weights[layer.name].abs().max())
    return [
        warning(
            "scale-underflow",
            f"{', '.join(names)}: the largest weight is only {largest[weight]:g}, so float16 scales"
            " lose precision or underflow to 0, and the quantized weights may be inaccurate. Keep"
            f" the layer in float with exclude: {json.dumps(names)}.",
        )
        for weight, names in said.items()
    ]


def _loses_digits(layer: PlannedLayer, weight: Tensor) -> bool:
    """Return whether rounding a matrix loses more than rounding the same matrix scaled up."""
    rows, width = weight.shape
    stored = SCHEMES[layer.scheme].stored_tensors(rows, width, layer.options).get("scales")
    if stored is None or stored.file_dtype != "float16":
        return False
    return (
        _relative_error(layer, weight) - _relative_error(layer, weight / weight.abs().max())
        > _MAX_EXTRA_ERROR
    )


def _relative_error(layer: PlannedLayer, weight: Tensor) -> float:
    """Return the rounding error of `weight` relative to its norm."""
    from smelt.compress.quantize.weight_quantizer import round_to_nearest

    scheme = SCHEMES[layer.scheme]
    codes, grid = round_to_nearest(weight, scheme, layer.options)
    values = scheme.dequantize(codes, grid, layer.options).flatten(1)[:, : weight.shape[1]]
    # squares of 1e-25 underflow in float32
    return float((values - weight).double().norm() / weight.double().norm())
