"""Learned step sizes (LSQ): scales of quantized weights and activations train with the weights.

Esser et al. 2020, Learned Step Size Quantization, arXiv:1902.08153. With q = v / s and limits -Q_N and Q_P,

    v^ = s clip(round(q), -Q_N, Q_P)                                                    equations 1 and 2
    dv^/ds = round(q) - q    -Q_N < q < Q_P,    else the exceeded limit                 equation 3
    dv^/dv = 1               -Q_N < q < Q_P,    else 0                                  equation 5

The gradient of a step is that sum times 1 / sqrt(N Q_P), with N the number of weights that share it, or of
the features of an activation (section 2.2). Zero points are trained like the offsets of LSQ+ (Bhalgat et al.
2020, arXiv:2004.09576, equations 4 and 5): dv^/dz = -s beyond a limit, else 0.

Differences from the paper: a step starts at the stored scale, so that training starts from the scored model
(the paper's initial value 2 mean |v| / sqrt(Q_P) suits few bits: with 8 it would reach to 22 mean |v|). AdamW
moves each parameter by its learning rate, whatever the size of its gradient. Therefore the trained parameters
are the logarithm of the step relative to its initial value, and the zero point relative to the range: one
learning rate then suits scales of 0.0005 and of 0.05. In the forward pass a step is rounded as it is stored.

Shapes: N = outputs (rows), K = inputs, g = inputs that share a scale, G = groups of a row.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.quantize.plan_layers import WeightQuantizer, round_on_grid, straight_through
from smelt.quantization.groupwise import safe_reciprocal, split_into_groups
from smelt.quantization.layers import QuantizedMatrix
from smelt.quantization.scheme import QuantParams, Scheme, SchemeOptions, UnpackedWeights


class _LsqFunction(torch.autograd.Function):
    """Quantized values, with LSQ's gradients for the weights, steps and zero points."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, s: Tensor, z: Tensor | None, values: Tensor, low: Any, high: Any, share: Any
    ) -> Tensor:
        """Return `values`, the dequantized values of `v`.

        v and values: float32 [N, G, g]. s and z: float32 [N, G], z None if zero is fixed. low and high: the
        limits in steps, broadcast over `v`. share: factor of the step gradients.
        """
        ctx.save_for_backward(v, s, values)
        ctx.ends, ctx.share, ctx.zeros = (low, high), share, z is not None
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of v, s and z."""
        v, s, values = ctx.saved_tensors
        (gradient,), (low, high) = gradients, ctx.ends
        per_step = safe_reciprocal(s)[..., None]
        q = v * per_step
        within_limits = (q > low) & (q < high)
        of_step = values * per_step - q * within_limits  # beyond a limit the value is that limit
        of_s = (gradient * of_step).sum(dim=-1) * ctx.share
        of_z = -(gradient * s[..., None] * ~within_limits).sum(dim=-1) * ctx.share if ctx.zeros else None
        return gradient * within_limits, of_s, of_z, None, None, None, None


class ActivationStepSize(nn.Module):
    """The learned step of the activations of linear layers with the same inputs.

    Args:
        first: the stored scale, float32 scalar.
        low, high: the smallest and the largest activation in steps.
    """

    first: Tensor

    def __init__(self, first: Tensor, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.register_buffer("first", first.detach().clone())
        self.log = nn.Parameter(torch.zeros(1))

    def scale(self) -> Tensor:
        """Return the present step, float32 [1]."""
        return self.first * self.log.exp()

    def forward(self, x: Tensor) -> Tensor:
        """Return the fake-quantized activations [..., K], with gradients for the step."""
        scale = self.scale()
        v = x.float().reshape(1, 1, -1)
        values = (v.detach() / scale.detach()).round_().clamp_(self.low, self.high) * scale.detach()
        share = 1 / math.sqrt(x.shape[-1] * max(self.high, -1 - self.low))
        s = scale.reshape(1, 1)
        out: Tensor = _LsqFunction.apply(v, s, None, values, self.low, self.high, share)  # type: ignore[no-untyped-call]
        return out.reshape(x.shape).to(x.dtype)


class StepSizes(nn.Module):
    """The learned steps, and zero points, of one matrix.

    Args:
        matrix: a matrix whose scheme has limits; its grid is the initial one.
    """

    first: Tensor

    def __init__(self, matrix: QuantizedMatrix) -> None:
        super().__init__()
        self._matrix = [matrix]  # in a list, so that it is not registered as a submodule
        stored = matrix.scheme.stored_tensors(len(matrix.codes), matrix.width, matrix.options)["scales"]
        self._kind: torch.dtype = getattr(torch, stored.file_dtype or stored.dtype)
        grid = matrix.unpack().qparams
        self.register_buffer("first", grid["scales"].detach().clone())
        self.whole = matrix.scheme.is_per_tensor(matrix.options)  # one step for all rows
        self.log = nn.Parameter(torch.zeros_like(self.first[:1] if self.whole else self.first))
        low, high = self._ends(grid)
        self.span = float(torch.as_tensor(high - low).max())
        self.largest = self.span if "zeros" in grid else float(torch.as_tensor(high).max())  # Q_P
        zeros = grid["zeros"][: len(self.log)] if "zeros" in grid else None
        self.offset = None if zeros is None else nn.Parameter(zeros.float() / self.span)
        self.range: ActivationStepSize | None = None

    @property
    def matrix(self) -> QuantizedMatrix:
        """The matrix before the training."""
        return self._matrix[0]

    def fake_quantize(self, weight: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the fake-quantized `weight`, with gradients for the steps.

        Args:
            weight: float [R, K], all rows of the matrix or only `rows`.
            rows: int64 [R].

        Returns:
            float32 [R, K].
        """
        scheme, options, width = self.matrix.scheme, self.matrix.options, self.matrix.width
        groups = split_into_groups(weight.float(), scheme.group_size(width, options))
        scales, zeros = self._grid(rows)
        with torch.no_grad():
            grid = _make_grid(scales, zeros)
            codes = scheme.quantize(groups.detach(), grid, options)
            values = scheme.dequantize(codes, grid, options)
            low, high = self._ends(grid)
        out: Tensor = _LsqFunction.apply(groups, scales, zeros, values, low, high, self._share(groups))  # type: ignore[no-untyped-call]
        return out.flatten(1)[:, :width]

    def fake_quantize_activations(self, x: Tensor) -> Tensor:
        """Return the fake-quantized activations for a layer with the matrix, [..., K]."""
        if self.range is not None:
            return self.range(x)  # type: ignore[no-any-return]
        with torch.no_grad():
            quantized = self.matrix.scheme.fake_quantize_activations(self.matrix, x)
        return x if quantized is x else straight_through(x, quantized)

    def quantizer(self) -> WeightQuantizer:
        """Return the quantizer that rounds to the learned grid."""
        with torch.no_grad():
            return partial(_round_on_fixed_grid, _make_grid(*self._grid(None)))

    def store_range(self, matrix: QuantizedMatrix) -> None:
        """Store the learned activation scale in `matrix`, the one of these steps or a copy."""
        if self.range is not None:
            matrix.set_activation_scale_(float(self.range.scale().detach()))

    def scale_changes(self) -> Tensor:
        """Return the ratio of each scale to its initial value, float32 [N, G], per tensor [1, G]."""
        return self.log.detach().exp()

    def _grid(self, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return steps and zero points of `rows` or of all rows, rounded as they are stored."""

        def taken(part: Tensor) -> Tensor:
            return part if rows is None else F.embedding(rows, part)

        scales = taken(self.first) * (self.log if self.whole else taken(self.log)).exp()
        scales = straight_through(scales, scales.to(self._kind).float())
        if self.offset is None:
            return scales, None
        zeros = (self.offset.expand_as(scales) if self.whole else taken(self.offset)) * self.span
        return scales, straight_through(zeros, zeros.round().clamp(0, self.span))

    def _ends(self, grid: QuantParams) -> tuple[Any, Any]:
        limits = self.matrix.scheme.code_range(grid, self.matrix.options)
        assert limits is not None
        return limits

    def _share(self, groups: Tensor) -> Tensor:
        """Return 1 / sqrt(N Q_P) for each group, [G]; padding of the last group does not count."""
        counts = groups.new_full((groups.shape[1],), float(groups.shape[2]))
        counts[-1] -= groups.shape[1] * groups.shape[2] - self.matrix.width
        num_rows = len(self.first) if self.whole else 1
        return (counts * num_rows * self.largest).rsqrt()


def _make_grid(scales: Tensor, zeros: Tensor | None) -> dict[str, Tensor]:
    """Return a grid in the format of schemes."""
    grid = {"scales": scales.detach()}
    return grid if zeros is None else grid | {"zeros": zeros.detach().byte()}


def _round_on_fixed_grid(
    grid: QuantParams, weight: Tensor, scheme: Scheme, options: SchemeOptions
) -> UnpackedWeights:
    """Return `weight` rounded to nearest on `grid`; a `WeightQuantizer`."""
    on_device = {name: tensor.to(weight.device) for name, tensor in grid.items()}
    return round_on_grid(lambda *_: on_device, weight, scheme, options)
