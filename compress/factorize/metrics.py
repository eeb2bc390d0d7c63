"""In what the error of each layer is measured, found by looking at rows where the method does.

Shapes: M = outputs, K = inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from smelt.compress.calibration.gradients import squared_gradients
from smelt.compress.calibration.kept import kept_statistics
from smelt.compress.calibration.rows import CalibrationRows, calibration_rows
from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.factorize.asvd import activation_aware
from smelt.compress.factorize.fisher import fisher_weighted
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.svd import Decomposed, Metric, decomposed
from smelt.compress.factorize.whitened import whitened
from smelt.compress.train.objective import label_objective
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context

# Memory for singular vectors that are asked for again.
KEPT_BYTES = 2**30


@dataclass(frozen=True)
class Metrics:
    """What was seen of each layer, by name.

    inputs: what layers were fed; information: mean squared gradients, [M, K]; both as the method needs them.
    rows: that were looked at; None where none were.
    """

    settings: FactorizeSettings
    rows: CalibrationRows | None = None
    inputs: Mapping[str, InputStatistics] = field(default_factory=dict)
    information: Mapping[str, Tensor] = field(default_factory=dict)
    _known: dict[str, Decomposed] = field(default_factory=dict)

    @property
    def unseen(self) -> list[str]:
        """The layers that no row reaches."""
        return [name for name, found in self.inputs.items() if not found.tokens]

    def of(self, name: str, layer: nn.Linear) -> Metric:
        """Return the metric of the layer `name`."""
        if name in self.information:
            return fisher_weighted(self.information[name].double())
        if name not in self.inputs:
            return Metric()
        seen = self.inputs[name]
        if self.settings.method == "asvd":
            return activation_aware(seen.magnitudes / seen.tokens, self.settings.alpha)
        assert seen.second is not None
        return whitened(seen.second, seen.sums, seen.tokens, bias=layer.bias is not None)

    def decomposed(self, name: str, layer: nn.Linear) -> Decomposed:
        """Return the singular values and vectors of the layer `name`, whose weights do not change.

        They are kept for the next who asks, as far as memory of KEPT_BYTES lasts.
        """
        if name in self._known:
            return self._known[name]
        found = decomposed(layer.weight, self.of(name, layer))
        held = sum(one.basis.nbytes for one in self._known.values())
        if held + found.basis.nbytes <= KEPT_BYTES:
            self._known[name] = found
        return found


@contextmanager
def found_metrics(
    model: Any, layers: Mapping[str, nn.Linear], src: Artifact, settings: FactorizeSettings, ctx: Context
) -> Iterator[Metrics]:
    """Look at rows, as the method needs it; second moments that lie on disk go when the context ends.

    Raises:
        InputError: there are no rows, or a layer is fed what is not finite.
    """
    if not settings.reads_rows:
        yield Metrics(settings)
        return
    fisher = settings.method == "fwsvd"
    # gradients are taken row by row; elsewhere padding is left out
    rows = calibration_rows(
        model, src, settings.calibration_samples, ctx, "factorize", labels=fisher, padded=not fisher
    )
    ctx.details["calibration"] = {"origin": rows.origin, "rows": rows.rows, "tokens": rows.tokens}
    if fisher:
        weights = {name: layer.weight for name, layer in layers.items()}
        information = squared_gradients(model, rows, weights, label_objective(), ctx)
        yield Metrics(settings, rows, information=information)
    elif settings.method == "svd":
        yield Metrics(settings, rows)
    else:
        second = settings.method == "whitened-svd"
        single = {name: [layer] for name, layer in layers.items()}
        with kept_statistics(model, rows, single, ctx, of=src.key, second=second) as inputs:
            require_finite(inputs, rows)
            warn_of_few(few_of(inputs), rows, ctx)
            yield Metrics(settings, rows, inputs=inputs)


def require_finite(inputs: Mapping[str, InputStatistics], rows: CalibrationRows) -> None:
    """Refuse inputs that are not finite.

    Raises:
        InputError: a layer is fed some.
    """
    for name, seen in inputs.items():
        if seen.tokens and not bool(seen.squares.isfinite().all()):
            raise InputError(
                f"factorize: {name}: on rows of {rows.origin} its inputs are not finite. The training"
                " before it has probably diverged.",
                code="non-finite-activations",
            )


def few_of(inputs: Mapping[str, InputStatistics]) -> dict[str, tuple[int, int]]:
    """Return the layers that have more inputs than tokens were seen: by name both numbers."""
    return {
        name: (seen.tokens, seen.width)
        for name, seen in inputs.items()
        if seen.second is not None and 0 < seen.tokens < seen.width
    }


def warn_of_few(few: Mapping[str, tuple[int, int]], rows: CalibrationRows, ctx: Context) -> None:
    """Say where a layer has more inputs than tokens were seen: what it lacks was never fed to it."""
    if few:
        first, (tokens, width) = next(iter(few.items()))
        ctx.warn(
            "few-calibration-tokens",
            f"{rows.origin}: the {rows.rows} calibration samples have fewer tokens than {len(few)} layers"
            f" have inputs ({first}: {tokens} of {width}); the error on other texts may be larger. Increase"
            f" rows, or add data: {{calibration: FILE}}.",
        )
