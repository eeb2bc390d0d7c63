"""Convolutions of int8 codes, and states that are rounded between them.

A convolution rounds what it reads to codes of 8 bits, and multiplies them with those of its kernel. What
blocks add up is rounded before the sum, and what a max pool reads before the pool: so ONNX Runtime keeps
codes from one convolution to the next.

    signed:    x_q = clamp(round(x / scale), -128, 127)    scale = range / 127
    else:      x_q = clamp(round(x / scale), 0, 255)       scale = range / 255

Source: Jacob et al. 2018, arXiv:1712.05877; ONNX operators QuantizeLinear, DequantizeLinear, QLinearConv.

Shapes: B = batch, S = channels in, T = channels out, h, w = height and width, D = taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.core.errors import InputError
from smelt.runtime.layers import emit, emit_static
from smelt.runtime.layers.matrix import Matrix
from smelt.runtime.schemes.scheme import REFUSED_CONVOLUTIONS

_ENDS = {True: (-128, 127), False: (0, 255)}
_SCALE = "input_scale"


class QuantizedConv2d(nn.Module):
    """A convolution of codes: its kernel is a matrix [T, S * D * D] of a scheme.

    signed: whether what it reads may be negative.
    """

    def __init__(self, like: nn.Conv2d, matrix: Matrix) -> None:
        super().__init__()
        if like.padding_mode != "zeros" or isinstance(like.padding, str):
            raise InputError(
                f"scheme {matrix.scheme.name}: only convolutions that are padded with zeros.",
                code="unsupported-layer",
            )
        self.in_channels, self.out_channels = like.in_channels, like.out_channels
        self.shape = tuple(like.weight.shape)
        self.how: dict[str, Any] = {
            "stride": like.stride,
            "padding": like.padding,
            "dilation": like.dilation,
            "groups": like.groups,
        }
        self.matrix, self.signed = matrix, True
        bias = torch.zeros(like.out_channels, device=matrix.codes.device)
        self.bias = nn.Parameter(bias) if like.bias is not None else None

    def set_range_(self, largest: float) -> None:
        """Let what it reads lie between -`largest`, or 0, and `largest`."""
        _, high = _ENDS[self.signed]
        self.matrix.set_range_(largest * 127 / high)  # the scheme's scale is for codes to 127

    def codes_of(self, x: Tensor) -> Tensor:
        """Return the codes of float32 [B, S, h, w], as float32."""
        return x.div(self.matrix.tensor(_SCALE)).round_().clamp_(*_ENDS[self.signed])

    def seen(self, x: Tensor) -> Tensor:
        """Return what the codes of float [B, S, h, w] stand for."""
        return (self.codes_of(x.float()) * self.matrix.tensor(_SCALE)).to(x.dtype)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of `x` with a kernel that is given as a matrix [T, S * D * D]."""
        return F.conv2d(x, weight.view(self.shape), bias, **self.how)

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [B, S, h, w] to float32 [B, T, h', w']."""
        matrix, target = self.matrix, emit.export_target()
        scale = matrix.tensor(_SCALE)
        if target is not None:
            if target in REFUSED_CONVOLUTIONS:
                raise InputError(f"onnx: {REFUSED_CONVOLUTIONS[target]}.", code="unsupported-target")
            kernel = emit_static.dequantized_rows(matrix.tensor("kernel"), matrix.tensor("scales"))
            return F.conv2d(emit_static.rounded(x, scale, self.signed), kernel, self.bias, **self.how)
        sums = self.convolve(self.codes_of(x), matrix.tensor("codes").float(), None)
        out = sums * (matrix.tensor("scales") * scale)[:, None, None]
        return out if self.bias is None else out + self.bias[:, None, None]

    def exact(self, x: Tensor) -> Tensor:
        """Return the same with whole activations."""
        return self.convolve(x, self.matrix.dequantize(), self.bias)

    def prepare_export(self, target: str) -> None:
        """Keep the codes in the form that a graph wants."""
        if not self.matrix.has("kernel"):
            kernel = self.matrix.tensor("codes").detach().view(self.shape)
            self.matrix.register_buffer("kernel", kernel, persistent=False)

    def extra_repr(self) -> str:
        """Say the sizes and the scheme."""
        return f"{self.in_channels}, {self.out_channels}, signed={self.signed}, {self.matrix.said()}"


class Rounded(nn.Module):
    """States that become what codes stand for before `inner` reads them.

    inner: nothing, or a max pool. scale: float32 scalar.
    """

    scale: Tensor

    def __init__(self, inner: nn.Module, signed: bool, device: torch.device | None = None) -> None:
        super().__init__()
        if not isinstance(inner, nn.Identity | nn.MaxPool2d):
            raise TypeError("it is neither nothing nor a max pool")
        self.inner, self.signed = inner, signed
        self.register_buffer("scale", torch.ones((), device=device))

    def set_range_(self, largest: float) -> None:
        """Let states lie between -`largest`, or 0, and `largest`."""
        _, high = _ENDS[self.signed]
        # as a scheme computes it, so that what reads the same states has the same scale
        scale = torch.tensor(largest * 127 / high, dtype=torch.float32) / 127
        self.scale = scale if scale > 0 else torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [B, S, h, w] to what `inner` makes of its codes; gradients pass straight through."""
        if emit.export_target() is not None:
            seen = emit_static.rounded(x, self.scale, self.signed)
        else:
            with torch.no_grad():
                seen = x.div(self.scale).round_().clamp_(*_ENDS[self.signed]).mul_(self.scale)
            seen = x + (seen - x).detach() if torch.is_grad_enabled() and x.requires_grad else seen
        out: Tensor = self.inner(seen)
        return out

    def exact(self, x: Tensor) -> Tensor:
        """Return the same with whole states."""
        out: Tensor = self.inner(x)
        return out
