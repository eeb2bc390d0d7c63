"""Learned step sizes: the scales of codes train with the weights, as LSQ has it.

Esser et al. 2020, Learned Step Size Quantization, arXiv:1902.08153. With q = v / s and ends -Q_N and Q_P,

    v^ = s clip(round(q), -Q_N, Q_P)                                                    equations 1 and 2
    dv^/ds = round(q) - q    -Q_N < q < Q_P,    else the end that q is beyond           equation 3
    dv^/dv = 1               -Q_N < q < Q_P,    else 0                                  equation 5

The gradient of a step is that sum times 1 / sqrt(N Q_P), N being the number of weights that share it, or of
the features of an activation (section 2.2). Zero points, where codes have them, train too, as the offsets of
LSQ+ do (Bhalgat et al. 2020, arXiv:2004.09576, equations 4 and 5): dv^/dz = -s beyond an end, else 0.

What is ours: a step begins as the scale that is stored, so that a training begins with the model that was
scored (2 mean |v| / sqrt(Q_P), the paper's first value, suits few bits: 8 would reach to 22 mean |v|).
Since AdamW moves each parameter by its learning rate, whatever the size of its gradient, what it moves is
the logarithm of the step against its first value, and the zero point in parts of the range: one learning
rate then means the same for scales of 0.0005 and of 0.05. And forwards a step is rounded as it is stored.

Shapes: N = outputs (rows), K = inputs, g = inputs that share a scale, G = groups of a row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.quantize.coding import Coder, nearest_on
from smelt.compress.quantize.training.straight_through import straight_through
from smelt.runtime.layers.matrix import Matrix
from smelt.runtime.schemes.parts.groups import groups_of, inverse
from smelt.runtime.schemes.scheme import Codes, Grid, Options, Scheme


class _Learned(torch.autograd.Function):
    """The values of codes, with LSQ's gradients to what they stand for, their steps and zero points."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, s: Tensor, z: Tensor | None, values: Tensor, low: Any, high: Any, share: Any
    ) -> Tensor:
        """Return `values`, those of the codes of `v`.

        v and values: float32 [N, G, g]. s and z: float32 [N, G], z None where zero is fixed. low and high:
        the ends, in steps, as they broadcast over `v`. share: what gradients of steps are multiplied by.
        """
        ctx.save_for_backward(v, s, values)
        ctx.ends, ctx.share, ctx.zeros = (low, high), share, z is not None
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of v, s and z."""
        v, s, values = ctx.saved_tensors
        (gradient,), (low, high) = gradients, ctx.ends
        per_step = inverse(s)[..., None]
        q = v * per_step
        inside = (q > low) & (q < high)
        of_step = values * per_step - q * inside  # beyond an end the code is that end
        of_s = (gradient * of_step).sum(dim=-1) * ctx.share
        of_z = -(gradient * s[..., None] * ~inside).sum(dim=-1) * ctx.share if ctx.zeros else None
        return gradient * inside, of_s, of_z, None, None, None, None


class RangeStep(nn.Module):
    """The learned step of the activations of products that read the same states.

    Args:
        first: the scale that is stored, float32 scalar.
        low, high: the smallest and the largest code.
    """

    first: Tensor

    def __init__(self, first: Tensor, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.register_buffer("first", first.detach().clone())
        self.log = nn.Parameter(torch.zeros(()))

    def scale(self) -> Tensor:
        """Return the step as it is now, float32 scalar."""
        return self.first * self.log.exp()

    def forward(self, x: Tensor) -> Tensor:
        """Return what is left of activations [..., K], and learn from it."""
        scale = self.scale()
        v = x.float().reshape(1, 1, -1)
        values = (v.detach() / scale.detach()).round_().clamp_(self.low, self.high) * scale.detach()
        share = 1 / math.sqrt(x.shape[-1] * self.high)
        s = scale.reshape(1, 1)
        out: Tensor = _Learned.apply(v, s, None, values, self.low, self.high, share)  # type: ignore[no-untyped-call]
        return out.reshape(x.shape).to(x.dtype)


class Steps(nn.Module):
    """The learned steps, and zero points, of one matrix.

    Args:
        matrix: whose scheme has ends (`Scheme.ends`); its grid is the first one.
    """

    first: Tensor

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self._matrix = [matrix]  # in a list: it is no part of what trains
        stored = matrix.scheme.storage(len(matrix.codes), matrix.width, matrix.options)["scales"]
        self._kind: torch.dtype = getattr(torch, stored.filed or stored.dtype)
        grid = matrix.decided().grid
        self.register_buffer("first", grid["scales"].detach().clone())
        self.whole = matrix.scheme.whole(matrix.options)  # then one step learns for all rows
        self.log = nn.Parameter(torch.zeros_like(self.first[:1] if self.whole else self.first))
        low, high = self._ends(grid)
        self.span = float(torch.as_tensor(high - low).max())
        self.largest = self.span if "zeros" in grid else float(torch.as_tensor(high).max())  # Q_P
        self.offset = nn.Parameter(grid["zeros"].float() / self.span) if "zeros" in grid else None
        self.range: RangeStep | None = None

    @property
    def matrix(self) -> Matrix:
        """The matrix, as it was before the training."""
        return self._matrix[0]

    def fake(self, weight: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return what codes of `weight` would stand for, and learn from it.

        Args:
            weight: float [R, K], all rows of the matrix or those that `rows` names.
            rows: int64 [R].

        Returns:
            float32 [R, K].
        """
        scheme, options, width = self.matrix.scheme, self.matrix.options, self.matrix.width
        groups = groups_of(weight.float(), scheme.group(width, options))
        scales, zeros = self._grid(rows)
        with torch.no_grad():
            grid = _as_stored(scales, zeros)
            codes = scheme.nearest(groups.detach(), grid, options)
            values = scheme.values(codes, grid, options)
            low, high = self._ends(grid)
        out: Tensor = _Learned.apply(groups, scales, zeros, values, low, high, self._share(groups))  # type: ignore[no-untyped-call]
        return out.flatten(1)[:, :width]

    def seen(self, x: Tensor) -> Tensor:
        """Return the activations that a product of the matrix trains on, [..., K]."""
        if self.range is not None:
            return self.range(x)  # type: ignore[no-any-return]
        with torch.no_grad():
            seen = self.matrix.scheme.seen_in_training(self.matrix, x)
        return x if seen is x else straight_through(x, seen)

    def coder(self) -> Coder:
        """Return what decides codes on the grid that was learned."""
        with torch.no_grad():
            grid = _as_stored(*self._grid(None))

        def decide(weight: Tensor, scheme: Scheme, options: Options) -> Codes:
            there = {name: part.to(weight.device) for name, part in grid.items()}
            return nearest_on(lambda *_: there, weight, scheme, options)

        return decide

    def put_range(self, matrix: Matrix) -> None:
        """Give `matrix`, the one of these steps or a copy, the range of activations that was learned."""
        if self.range is not None:
            matrix.set_range_(float(self.range.scale().detach() * self.range.high))

    def moved(self) -> Tensor:
        """Return by which factor each scale is another than at first, float32 [N, G], or [1, G] of all."""
        return self.log.detach().exp()

    def _grid(self, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return steps and zero points, each rounded as it is stored, of `rows` or of all."""

        def taken(part: Tensor) -> Tensor:
            return part if rows is None else F.embedding(rows, part)

        scales = taken(self.first) * (self.log if self.whole else taken(self.log)).exp()
        scales = straight_through(scales, scales.to(self._kind).float())
        if self.offset is None:
            return scales, None
        zeros = taken(self.offset) * self.span
        return scales, straight_through(zeros, zeros.round().clamp(0, self.span))

    def _ends(self, grid: Grid) -> tuple[Any, Any]:
        ends = self.matrix.scheme.ends(grid, self.matrix.options)
        assert ends is not None
        return ends

    def _share(self, groups: Tensor) -> Tensor:
        """Return 1 / sqrt(N Q_P) for each group, [G]; what fills up the last one of a row does not count."""
        counts = groups.new_full((groups.shape[1],), float(groups.shape[2]))
        counts[-1] -= groups.shape[1] * groups.shape[2] - self.matrix.width
        rows = len(self.first) if self.whole else 1
        return (counts * rows * self.largest).rsqrt()


def _as_stored(scales: Tensor, zeros: Tensor | None) -> dict[str, Tensor]:
    """Return a grid as schemes have it."""
    found = {"scales": scales.detach()}
    return found if zeros is None else found | {"zeros": zeros.detach().byte()}
