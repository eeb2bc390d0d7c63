"""A quantized layer whose inputs are rounded to one of two values: elastic binarization, as in BiT.

Liu et al. 2022, BiT: Robustly Binarized Multi-distilled Transformer, arXiv:2205.13016, section 3.2. With a
learned scale a and a learned shift b,

    inputs of both signs      x^ =  a sign(x - b)                          in {-a, a}
    inputs that are >= 0      x^ =  a clip(round((x - b) / a), 0, 1)       in {0, a}

    dx^/da = the sign;  for {0, a}  round(q) - q for 0 <= q <= 1 with q = (x - b) / a, else the limit beyond
    it dx^/dx = -dx^/db = 1 for |x - b| <= a;  for {0, a}  for 0 <= q <= 1;  else 0

The gradient of a is that sum times 1 / sqrt(K), as in LSQ (Esser et al. 2020, arXiv:1902.08153, section 2.2:
the features of an activation). b is a number for each input, and a is one for the layer, not less than 1e-5,
as in the published code (github.com/facebookresearch/bit, transformer/utils_quant.py), which divides by the
root of all values of a batch.

It saves no time: the multiplied values are floats, or int8 blocks of them, which hold both values
exactly. No supported runtime multiplies bits with bits.

Shapes: K = inputs, N = outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smelt.quantization import emit

MIN_INPUT_SCALE = 1e-5  # minimum of a scale


class BinaryInputs(nn.Module):
    """y = coded(x^), [..., K] -> [..., N].

    coded: a QuantizedLinear; in training a layer of float weights. scale: a, float32 scalar.
    shift: b, float32 [K]. signed: whether the values are -a and a, else 0 and a.
    """

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, coded: nn.Module, signed: bool) -> None:
        """Insert a step with two values, with room for its scale and shift, before `coded`."""
        super().__init__()
        self.coded, self.signed = coded, signed
        like = next(coded.parameters()).device
        self.scale = nn.Parameter(torch.ones((), device=like))
        self.shift = nn.Parameter(torch.zeros(self.in_features, device=like))

    @property
    def in_features(self) -> int:
        """Return K."""
        return int(self.coded.in_features)  # type: ignore[arg-type]

    @property
    def out_features(self) -> int:
        """Return N."""
        return int(self.coded.out_features)  # type: ignore[arg-type]

    def init_scale(self, x: Tensor) -> None:
        """Initialize scale, shift and the two values from the layer's inputs, float [..., K].

        As in the published code (`AlphaInit`): a = 2 mean |x| for {-a, a}, 4 mean |x| for {0, a}; b = 0.
        """
        self.signed = bool((x < 0).any())
        mean = float(x.float().abs().mean())
        self.scale.data.fill_(max(MIN_INPUT_SCALE, (2 if self.signed else 4) * mean))
        self.shift.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        if torch.is_grad_enabled() and emit.export_target() is None:
            seen: Tensor = _ElasticBinarization.apply(x, self.scale, self.shift, self.signed)  # type: ignore[no-untyped-call]
        else:
            seen = binarize(x.float(), self.scale, self.shift, self.signed).to(x.dtype)
        out: Tensor = self.coded(seen)
        return out

    def extra_repr(self) -> str:
        """Return the two values, for printing."""
        return "{-a, a}" if self.signed else "{0, a}"


def binarize(x: Tensor, scale: Tensor, shift: Tensor, signed: bool) -> Tensor:
    """Return x^ of float32 `x` [..., K], with operators that a graph has too.

    Values equal to the shift become a, and values halfway between 0 and a become 0, as in round().
    """
    scale, moved = scale.clamp(min=MIN_INPUT_SCALE), x - shift
    if signed:
        return torch.where(moved >= 0, scale, -scale)
    return torch.where(moved > scale / 2, scale, torch.zeros_like(scale))


class _ElasticBinarization(torch.autograd.Function):
    """x^ of x, with the gradients above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, signed: bool) -> Tensor:
        ctx.save_for_backward(x, scale, shift)
        ctx.signed = signed
        return binarize(x.float(), scale, shift, signed).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, scale, shift = ctx.saved_tensors
        gradient = gradients[0].float()
        q = (x.float() - shift) / scale.clamp(min=MIN_INPUT_SCALE)
        if ctx.signed:
            inside, of_scale = q.abs() <= 1, torch.where(q >= 0, 1.0, -1.0)
        else:
            inside = (q >= 0) & (q <= 1)
            of_scale = q.clamp(0, 1).round() - q * inside
        passed = gradient * inside
        of_a = (gradient * of_scale).sum() / x.shape[-1] ** 0.5
        return passed.to(x.dtype), of_a, -passed.flatten(0, -2).sum(dim=0), None
