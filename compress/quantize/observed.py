"""The ranges of activations that the layers of a model need, found on rows of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from smelt.compress.calibration.observe import observe
from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.quantize.planned import Planned
from smelt.compress.quantize.ranges import Extremes, Histogram
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.errors import InputError
from smelt.core.stage import Context

# Fewer tokens than this have not shown what others will bring.
ENOUGH_TOKENS = 1000


def ranges_of(
    model: Any, layers: Sequence[Planned], rows: CalibrationRows, settings: QuantizeSettings, ctx: Context
) -> dict[int, float]:
    """Return the magnitude that becomes the largest code, by `Planned.weight`.

    Layers of one weight have one range. What no row reaches is not in the result.

    Args:
        model: in eval mode.
        layers: of it; those that do not observe are left out.
        rows: what the model reads, twice where values are counted.
        settings: its `calibration_method` and `calibration_percentile`.
        ctx: its `progress` is told.

    Raises:
        InputError: activations are not finite.
    """
    modules: dict[str, list[nn.Module]] = {}
    names: dict[str, str] = {}
    for layer in layers:
        if layer.observes:
            modules.setdefault(str(layer.weight), []).append(layer.module)
            names.setdefault(str(layer.weight), layer.name)
    found = seen_by(model, modules, names, rows, settings, ctx)
    return {int(key): seen.largest for key, seen in found.items()}


@dataclass(frozen=True)
class Seen:
    """What modules were fed: the magnitude that becomes the largest code; whether some were negative."""

    largest: float
    signed: bool


def seen_by(
    model: Any,
    modules: Mapping[str, Sequence[nn.Module]],
    names: Mapping[str, str],
    rows: CalibrationRows,
    settings: QuantizeSettings,
    ctx: Context,
) -> dict[str, Seen]:
    """Return what `modules` are fed, by the caller's keys, without those that no row reaches.

    Args:
        model: in eval mode.
        modules: of it; those of one key have one range.
        names: by key what messages call them.
        rows: what the model reads, twice where values are counted.
        settings: its `calibration_method` and `calibration_percentile`.
        ctx: its `progress` is told.

    Raises:
        InputError: activations are not finite.
    """
    extremes = {key: Extremes() for key in modules}
    observe(model, rows, modules, lambda key, x: extremes[key].see(x), ctx)
    for key, seen in extremes.items():
        if seen.rows and not float(seen.largest) < float("inf"):
            raise InputError(
                f"quantize: {names[key]}: on rows of {rows.origin} its activations are not finite. The"
                " training before it has probably gone astray.",
                code="non-finite-activations",
            )
    reached = {key: seen for key, seen in extremes.items() if seen.rows}
    signed = {key: bool(seen.low < 0) for key, seen in reached.items()}
    if settings.calibration_method == "minmax":
        return {key: Seen(float(seen.largest), signed[key]) for key, seen in reached.items()}
    counted = {key: Histogram(settings.calibration_method, seen) for key, seen in reached.items()}

    def count(key: str, x: Tensor) -> None:
        counted[key].see(x)

    observe(model, rows, {key: modules[key] for key in reached}, count, ctx)
    return {
        key: Seen(found.cut(settings.calibration_percentile), signed[key]) for key, found in counted.items()
    }
