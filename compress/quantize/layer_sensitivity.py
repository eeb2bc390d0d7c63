"""Sensitivity of the model's outputs to the quantization of single layers, and selection by it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from smelt.calibration.samples import CalibrationSamples, model_outputs
from smelt.calibration.sequential import PrefixCachedModel
from smelt.compress.quantize.plan_layers import PlannedLayer, quantize_planned
from smelt.compress.quantize.settings import MaxExcluded
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.models.families.model_blocks import blocks_of
from smelt.models.structure import replace_layer

UnitT = TypeVar("UnitT")  # a unit that is changed as a whole

# default of max_excluded.layers, as a fraction of all layers
_DEFAULT_EXCLUDED_SHARE = 0.1


def measure_layer_sensitivities(
    model: Any,
    layers: Sequence[PlannedLayer],
    ranges: Mapping[int, float],
    samples: CalibrationSamples,
    ctx: Context,
) -> dict[str, float]:
    """Return the sensitivity of each linear layer when it alone is quantized, the most sensitive first.

    The sensitivity is the mean squared change of all outputs (logits, vectors) relative to their variance:
    0.01 is noise of a tenth of their standard deviation.

    Args:
        model: not changed.
        layers: its planned layers; embeddings are left out.
        ranges: activation ranges, as in `quantize_layers`.
        samples: calibration samples.
        ctx: reports progress.

    Raises:
        InputError: the model's outputs are not finite.
    """
    whole = [out.clone() for out in model_outputs(model, samples.batches)]
    spread = output_variance(whole, samples)
    products = [layer for layer in layers if layer.multiplies]
    found = dict.fromkeys((layer.name for layer in products), 0.0)
    each = output_changes(model, products, lambda layer: [layer], samples, whole, ctx)
    for done, (layer, off_by) in enumerate(each, start=1):
        new = quantize_planned(layer, ranges)
        replace_layer(model, [], layer.name, new, {})
        try:
            off = off_by()
        finally:
            replace_layer(model, [], layer.name, layer.module, {})
        found[layer.name] = off / sum(right.numel() for right in whole) / spread
        ctx.progress(done, len(products), "sensitivity of each layer")
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def output_changes(
    model: Any,
    units: Sequence[UnitT],
    layers_of: Callable[[UnitT], Sequence[PlannedLayer]],
    samples: CalibrationSamples,
    reference_outputs: Sequence[Tensor],
    ctx: Context,
) -> Iterator[tuple[UnitT, Callable[[], float]]]:
    """Yield each of `units` with a function that measures the output error while the unit is changed.

    The model runs from the unit's block on, since nothing before it changes (see `PrefixCachedModel`).

    Args:
        model: unchanged whenever the next unit is requested.
        units: yielded in the order of their blocks; units in no block, or in several, first.
        layers_of: returns the layers of a unit.
        samples: calibration samples.
        reference_outputs: outputs of the unchanged model on each batch.
        ctx: for a temporary folder next to `ctx.out` if memory is short.

    Yields:
        The unit, and a function that returns the sum of the squared changes of all outputs.
    """
    blocks = blocks_of(model)

    def block_of(unit: UnitT) -> int:
        inside = [
            next((at for at, b in enumerate(blocks) if layer.name.startswith(f"{b.module_path}.")), -1)
            for layer in layers_of(unit)
        ]
        return inside[0] if len(set(inside)) == 1 else -1

    with tempfile.TemporaryDirectory(dir=ctx.out.parent) as space:
        retried = PrefixCachedModel(model, samples.batches, Path(space))

        def off_by() -> float:
            pairs = zip(retried.outputs(), reference_outputs, strict=True)
            return sum((float((out - right).square().sum(dtype=torch.float64)) for out, right in pairs), 0.0)

        for unit in sorted(units, key=block_of):
            block = block_of(unit)
            if block >= 0:
                retried.start_at(blocks[block].stack.name, blocks[block].index)
            yield unit, off_by


def output_variance(outputs: Sequence[Tensor], samples: CalibrationSamples) -> float:
    """Return the variance of `outputs` on `samples`, the unit of sensitivities.

    Raises:
        InputError: outputs are not finite.
    """
    found = variance(outputs)
    if not math.isfinite(found):
        raise InputError(
            f"quantize: the model's outputs on samples of {samples.origin} are not finite, so"
            " sensitivities cannot be measured. The training before this step has probably"
            " diverged; lower its learning_rate.",
            code="non-finite-outputs",
        )
    return found


def variance(parts: Sequence[Tensor]) -> float:
    """Return the variance of all values of `parts`; 1 if they are all equal."""
    count = sum(part.numel() for part in parts)
    mean = sum(float(part.sum(dtype=torch.float64)) for part in parts) / count
    return sum(float((part.double() - mean).square().sum()) for part in parts) / count or 1.0


def select_sensitive(sensitivities: Mapping[str, float], max_excluded: MaxExcluded) -> list[str]:
    """Return the layers to keep in float: the most sensitive ones, within `max_excluded`.

    Args:
        sensitivities: by layer, the most sensitive first.
        max_excluded: the maximum number, and the share of the total sensitivity allowed for the others.
    """
    most = max_excluded.layers
    if most is None:
        most = (
            len(sensitivities)
            if max_excluded.sensitivity is not None
            else math.ceil(_DEFAULT_EXCLUDED_SHARE * len(sensitivities))
        )
    left, whole = sum(sensitivities.values()), sum(sensitivities.values())
    found: list[str] = []
    for name, value in sensitivities.items():
        if len(found) >= most or left <= (max_excluded.sensitivity or 0.0) * whole:
            break
        found.append(name)
        left -= value
    return found
