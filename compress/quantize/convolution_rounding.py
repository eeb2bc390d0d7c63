"""Rounding of activations between quantized convolutions.

A quantized convolution rounds its inputs. So that a runtime can pass integers from one to the next, residual
sums and inputs of max pools are rounded too (`smelt/quantization/matrix.py`). Batch norms are folded
before, because the folded kernels are quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn

from smelt.calibration.samples import CalibrationSamples
from smelt.compress.quantize.plan_layers import PlannedLayer
from smelt.compress.quantize.ranges import ObservedRange, observe_ranges
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.stage import Context
from smelt.models.families.registry import family_of
from smelt.models.layers import conv_end_names
from smelt.models.structure import Edit, replace_module
from smelt.quantization.matrix import QuantizedActivation


@dataclass(frozen=True)
class RoundingPoint:
    """A point where activations are rounded: before the module `name`.

    convolution: the convolution that must be quantized for the rounding to be useful. range_source: the
    convolution with the same inputs, whose range is used; None if the point has its own range.
    """

    name: str
    convolution: str
    range_source: str | None = None


def rounding_points(model: Any) -> list[RoundingPoint]:
    """Return the rounding points of a convolutional network with folded batch norms."""
    family = family_of(model)
    if family is None or family.conv_and_norm is None or family.conv_chain is None:
        return []
    convolution, norm = family.conv_and_norm
    found: list[RoundingPoint] = []
    for name, module in model.named_modules():
        owner, _, last = name.rpartition(".")
        if last != family.conv_chain:
            continue
        links = [f"{name}.{number}" for number, _ in module.named_children()]
        first, _ = conv_end_names(model, f"{links[0]}.{convolution}")
        _, end = conv_end_names(model, f"{links[-1]}.{convolution}")
        shortcut = f"{owner}.{family.conv_shortcut}"
        if isinstance(model.get_submodule(shortcut), nn.Identity):
            found.append(RoundingPoint(shortcut, first, range_source=first))
        else:
            found.append(
                RoundingPoint(f"{shortcut}.{norm}", conv_end_names(model, f"{shortcut}.{convolution}")[1])
            )
        found.append(RoundingPoint(f"{links[-1]}.{norm}", end))
    return found + list(_max_pools(model))


def _max_pools(model: Any) -> list[RoundingPoint]:
    """Return the max pools between two convolutions, whose outputs are values of their inputs."""
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.MaxPool2d | nn.Conv2d)]
    return [
        RoundingPoint(name, reader, reader)
        for (name, module), (reader, after) in pairwise(modules)
        if isinstance(module, nn.MaxPool2d) and isinstance(after, nn.Conv2d)
    ]


def calibrate_convolutions(
    model: Any,
    layers: Sequence[PlannedLayer],
    ranges: Mapping[int, float],
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    ctx: Context,
) -> tuple[list[PlannedLayer], dict[int, float], dict[str, ObservedRange]]:
    """Calibrate the input ranges of convolutions and rounding points.

    Returns:
        The layers, unsigned if no input is negative; `ranges` with those of the layers; and the observed
        ranges of the rounding points by name.
    """
    convolutions = {layer.name: layer for layer in layers if isinstance(layer.module, nn.Conv2d)}
    if not convolutions:
        return list(layers), dict(ranges), {}
    places = [place for place in rounding_points(model) if place.convolution in convolutions]
    own = {p.name: [model.get_submodule(p.name)] for p in places if p.range_source not in convolutions}
    read = {name: [layer.module] for name, layer in convolutions.items()}
    seen = observe_ranges(model, read | own, {name: name for name in read | own}, samples, settings, ctx)
    signed = {name: found.signed for name, found in seen.items()}
    new = [replace(layer, signed=signed.get(layer.name, True)) for layer in layers]
    found = {convolutions[name].weight_id: seen[name].largest for name in read if name in seen}
    between = {p.name: seen[p.range_source if p.range_source in convolutions else p.name] for p in places}
    return new, dict(ranges) | found, between


def insert_rounding(model: Any, ranges: Mapping[str, ObservedRange]) -> list[Edit]:
    """Insert rounding before the modules in `ranges`; return the edits."""
    edits: list[Edit] = []
    for name, found in ranges.items():
        new = QuantizedActivation(model.get_submodule(name), found.signed)
        new.set_activation_range_(found.largest)
        replace_module(model, name, new.eval())
        edits.append({"op": "round", "module": name, "signed": found.signed})
    return edits
