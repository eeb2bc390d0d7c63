"""The error metric of each layer, calibrated on samples if the method needs them.

Shapes: M = outputs, K = inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from smelt.calibration.samples import CalibrationSamples, load_calibration_samples
from smelt.calibration.statistics import InputStatistics, cached_statistics, squared_gradients
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.svd import (
    Decomposition,
    ErrorMetric,
    asvd_metric,
    decompose,
    fwsvd_metric,
    whitened_svd_metric,
)
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.training.extension import label_objective

# Memory for cached singular vectors.
DECOMPOSITION_CACHE_BYTES = 2**30


@dataclass(frozen=True)
class LayerMetrics:
    """Calibration results of each layer, by name.

    inputs: input statistics; information: mean squared gradients, [M, K]; each if the method needs it.
    rows: calibration samples; None if the method uses none.
    """

    settings: FactorizeSettings
    rows: CalibrationSamples | None = None
    inputs: Mapping[str, InputStatistics] = field(default_factory=dict)
    information: Mapping[str, Tensor] = field(default_factory=dict)
    _known: dict[str, Decomposition] = field(default_factory=dict)

    @property
    def uncalibrated(self) -> list[str]:
        """The layers that no sample reaches."""
        return [name for name, found in self.inputs.items() if not found.tokens]

    def metric_of(self, name: str, layer: nn.Linear) -> ErrorMetric:
        """Return the metric of the layer `name`."""
        if name in self.information:
            return fwsvd_metric(self.information[name].double())
        if name not in self.inputs:
            return ErrorMetric()
        seen = self.inputs[name]
        if self.settings.method == "asvd":
            return asvd_metric(seen.magnitudes / seen.tokens, self.settings.alpha)
        assert seen.second_moment is not None
        return whitened_svd_metric(seen.second_moment, seen.sums, seen.tokens, bias=layer.bias is not None)

    def decompose(self, name: str, layer: nn.Linear) -> Decomposition:
        """Return the singular values and vectors of the layer `name`, whose weights must not change.

        They are cached up to a memory limit.
        """
        if name in self._known:
            return self._known[name]
        found = decompose(layer.weight, self.metric_of(name, layer))
        held = sum(metric.basis.nbytes for metric in self._known.values())
        if held + found.basis.nbytes <= DECOMPOSITION_CACHE_BYTES:
            self._known[name] = found
        return found


@contextmanager
def collect_metrics(
    model: Any, layers: Mapping[str, nn.Linear], src: Artifact, settings: FactorizeSettings, ctx: Context
) -> Iterator[LayerMetrics]:
    """Yield the metrics after calibrating on samples; second moments on disk are removed with the context.

    Raises:
        InputError: there are no samples, or the inputs of a layer are not finite.
    """
    if not settings.needs_calibration:
        yield LayerMetrics(settings)
        return
    fisher = settings.method == "fwsvd"
    # gradients need single samples; elsewhere padding is ignored
    rows = load_calibration_samples(
        model, src, settings.calibration_samples, ctx, "factorize", labels=fisher, padded=not fisher
    )
    ctx.details["calibration"] = {"origin": rows.origin, "rows": rows.num_samples, "tokens": rows.tokens}
    if fisher:
        weights = {name: layer.weight for name, layer in layers.items()}
        information = squared_gradients(model, rows, weights, label_objective(), ctx)
        yield LayerMetrics(settings, rows, information=information)
    elif settings.method == "svd":
        yield LayerMetrics(settings, rows)
    else:
        second = settings.method == "whitened-svd"
        single = {name: [layer] for name, layer in layers.items()}
        with cached_statistics(model, rows, single, ctx, artifact_key=src.key, second=second) as inputs:
            require_finite_inputs(inputs, rows)
            warn_of_few_tokens(layers_with_few_tokens(inputs), rows, ctx)
            yield LayerMetrics(settings, rows, inputs=inputs)


def require_finite_inputs(inputs: Mapping[str, InputStatistics], samples: CalibrationSamples) -> None:
    """Require finite inputs.

    Raises:
        InputError: the inputs of a layer are not finite.
    """
    for name, seen in inputs.items():
        if seen.tokens and not bool(seen.squares.isfinite().all()):
            raise InputError(
                f"factorize: {name}: the layer's inputs on samples of {samples.origin} are not finite."
                " The training before this step has probably diverged; lower its learning_rate.",
                code="non-finite-activations",
            )


def layers_with_few_tokens(inputs: Mapping[str, InputStatistics]) -> dict[str, tuple[int, int]]:
    """Return the layers with more inputs than calibration tokens: by name (tokens, inputs)."""
    return {
        name: (seen.tokens, seen.width)
        for name, seen in inputs.items()
        if seen.second_moment is not None and 0 < seen.tokens < seen.width
    }


def warn_of_few_tokens(few: Mapping[str, tuple[int, int]], samples: CalibrationSamples, ctx: Context) -> None:
    """Warn if layers have more inputs than calibration tokens."""
    if few:
        first, (tokens, width) = next(iter(few.items()))
        ctx.warn(
            "few-calibration-tokens",
            f"{samples.origin}: the {samples.num_samples} calibration samples have fewer tokens than"
            f" {len(few)} layers have inputs ({first}: {tokens} tokens, {width} inputs); the error"
            " on other texts may be larger. Increase calibration_samples, or add data:"
            f" {{calibration: FILE}}.",
        )
