"""Layers of integer codes and scales that compute in torch what the runtime will compute.

Scheme `int8-dynamic`. Weights: int8 per output channel, symmetric, scale = amax / 127. Activations:
uint8, asymmetric, one scale and zero point for the tensor of the whole batch, found while running,
as the ONNX operator DynamicQuantizeLinear (opset 11) defines it:

    scale = (max(0, max x) - min(0, min x)) / 255
    zero  = clamp(round(0 - min(0, min x) / scale), 0, 255)
    x_q   = clamp(round(x / scale) + zero, 0, 255)                       round half to even

Products are summed in int32, then y = (scale * weight scale) * sum + bias.

Shapes: K = inputs, N = outputs, V = rows of an embedding, D = its width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.core.errors import InputError
from smelt.runtime import emit

SCHEMES = ("int8-dynamic",)


class Int8Matrix(nn.Module):
    """A matrix of int8 codes with one scale for each row: value = code * scale.

    A module of its own, so that an embedding and the output head tied to it can hold the very same
    one (edit `share`). codes: int8 [rows, columns]; scales: float32 [rows].
    """

    columns: Tensor | None

    def __init__(self, rows: int, columns: int, device: torch.device | None = None) -> None:
        super().__init__()
        codes = torch.zeros(rows, columns, dtype=torch.int8, device=device)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(torch.ones(rows, device=device), requires_grad=False)
        self.register_buffer("columns", None, persistent=False)
        self._sums: tuple[int, Tensor] | None = None

    def quantize_(self, weight: Tensor) -> None:
        """Decide codes and scales for `weight`, float [rows, columns]; rows of zeros get scale 1."""
        amax = weight.detach().float().abs().amax(dim=1)
        scales = torch.where(amax > 0, amax / 127, torch.ones_like(amax))
        codes = torch.round(weight.detach().float() / scales[:, None]).clamp(-127, 127)
        self.scales.data, self.codes.data, self._sums = scales, codes.to(torch.int8), None

    def dequantize(self) -> Tensor:
        """Return the values, float32 [rows, columns]."""
        return self.codes.float() * self.scales[:, None]

    def row_sums(self) -> Tensor:
        """Return the sum of each row's codes, int32 [rows]; computed once for the same memory."""
        place = self.codes.data_ptr()
        if self._sums is None or self._sums[0] != place:
            self._sums = (place, self.codes.sum(dim=1, dtype=torch.int32))
        return self._sums[1]

    def prepare_export(self) -> None:
        """Keep the codes transposed, [columns, rows], as matrix products of ONNX want them."""
        if self.columns is None:
            self.columns = self.codes.detach().t().contiguous()


class QuantizedLinear(nn.Module):
    """y = x W^T + b with int8 weights and int8 activations found while running."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, scheme: str, device: torch.device | None = None
    ) -> None:
        super().__init__()
        _check(scheme)
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self.matrix = Int8Matrix(out_features, in_features, device)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [..., K] to float32 [..., N]."""
        if emit.export_target() is not None:
            assert self.matrix.columns is not None, "prepare_export comes before the export"
            return emit.dynamic_quantize_matmul(x, self.matrix.columns, self.matrix.scales, self.bias)
        rows = x.detach().reshape(-1, self.in_features)
        scale, zero = activation_range(rows)
        # torch multiplies int8 by int8: take 128 off the codes, give it back with the zero point
        shifted = rows.div(scale).round_().add_(zero - 128).clamp_(-128, 127).to(torch.int8)
        sums = torch._int_mm(shifted, self.matrix.codes.t())
        sums = torch.add(sums, self.matrix.row_sums(), alpha=128 - zero)
        out = sums.float().mul_(self.matrix.scales * scale)
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Say the sizes and the scheme."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.scheme}"


class QuantizedEmbedding(nn.Module):
    """An embedding of int8 rows, dequantized when looked up; a row of zeros stays one."""

    def __init__(
        self, rows: int, width: int, padding_idx: int | None, scheme: str, device: torch.device | None = None
    ) -> None:
        super().__init__()
        _check(scheme)
        self.num_embeddings, self.embedding_dim, self.padding_idx = rows, width, padding_idx
        self.scheme = scheme
        self.matrix = Int8Matrix(rows, width, device)

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 [...] to float32 [..., D]."""
        columns = self.matrix.columns
        if emit.export_target() is not None and columns is not None:
            # the head of the same graph holds the transposed matrix: look up in it, store it once
            codes = columns.index_select(1, ids.flatten()).t().reshape(*ids.shape, self.embedding_dim)
        else:
            codes = F.embedding(ids, self.matrix.codes)
        return codes.float() * F.embedding(ids, self.matrix.scales[:, None])

    def extra_repr(self) -> str:
        """Say the sizes and the scheme."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.scheme}"


def activation_range(x: Tensor) -> tuple[float, int]:
    """Return the scale (a float32 number) and the zero point that DynamicQuantizeLinear finds for `x`."""
    low, high = (np.float32(t.item()) for t in torch.aminmax(x))
    low, high = min(low, np.float32(0)), max(high, np.float32(0))
    scale = (high - low) / np.float32(255) or np.float32(1)
    return float(scale), int(np.clip(np.rint(-low / scale), 0, 255))


def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, float, int]:
    """Quantize float32 `x` as ONNX's DynamicQuantizeLinear does.

    Returns:
        Codes (uint8) in the shape of `x`, the scale, the zero point.
    """
    scale, zero = activation_range(x)
    return x.div(scale).round_().add_(zero).clamp_(0, 255).to(torch.uint8), scale, zero


def empty_quantized(module: nn.Module, scheme: str) -> nn.Module:
    """Return the quantized counterpart of `module` with room for its codes, on the same device.

    Raises:
        InputError: an unknown scheme, or neither a Linear nor an Embedding.
    """
    if isinstance(module, nn.Linear):
        device = module.weight.device
        return QuantizedLinear(
            module.in_features, module.out_features, module.bias is not None, scheme, device
        )
    if type(module) is nn.Embedding:
        device = module.weight.device
        return QuantizedEmbedding(
            module.num_embeddings, module.embedding_dim, module.padding_idx, scheme, device
        )
    raise InputError(f"a {type(module).__name__} cannot be quantized; expected a Linear or an Embedding.")


def quantize_module(module: nn.Module, scheme: str) -> QuantizedLinear | QuantizedEmbedding:
    """Return the quantized counterpart of `module` with codes and scales decided from its weight."""
    new = empty_quantized(module, scheme)
    assert isinstance(new, QuantizedLinear | QuantizedEmbedding)
    weight = module.weight
    assert isinstance(weight, Tensor)
    new.matrix.quantize_(weight)
    if isinstance(new, QuantizedLinear) and new.bias is not None:
        assert isinstance(module.bias, Tensor)
        new.bias.data = module.bias.detach().clone()
    return new.train(module.training)


def _check(scheme: str) -> None:
    if scheme not in SCHEMES:
        raise InputError(f"unknown quantization scheme '{scheme}'. Known: {', '.join(SCHEMES)}.")
