"""SmoothQuant: move activation outliers from the inputs of linear layers into their weights.

Xiao et al. 2023, SmoothQuant, arXiv:2211.10438, equation 4. For the linear layers that read one input, and
each channel j of it (X, on calibration samples; W, the concatenated weights of the layers):

    s_j = max |X_j| ^ alpha / max |W_j| ^ (1 - alpha)

The input is divided by s, and the columns of the linear layers are multiplied by it (see `scale_targets.py`),
so the float model computes the same. The paper divides the outputs of norms. Values before the output layer
of an attention and the ungated half of a gated feed-forward part are divided in the layers that compute them,
also without new nodes in the graph; anything else by a factor. Channels that share a scale (a value head that
several query heads read) share their maxima. A channel without activations or without weights is not changed,
because the formula has no value.

Shapes: K = channels of an input.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.sequential import ModelPart
from smelt.compress.quantize.plan_layers import PlannedLayer
from smelt.compress.quantize.scale_targets import (
    DtypeOf,
    ScaleKind,
    ScaleRunner,
    ScaleTarget,
    find_scale_targets,
    norm_group,
)
from smelt.core.messages import Message, warning
from smelt.models.families.registry import NormConsumers, norm_consumers
from smelt.quantization.schemes.registry import SCHEMES
from smelt.stage import Context

# norms that a warning lists
_MAX_LISTED = 3


class SmoothQuantRunner(ScaleRunner):
    """SmoothQuant of all inputs at once or of one block after another.

    `ctx.details["smoothed"]` has the ratio of the largest to the median channel before and after, by the name
    of a norm, or else of the first layer that reads the input; `ctx.warnings` lists the norms whose layers
    are not smoothed.

    Args:
        model: in eval mode; changed in place.
        layers: its layers that will be quantized; those with one scale for their activations are smoothed.
        samples: calibration samples.
        alpha: strength of the migration into the weights, 0 to 1.
        kinds: the kinds of targets.
        dtype_of: returns the stored dtype of a norm's weight, or of factors.
        ctx: gets details and warnings.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[PlannedLayer],
        samples: CalibrationSamples,
        alpha: float,
        kinds: Collection[ScaleKind],
        dtype_of: DtypeOf,
        ctx: Context,
    ) -> None:
        targets = smoothing_targets(model, layers, kinds)
        super().__init__(model, targets, layers, samples, dtype_of, ctx)
        self._alpha, self._maxima = alpha, dict[str, Tensor]()
        rounded = {layer.module for layer in _rounded_layers(layers)}
        self._norm_layers = [
            (consumer, readers)
            for consumer in norm_consumers(model)
            if (readers := rounded.intersection(norm_group(model, consumer).linear_layers))
        ]
        self._details: dict[str, dict[str, float]] = {}

    def calibrate(self, targets: Sequence[ScaleTarget], part: ModelPart, *, apply: bool = True) -> None:
        """Find the scales of `targets` (see `ScaleRunner`)."""
        maxima: dict[str, Tensor] = {}

        def see(name: str, x: Tensor) -> None:
            if len(x):
                batch_maxima = x.abs().amax(dim=0)
                maxima[name] = torch.maximum(maxima[name], batch_maxima) if name in maxima else batch_maxima

        if targets:
            part.observe(self._layers_to_observe(targets), see)
        self._require_finite(maxima)
        part.run()
        for target in targets:
            if (name := self._names[id(target)]) in maxima:
                weights = torch.cat([layer.module.weight.detach() for layer in target.layers])
                self._maxima[name] = maxima[name].clone()
                shared_maxima, shared_weights = (
                    target.pool(values, torch.amax) for values in (maxima[name], weights.abs().amax(dim=0))
                )
                self.scales[name] = smoothquant_scales(shared_maxima, shared_weights, self._alpha)
        if apply:
            self.apply(targets)

    def apply(self, targets: Sequence[ScaleTarget]) -> dict[str, Tensor]:
        """Apply the scales of `targets`; return the applied ones by name, float32 [K]."""
        applied = super().apply(targets)
        for name, scales in applied.items():
            self._details[name] = {
                "outliers_before": _outlier_ratio(self._maxima[name]),
                "outliers_after": _outlier_ratio(self._maxima[name] / scales),
            }
        return applied

    def report(self) -> None:
        """Write the results to the details and warnings of the context."""
        names = [(self._names[id(target)], target.norm) for target in self.targets]
        self._ctx.details["smoothed"] = {
            name if norm is None else norm.norm: self._details[name]
            for name, norm in names
            if name in self._details
        }
        smoothed = {
            layer.module for t in self.targets if self._names[id(t)] in self.scales for layer in t.layers
        }
        unchanged = [consumer for consumer, layers in self._norm_layers if not layers & smoothed]
        self._ctx.warnings.extend(_skipped_norm_warnings(unchanged, len(self._norm_layers), bool(smoothed)))


def smoothing_targets(
    model: Any, layers: Sequence[PlannedLayer], kinds: Collection[ScaleKind]
) -> list[ScaleTarget]:
    """Return the targets of the scales of `layers` that round their activations."""
    targets, _ = find_scale_targets(model, _rounded_layers(layers))
    return [target for target in targets if target.kind in kinds]


def _rounded_layers(layers: Sequence[PlannedLayer]) -> list[PlannedLayer]:
    """Return the layers with one scale for all of their activations."""
    return [layer for layer in layers if layer.multiplies and SCHEMES[layer.scheme].per_tensor_activations]


def smoothquant_scales(activations: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Return s, float32 [K], from the channel maxima of activations and weights; 1 where either is 0."""
    nonzero = (activations > 0) & (weights > 0)
    return (activations**alpha / weights ** (1 - alpha)).where(nonzero, torch.ones(()))


def _outlier_ratio(largest: Tensor) -> float:
    """Return the ratio of the largest to the median channel; 0 if the median is 0."""
    median = float(largest.median())
    return round(float(largest.max()) / median, 2) if median else 0.0


def _skipped_norm_warnings(
    unchanged: Sequence[NormConsumers], count: int, smooths_any: bool
) -> list[Message]:
    """Return warnings about norms whose layers are not smoothed, of `count` norms."""
    if not count and not smooths_any:
        return [
            warning(
                "nothing-smoothed",
                "smoothquant_alpha: no quantized linear layer has an input that can be divided; nothing is"
                " smoothed.",
                setting="smoothquant_alpha",
            )
        ]
    names_by_reason: dict[str, list[str]] = {}
    for consumer in unchanged:
        if consumer.is_foldable:
            reason = "no calibration sample reaches them"
        elif consumer.is_exclusive:
            reason = "the layers that use their outputs share weights with other layers"
        else:
            reason = (
                "their outputs have other uses (the residual sum in post-norm blocks;"
                " smoothquant_targets: [norms, layers, factors] divides the inputs of their layers)"
            )
        names_by_reason.setdefault(reason, []).append(consumer.norm)
    return [
        warning(
            "norms-not-smoothed",
            f"smoothquant_alpha: {len(names)} of {count} norms are unchanged, because {reason}:"
            f" {_list_names(names)}.",
            setting="smoothquant_alpha",
        )
        for reason, names in names_by_reason.items()
    ]


def _list_names(names: Sequence[str]) -> str:
    remainder = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + remainder
