"""What the methods that tune the weights of a block share: a run, and the loss of a block.

An update uses at least eight samples, drawn without replacement until all were used. Losses are relative to
those of the weights that a run starts from, on the same samples.

Shapes: N = outputs, K = inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.sequential import ModelPart, RunningBlock
from smelt.calibration.statistics import warn_of_few_tokens
from smelt.compress.quantize.plan_layers import PlannedLayer, dequantize_codes
from smelt.core.errors import InputError
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.registry import find_scheme
from smelt.stage import Context

MIN_SAMPLES = 8  # of an update
TINY = torch.finfo(torch.float32).tiny


class BlockLoss:
    """The squared error of a block's outputs on a few batches, relative to that of the first weights.

    start: the first weights, by name. generator: of the order of the batches. reached: names of the weights
    that the outputs depend on.
    """

    def __init__(self, part: RunningBlock, start: Mapping[str, Tensor], generator: torch.Generator) -> None:
        self._part, self._start, self._generator = part, start, generator
        self.reached = set[str]()
        self._start_errors: dict[int, float] = {}
        self._sizes, self._order = part.batch_sizes(held_back=False), list[int]()

    def __call__(self, values: list[Tensor]) -> tuple[float, list[Tensor]]:
        """Return the loss for the next batches, and its gradients."""
        weights = {n: value.requires_grad_() for n, value in zip(self._start, values, strict=True)}
        numbers = self._draw()
        error, sums = 0.0, [torch.zeros_like(value) for value in values]
        for number in numbers:
            batch_error = self._part.output_error(number, weights)
            error += float(batch_error.detach())
            gradients = torch.autograd.grad(batch_error, values, allow_unused=True)
            for name, total, gradient in zip(weights, sums, gradients, strict=True):
                if gradient is not None:
                    self.reached.add(name)
                    total.add_(gradient)
        return error / max(sum(map(self._start_error, numbers)), TINY), sums

    @torch.no_grad()
    def on_other_samples(self, values: Sequence[Tensor]) -> float:
        """Return the loss on all samples held back from calibration; without any, on those of calibration."""
        numbers = self._part.batch_sizes(held_back=True) or self._sizes
        weights = dict(zip(self._start, values, strict=True))
        error = sum(float(self._part.output_error(number, weights)) for number in numbers)
        return error / max(sum(map(self._start_error, numbers)), TINY)

    @torch.no_grad()
    def _start_error(self, number: int) -> float:
        if number not in self._start_errors:
            self._start_errors[number] = float(self._part.output_error(number, self._start))
        return self._start_errors[number]

    def _draw(self) -> list[int]:
        """Return the next batches; all are drawn before any is drawn again."""
        numbers, missing = list[int](), min(MIN_SAMPLES, sum(self._sizes.values()))
        while missing > 0:
            if not self._order:
                self._order = torch.randperm(len(self._sizes), generator=self._generator).tolist()
            numbers.append(self._order.pop())
            missing -= self._sizes[numbers[-1]]
        return numbers


class BlockTuner(ABC):
    """State of a run of a method that tunes the weights of a block together.

    Args:
        samples: calibration samples.
        iterations: updates of each block.
        ctx: seed; gets the details of each layer and block, and warnings.

    Attributes:
        codes: quantized weights by `PlannedLayer.weight_id`.
        error_details: details with a relative error by the names of layers or blocks.
        fallback: how weights that no sample reaches are quantized, for the warning.
    """

    error_details: ClassVar[tuple[str, ...]]
    fallback: ClassVar[str]

    def __init__(self, samples: CalibrationSamples, iterations: int, ctx: Context) -> None:
        self.codes: dict[int, UnpackedWeights] = {}
        self._samples, self._iterations, self._ctx = samples, iterations, ctx
        self._generator = torch.Generator().manual_seed(ctx.seed)
        self._errors: dict[str, dict[str, float]] = {name: {} for name in self.error_details}
        self._unreached: list[str] = []
        self._token_counts: list[tuple[int, int]] = []

    def calibrate(self, layers: Sequence[PlannedLayer], part: ModelPart) -> None:
        """Quantize `layers` in `part`, each weight once; set their weights to the results.

        Raises:
            InputError: inputs of a layer or outputs of a block are not finite.
        """
        first = {layer.weight_id: layer for layer in reversed(layers) if layer.weight_id not in self.codes}
        if isinstance(part, RunningBlock):
            part.run_reference()  # also if nothing is tuned: the block may be released before the next one
        if first:
            self._tune_part(list(first.values()), part)

    @abstractmethod
    def _tune_part(self, layers: Sequence[PlannedLayer], part: ModelPart) -> None:
        """Quantize `layers`, no two with the same weight, and call `_set_weight` with the results.

        The reference outputs of a block are there.
        """

    @torch.no_grad()
    def _set_weight(self, layer: PlannedLayer, codes: UnpackedWeights) -> None:
        """Store `codes`, and set the weight of `layer` to their values."""
        weight = layer.module.weight
        weight.copy_(dequantize_codes(codes, find_scheme(layer.scheme), layer.options, weight))
        self.codes[layer.weight_id] = moved(codes, torch.device("cpu"))

    def report(self) -> None:
        """Write the results to the details and warnings of the context."""
        for name, errors in self._errors.items():
            self._ctx.details[name] = {key: float(f"{error:.3g}") for key, error in errors.items()}
        if self._unreached:
            self._ctx.warn(
                "uncalibrated-layers",
                f"No calibration sample reaches {', '.join(self._unreached)}; {self.fallback}. Add"
                " calibration samples that use them.",
            )
        warn_of_few_tokens(self._token_counts, self._samples, self._ctx)


def require_finite(name: str, is_finite: bool, what: str) -> None:
    """Check the activations of the layer or block `name`; what: which they are.

    Raises:
        InputError: they are not finite.
    """
    if not is_finite:
        raise InputError(
            f"quantize: {name}: {what} are not finite. The training before this step has probably diverged;"
            " lower its learning_rate.",
            code="non-finite-activations",
        )


def moved(codes: UnpackedWeights, device: torch.device) -> UnpackedWeights:
    """Return `codes` on `device`."""
    qparams = {name: tensor.to(device) for name, tensor in codes.qparams.items()}
    return UnpackedWeights(codes.q_weight.to(device), qparams)
