"""SmoothQuant: move activation outliers from a norm's output into the weights of the layers that read it.

Xiao et al. 2023, SmoothQuant, arXiv:2211.10438, equation 4. For the linear layers that read one norm, and
each channel j of its output (X, on calibration samples; W, the concatenated weights of the layers):

    s_j = max |X_j| ^ alpha / max |W_j| ^ (1 - alpha)

The norm's weight and bias are divided by s, and the columns of the linear layers are multiplied by it, so the
float model computes the same and its graph has no new nodes. Only these layers may read the norm
(`smelt/models/families/registry.py`): in post-norm blocks the residual sum reads it too. A channel
without activations or without weights is not changed, because the formula has no value.

Norms are stored in their original dtype. The rounding error is included in s, so that norm and columns match
exactly.

Shapes: K = channels of a norm, N = outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.calibration.samples import CalibrationSamples, ObserveInputs
from smelt.calibration.sequential import ModelPart
from smelt.compress.quantize.plan_layers import PlannedLayer
from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.models.edits import module_names
from smelt.models.families.registry import NormConsumers, family_of, norm_consumers
from smelt.models.layers import LowRankLinear, SharedLinear
from smelt.quantization.schemes.registry import SCHEMES
from smelt.stage import Context

# Returns the stored dtype of a weight from all of its names.
DtypeOf = Callable[[Sequence[str]], torch.dtype]
# norms that a warning lists
_MAX_LISTED = 3


@dataclass(frozen=True)
class NormGroup:
    """A norm, the layers that read its output, and their matrices [N, K]."""

    norm: str
    consumers: list[nn.Module]
    linear_layers: list[nn.Linear]

    def modules(self, model: Any) -> list[nn.Module]:
        """Return the modules of `model` whose weights change with the scales."""
        return [model.get_submodule(self.norm), *self.linear_layers]


class SmoothQuantRunner:
    """State of SmoothQuant, of all norms at once or of one block after another.

    `ctx.details["smoothed"]` has, by norm, the ratio of the largest to the median channel before and after;
    `ctx.warnings` lists the unchanged norms.

    Args:
        model: in eval mode; norms and linear layers are changed in place.
        layers: its layers that will be quantized; those with one scale for their activations are smoothed.
        samples: calibration samples.
        alpha: strength of the migration into the weights, 0 to 1.
        dtype_of: returns the stored dtype of a norm's weight.
        ctx: gets details and warnings.

    Attributes:
        targets: the norms that can be smoothed, with their layers.
    """

    def __init__(
        self,
        model: Any,
        layers: Collection[PlannedLayer],
        samples: CalibrationSamples,
        alpha: float,
        dtype_of: DtypeOf,
        ctx: Context,
    ) -> None:
        self._feeds, self.targets = smoothing_targets(model, layers)
        self._rounded = _rounded_modules(layers)
        self._names = module_names(model)
        self.model, self._samples, self._alpha, self._ctx = model, samples, alpha, ctx
        self._dtype_of = dtype_of
        self._found: dict[str, tuple[Tensor, Tensor]] = {}
        self._details: dict[str, dict[str, float]] = {}

    def calibrate(self, targets: Sequence[NormGroup], part: ModelPart, *, apply: bool = True) -> None:
        """Find the scales of `targets`, and run `part` before any is applied.

        Args:
            targets: the norms in `part`.
            part: the part of the model to run.
            apply: whether to apply the scales; otherwise the caller applies them later.

        Raises:
            InputError: activations are not finite.
        """
        seen = _channel_maxima(self._samples, targets, part.observe) if targets else {}
        part.run()
        for group in targets:
            if group.norm not in seen:
                continue
            coded = [p.weight.detach() for p in group.linear_layers if p in self._rounded]
            weights = torch.stack([weight.abs().amax(dim=0) for weight in coded]).amax(dim=0)
            found = seen[group.norm]
            self._found[group.norm] = (found, smoothquant_scales(found, weights, self._alpha))
        if apply:
            self.apply(targets)

    def apply(self, targets: Sequence[NormGroup]) -> None:
        """Apply the found scales to `targets`."""
        for group in targets:
            if group.norm not in self._found:
                continue
            maxima, scales = self._found[group.norm]
            names = self._names[self.model.get_submodule(group.norm)]
            dtype = self._dtype_of([f"{name}.weight" for name in names])
            divisors = divide_norm(self.model, group, scales, dtype)
            self._details[group.norm] = {
                "outliers_before": _outlier_ratio(maxima),
                "outliers_after": _outlier_ratio(maxima / divisors),
            }

    def report(self) -> None:
        """Write the results to the details and warnings of the context."""
        self._ctx.details["smoothed"] = self._details
        self._ctx.warnings.extend(_skipped_norm_warnings(self._feeds, self._details))


def smoothing_targets(
    model: Any, layers: Collection[PlannedLayer]
) -> tuple[list[NormConsumers], list[NormGroup]]:
    """Return the norms read by `layers` that round their activations, and the groups that can be smoothed."""
    rounded = _rounded_modules(layers)
    consumers = [
        consumer
        for consumer in norm_consumers(model)
        if rounded & set(norm_group(model, consumer).linear_layers)
    ]
    return consumers, [norm_group(model, consumer) for consumer in consumers if consumer.is_foldable]


def _rounded_modules(layers: Collection[PlannedLayer]) -> set[Any]:
    """Return the modules of `layers` with one scale for all of their activations."""
    return {
        layer.module for layer in layers if layer.multiplies and SCHEMES[layer.scheme].per_tensor_activations
    }


def smoothquant_scales(activations: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Return s, float32 [K], from the channel maxima of activations and weights; 1 where either is 0."""
    nonzero = (activations > 0) & (weights > 0)
    return (activations**alpha / weights ** (1 - alpha)).where(nonzero, torch.ones(()))


def smooth_like(float_model: Any, quantized_model: Any) -> None:
    """Smooth `float_model` in place like `quantized_model`, which was quantized from it.

    The scales follow from the norm weights of both models.
    """
    for consumer in norm_consumers(float_model):
        if consumer.is_foldable:
            set_norm_weight(
                float_model,
                norm_group(float_model, consumer),
                quantized_model.get_submodule(consumer.norm).weight.detach(),
            )


def norm_group(model: Any, norm: NormConsumers) -> NormGroup:
    """Return the norm of `norm` with the layers that read it."""
    readers = list(dict.fromkeys(model.get_submodule(name) for name in norm.consumers))
    layers = [layer for reader in readers for layer in _input_layers(reader)]
    return NormGroup(norm.norm, readers, layers)


def _input_layers(reader: Any) -> list[Any]:
    """Return the linear layers that multiply the input of `reader`."""
    if isinstance(reader, SharedLinear):
        return [*_input_layers(reader.shared), reader.difference.down]
    return [reader.down if isinstance(reader, LowRankLinear) else reader]


def norm_weight_offset(model: Any) -> float:
    """Return the constant that the model's norms add to their weight, 0 or 1."""
    family = family_of(model)
    return 1.0 if family is not None and family.rms_norm.adds_one_to_weight else 0.0


def _channel_maxima(
    samples: CalibrationSamples, groups: Sequence[NormGroup], observe: ObserveInputs
) -> dict[str, Tensor]:
    """Return the channel maxima, float32 [K], by norm; norms that no sample reaches are left out.

    Raises:
        InputError: activations are not finite.
    """
    maxima: dict[str, Tensor] = {}

    def see(norm: str, x: Tensor) -> None:
        if len(x):
            batch_maxima = x.abs().amax(dim=0)
            maxima[norm] = torch.maximum(maxima[norm], batch_maxima) if norm in maxima else batch_maxima

    observe({group.norm: group.consumers for group in groups}, see)
    for norm, largest in maxima.items():
        if not bool(largest.isfinite().all()):
            raise InputError(
                f"quantize: {norm}: the outputs on samples of {samples.origin} are not finite. The"
                " training before this step has probably diverged; lower its learning_rate.",
                code="non-finite-activations",
            )
    return {norm: largest.clone() for norm, largest in maxima.items()}


@torch.no_grad()
def divide_norm(model: Any, group: NormGroup, scales: Tensor, stored_dtype: torch.dtype) -> Tensor:
    """Divide the output of the norm of `group` by `scales`, float32 [K], rounded by `stored_dtype`.

    Returns:
        The exact divisors, by which the columns of its readers were multiplied.
    """
    norm, offset = model.get_submodule(group.norm), norm_weight_offset(model)
    divided = (norm.weight + offset) / scales - offset
    return set_norm_weight(model, group, divided.to(stored_dtype).float())


@torch.no_grad()
def set_norm_weight(model: Any, group: NormGroup, weight: Tensor) -> Tensor:
    """Set the norm's weight to `weight`, float32 [K], and compensate in its readers; return the divisors.

    Channels whose weight is 0, or would become 0 or infinite, are not changed.
    """
    norm, offset = model.get_submodule(group.norm), norm_weight_offset(model)
    exact = (norm.weight + offset) / (weight + offset)
    finite = exact.isfinite()
    divisors: Tensor = exact.where(finite, torch.ones(()))
    norm.weight.copy_(weight.where(finite, norm.weight))
    if getattr(norm, "bias", None) is not None:
        norm.bias.div_(divisors)
    for layer in group.linear_layers:
        layer.weight.mul_(divisors)
    return divisors


def _outlier_ratio(largest: Tensor) -> float:
    """Return the ratio of the largest to the median channel; 0 if the median is 0."""
    median = float(largest.median())
    return round(float(largest.max()) / median, 2) if median else 0.0


def _skipped_norm_warnings(feeds: Sequence[NormConsumers], smoothed: Collection[str]) -> list[Message]:
    """Return warnings about the unchanged norms."""
    reasons: dict[str, list[str]] = {}
    for consumer in feeds:
        if consumer.norm not in smoothed:
            if consumer.is_foldable:
                reason = "no calibration sample reaches them"
            elif consumer.is_exclusive:
                reason = "the layers that use their outputs share weights with other layers"
            else:
                reason = "their outputs have other uses (the residual sum in post-norm blocks)"
            reasons.setdefault(reason, []).append(consumer.norm)
    if not feeds:
        return [
            warning(
                "nothing-smoothed",
                "smoothquant_alpha: no norm is followed by a quantized linear layer; nothing is smoothed.",
                setting="smoothquant_alpha",
            )
        ]
    return [
        warning(
            "norms-not-smoothed",
            f"smoothquant_alpha: {len(norms)} of {len(feeds)} norms are unchanged, because {reason}:"
            f" {_list_names(norms)}.",
            setting="smoothquant_alpha",
        )
        for reason, norms in reasons.items()
    ]


def _list_names(names: Sequence[str]) -> str:
    remainder = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + remainder
