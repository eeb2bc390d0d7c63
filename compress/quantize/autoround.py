"""AutoRound: learn the rounding of each weight and the range of each group by signed gradients.

Cheng et al. 2023, Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs,
arXiv:2309.05516, and its published code (intel/auto-round at b9f3d00: sign_round/quantizer.py, sign_sgd.py,
data_type/int.py, wrapper.py). The values of a group of weights W with the smallest value l and the largest
one h (0 included) are

    s, z = scheme(a l, b h)                       the scale, rounded as it is stored, and the zero point
    Q = s clip(round(W / s + V), low, high)       low and high: the codes' limits minus the zero point

V starts at 0, a and b at 1, where Q is W rounded to nearest. The blocks are tuned one by one: for inputs from
the quantized blocks before it, the squared error of the output against the output of the float model (on its
own inputs, `enable_quanted_input`) is minimized. Rounding passes gradients unchanged; every update moves each
parameter by the learning rate against the sign of its gradient (no momentum), and a and b stay in [0, 1]. The
learning rate falls linearly from 1 / iterations to 0, so that V stays within half a step. The iteration with
the least loss counts.

Differences from the published code: short samples share a batch, so an update has more than eight of them;
its windows have 2,048 tokens. The code compares the losses of iterations on different samples; here each loss
is relative to that of rounding to nearest on the same samples. A block that is not better than that on
samples held back is rounded to nearest. Scales are float16, as stored; the code's `scale_dtype` may be
bfloat16. The code rounds linear layers outside of blocks to nearest unless it is given their inputs; here
their output error for W is minimized, 2 (Q - W) X X^T being its gradient.

Shapes: N = outputs, K = inputs, G = groups, g = inputs of a group, D = width of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from smelt.calibration.sequential import ModelPart, RunningBlock
from smelt.calibration.statistics import InputStatistics
from smelt.compress.quantize.block_tuning import TINY, BlockLoss, BlockTuner, require_finite
from smelt.compress.quantize.plan_layers import PlannedLayer, straight_through
from smelt.models.edits import is_masked
from smelt.quantization.groupwise import split_into_groups
from smelt.quantization.scheme import QuantParams, Scheme, SchemeOptions, UnpackedWeights
from smelt.quantization.schemes.registry import find_scheme

# Returns the relative loss of dequantized weights, each float32 [N, K], and its gradients.
LossWithGradients: TypeAlias = Callable[[list[Tensor]], tuple[float, list[Tensor]]]


class LearnedRounding:
    """The learned rounding of one matrix.

    Args:
        weight: float [N, K], not changed.
        scheme: one whose ranges can be learned.
        options: options of the scheme.
        keep_zeros: whether weights of zero are kept at zero.

    Attributes:
        parameters: V, float32 [N, G, g]; a and b, float32 [N, G].
    """

    def __init__(self, weight: Tensor, scheme: Scheme, options: SchemeOptions, keep_zeros: bool) -> None:
        self.weight, self._scheme, self._options = weight.detach(), scheme, options
        self._groups = split_into_groups(weight.detach().float(), scheme.group_size(weight.shape[1], options))
        self._movable = self._groups != 0 if keep_zeros else None
        self._low = self._groups.amin(dim=-1).clamp(max=0)
        self._high = self._groups.amax(dim=-1).clamp(min=0)
        ones = torch.ones_like(self._low)
        values = (torch.zeros_like(self._groups), ones, ones.clone())
        self.parameters: tuple[Tensor, ...] = tuple(value.requires_grad_() for value in values)

    def values(self) -> Tensor:
        """Return the dequantized weights, float32 [N, K], with gradients for the parameters."""
        grid = self._grid()
        scales, offset = grid["scales"][..., None], self.parameters[0]
        if self._movable is not None:
            offset = offset * self._movable
        steps = self._groups * _reciprocal(scales) + offset
        limits = self._scheme.code_range(grid, self._options)
        assert limits is not None
        low, high = (torch.as_tensor(limit, device=steps.device).to(steps) for limit in limits)
        codes = straight_through(steps, steps.detach().round()).clamp(low, high)
        return (codes * scales).flatten(1)[:, : self.weight.shape[1]]

    @torch.no_grad()
    def codes(self) -> UnpackedWeights:
        """Return the quantized weights."""
        grid, size = self._qparams(*self._ends()), self._groups.shape[2]
        codes = self._scheme.quantize(split_into_groups(self.values(), size), grid, self._options)
        return UnpackedWeights(codes, grid)

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor], learning_rate: float) -> None:
        """Move each parameter by `learning_rate` against the sign of its gradient."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.sub_(learning_rate * gradient.sign())
        for shrink in self.parameters[1:]:
            shrink.clamp_(0, 1)

    def _ends(self) -> tuple[Tensor, Tensor]:
        return self._low * self.parameters[1], self._high * self.parameters[2]

    def _qparams(self, low: Tensor, high: Tensor) -> QuantParams:
        ends = torch.stack([low, high], dim=-1).detach()
        return self._scheme.compute_qparams(ends, ends.shape[1] * ends.shape[2], self._options)

    def _grid(self) -> dict[str, Tensor]:
        """Return scales and zero points, with gradients for a and b that pass through their rounding.

        A scale is proportional to the range, or without zero points to the end that is farther from zero.
        """
        low, high = self._ends()
        grid = self._qparams(low, high)
        span = high - low if "zeros" in grid else torch.where(high > -low, high, low)
        slope = grid["scales"] * _reciprocal(span.detach())
        result = {"scales": straight_through(span * slope, grid["scales"])}
        if "zeros" in grid:
            zeros = -low * _reciprocal(result["scales"])
            result["zeros"] = straight_through(zeros, grid["zeros"].float())
        return result


def _reciprocal(x: Tensor) -> Tensor:
    """Return 1 / x, and 0 for 0, both with finite gradients."""
    is_zero = x == 0
    return (1 / x.masked_fill(is_zero, 1.0)).masked_fill(is_zero, 0.0)


def sign_descent(
    roundings: Sequence[LearnedRounding], loss_of: LossWithGradients, iterations: int
) -> list[float]:
    """Tune `roundings`, leave them at the iteration with the least loss, and return the losses of all."""
    parameters = [parameter for rounding in roundings for parameter in rounding.parameters]
    best, losses = [parameter.detach().clone() for parameter in parameters], list[float]()
    for iteration in range(iterations):
        values = [rounding.values() for rounding in roundings]
        loss, gradients = loss_of([value.detach() for value in values])
        if not losses or loss < min(losses):
            best = [parameter.detach().clone() for parameter in parameters]
        losses.append(loss)
        learning_rate = (1 - iteration / iterations) / iterations
        for rounding, value, gradient in zip(roundings, values, gradients, strict=True):
            rounding.update(torch.autograd.grad(value, rounding.parameters, gradient), learning_rate)
    with torch.no_grad():
        for parameter, value in zip(parameters, best, strict=True):
            parameter.copy_(value)
    return losses


class _LayerLoss:
    """The squared output error of a layer outside of blocks, relative to rounding to nearest.

    nearest: weights rounded to nearest, float32 [N, K]. statistics: of its inputs, with second moments.
    """

    def __init__(self, weight: Tensor, nearest: Tensor, statistics: InputStatistics) -> None:
        self._weight, self._nearest, self._statistics = weight, nearest, statistics

    def __call__(self, values: list[Tensor]) -> tuple[float, list[Tensor]]:
        """Return the loss on the calibration samples, and its gradient."""
        moment = _second_moment(self._statistics, self._weight)
        gradient = 2 * (values[0] - self._weight) @ moment
        return self._relative_error(values[0], moment), [gradient]

    def on_other_samples(self, values: Sequence[Tensor]) -> float:
        """Return the loss on samples held back from calibration; without any, on those of calibration."""
        return self._relative_error(values[0], _second_moment(self._statistics.judged, self._weight))

    def _relative_error(self, values: Tensor, moment: Tensor) -> float:
        learned, nearest = (
            float((difference @ moment * difference).sum())
            for difference in (values - self._weight, self._nearest - self._weight)
        )
        return learned / max(nearest, TINY)


def _second_moment(statistics: InputStatistics, like: Tensor) -> Tensor:
    assert statistics.second_moment is not None
    return statistics.second_moment.to(like)


class AutoRound(BlockTuner):
    """State of an AutoRound run.

    Layers of a block are tuned together, layers outside of blocks one by one.
    """

    error_details: ClassVar[tuple[str, ...]] = ("autoround_error",)
    fallback: ClassVar[str] = "the weights of these layers are rounded to nearest"

    def _tune_part(self, layers: Sequence[PlannedLayer], part: ModelPart) -> None:
        if isinstance(part, RunningBlock):
            roundings, nearest = _start(layers)
            names = [f"{layer.name}.weight" for layer in layers]
            loss = BlockLoss(part, dict(zip(names, nearest, strict=True)), self._generator)
            self._tune(part.block.module_path, layers, roundings, loss)
            pairs = zip(names, layers, strict=True)
            self._unreached += [layer.name for name, layer in pairs if name not in loss.reached]
            return
        with part.collect({layer.name: [layer.module] for layer in layers}) as statistics:
            for layer in layers:
                self._tune_layer(layer, statistics[layer.name])

    def _tune_layer(self, layer: PlannedLayer, statistics: InputStatistics) -> None:
        if not statistics.tokens:
            self._unreached.append(layer.name)
            return
        roundings, nearest = _start([layer])
        weight = layer.module.weight.detach().float()
        self._tune(layer.name, [layer], roundings, _LayerLoss(weight, nearest[0], statistics))
        self._token_counts.append((statistics.tokens, int(weight.shape[1])))

    def _tune(
        self,
        name: str,
        layers: Sequence[PlannedLayer],
        roundings: Sequence[LearnedRounding],
        loss: BlockLoss | _LayerLoss,
    ) -> None:
        """Tune `roundings` of `layers` together; round to nearest where that is not worse."""
        nearest = [rounding.codes() for rounding in roundings]
        losses = sign_descent(roundings, loss, self._iterations)
        error = loss.on_other_samples([rounding.values().detach() for rounding in roundings])
        require_finite(name, math.isfinite(sum(losses) + error), "outputs")
        self._errors["autoround_error"][name] = min(error, 1.0)
        codes = [rounding.codes() for rounding in roundings] if error < 1 else nearest
        for layer, chosen in zip(layers, codes, strict=True):
            self._set_weight(layer, chosen)


def _start(layers: Sequence[PlannedLayer]) -> tuple[list[LearnedRounding], list[Tensor]]:
    """Return the learned roundings of `layers`, and the weights rounded to nearest."""
    roundings = [
        LearnedRounding(
            layer.module.weight, find_scheme(layer.scheme), layer.options, is_masked(layer.module)
        )
        for layer in layers
    ]
    return roundings, [rounding.values().detach() for rounding in roundings]
