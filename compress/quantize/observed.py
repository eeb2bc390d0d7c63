"""The ranges of activations that the layers of a model need, found on rows of data."""

from __future__ import annotations

from collections.abc import Sequence
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
        settings: its `range` and `percentile`.
        ctx: its `progress` is told.

    Raises:
        InputError: activations are not finite.
    """
    modules: dict[str, list[nn.Module]] = {}
    names: dict[str, list[str]] = {}
    for layer in layers:
        if layer.observes:
            modules.setdefault(str(layer.weight), []).append(layer.module)
            names.setdefault(str(layer.weight), []).append(layer.name)
    extremes = {key: Extremes() for key in modules}
    observe(model, rows, modules, lambda key, x: extremes[key].see(x), ctx)
    for key, seen in extremes.items():
        if seen.rows and not float(seen.largest) < float("inf"):
            raise InputError(
                f"quantize: {names[key][0]}: on rows of {rows.origin} its activations are not finite. The"
                " training before it has probably gone astray."
            )
    reached = {key: seen for key, seen in extremes.items() if seen.rows}
    if settings.range == "minmax":
        return {int(key): float(seen.largest) for key, seen in reached.items()}
    counted = {key: Histogram(settings.range, seen) for key, seen in reached.items()}

    def count(key: str, x: Tensor) -> None:
        counted[key].see(x)

    observe(model, rows, {key: modules[key] for key in reached}, count, ctx)
    return {int(key): histogram.cut(settings.percentile) for key, histogram in counted.items()}
