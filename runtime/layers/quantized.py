"""Layers of integer codes and scales that compute in torch what the runtime will compute.

Here: the scheme `int8-dynamic`, and what all schemes share. The others: quantized_int4.py,
quantized_binary.py. Which codes and scales a layer gets is decided in compress/quantize.

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

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.core.errors import InputError, nearest
from smelt.runtime.layers import emit
from smelt.runtime.layers.quantized_binary import BinaryLinear, BinaryMatrix
from smelt.runtime.layers.quantized_int4 import Int4Embedding, Int4Linear, Int4Matrix

# products of two int8 numbers that float32 adds up without rounding: 1024 * 128 * 128 is 2^24
_EXACT_TERMS = 1024
SCHEMES = ("int8-dynamic", "int4", "binary")


class Int8Matrix(nn.Module):
    """A matrix of int8 codes with one scale for each row: value = code * scale.

    A module of its own, so that an embedding and the output head tied to it can hold the very same
    one (edit `share`). codes: int8 [rows, columns]; scales: float32 [rows].
    """

    columns: Tensor | None
    lookup: Tensor | None

    def __init__(self, rows: int, columns: int, device: torch.device | None = None) -> None:
        super().__init__()
        codes = torch.zeros(rows, columns, dtype=torch.int8, device=device)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(torch.ones(rows, device=device), requires_grad=False)
        self.register_buffer("columns", None, persistent=False)
        self.register_buffer("lookup", None, persistent=False)
        self._sums: tuple[int, Tensor] | None = None

    def set_(self, codes: Tensor, scales: Tensor) -> None:
        """Take over what a method decided: int8 [rows, columns] and float32 [rows]."""
        self.codes.data, self.scales.data, self._sums = codes, scales, None

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

    def prepare_lookup(self) -> None:
        """Keep the scales as [rows, 1], as a lookup wants them: so their name in the graph is their own."""
        if self.lookup is None:
            self.lookup = self.scales.detach()[:, None].clone()


class QuantizedLinear(nn.Module):
    """y = x W^T + b with int8 weights and int8 activations found while running."""

    weight = None  # T5 asks its layers for the type of their weight, and goes on where there is none

    def __init__(
        self, in_features: int, out_features: int, bias: bool, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.matrix = Int8Matrix(out_features, in_features, device)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device)) if bias else None

    def options(self) -> dict[str, int | bool]:
        """Return what the structure says of this layer besides its scheme: nothing."""
        return {}

    def like(self, out_features: int, bias: bool) -> QuantizedLinear:
        """Return a layer of the same kind with other outputs, on the meta device."""
        return QuantizedLinear(self.in_features, out_features, bias, torch.device("meta"))

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [..., K] to float32 [..., N]."""
        if emit.export_target() is not None:
            assert self.matrix.columns is not None, "prepare_export comes before the export"
            return emit.dynamic_quantize_matmul(x, self.matrix.columns, self.matrix.scales, self.bias)
        rows = x.detach().reshape(-1, self.in_features)
        scale, zero = activation_range(rows)
        # torch multiplies int8 by int8: take 128 off the codes, give it back with the zero point
        shifted = rows.div(scale).round_().add_(zero - 128).clamp_(-128, 127).to(torch.int8)
        sums = int8_product(shifted, self.matrix.codes)
        sums = torch.add(sums, self.matrix.row_sums(), alpha=128 - zero)
        out = sums.float().mul_(self.matrix.scales * scale)
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Say the sizes and the scheme."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, int8-dynamic"


class QuantizedEmbedding(nn.Module):
    """An embedding of int8 rows, dequantized when looked up; a row of zeros stays one."""

    def __init__(
        self, rows: int, width: int, padding_idx: int | None, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = rows, width, padding_idx
        self.matrix = Int8Matrix(rows, width, device)

    def options(self) -> dict[str, int | bool]:
        """Return what the structure says of this layer besides its scheme: nothing."""
        return {}

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 [...] to float32 [..., D]."""
        columns = self.matrix.columns
        if emit.export_target() is not None and columns is not None:
            # the head of the same graph holds the transposed matrix: store it once. Rows are looked up in
            # what the runtime makes of it, since a row of a column's matrix lies all over the memory (an
            # eighth of a step of a small Marian)
            codes = F.embedding(ids, emit.transposed(columns))
        else:
            codes = F.embedding(ids, self.matrix.codes)
        scales = self.matrix.scales[:, None] if self.matrix.lookup is None else self.matrix.lookup
        return codes.float() * F.embedding(ids, scales)

    def extra_repr(self) -> str:
        """Say the sizes and the scheme."""
        return f"{self.num_embeddings}, {self.embedding_dim}, int8-dynamic"


def int8_product(x: Tensor, codes: Tensor) -> Tensor:
    """Return x W^T exactly, int32 [rows, N], for int8 x [rows, K] and codes W [N, K]."""
    if multiplies_exactly():
        return torch._int_mm(x, codes.t())
    sums = torch.zeros(x.shape[0], codes.shape[0], dtype=torch.int32)
    for at in range(0, x.shape[1], _EXACT_TERMS):
        part = slice(at, at + _EXACT_TERMS)
        sums += F.linear(x[:, part].float(), codes[:, part].float()).to(torch.int32)
    return sums


@cache
def multiplies_exactly() -> bool:
    """Say whether torch sums int8 products in 32 bits here.

    On x86 processors without VNNI instructions its library adds pairs of them in 16 bits first, where large
    ones overflow: of random codes 99 % of the sums were wrong.
    """
    exact = True
    for rows in (1, 32):  # other kernels serve single rows
        ones = torch.full((rows, 64), 127, dtype=torch.int8)
        found = torch._int_mm(ones, torch.full((64, 32), 127, dtype=torch.int8))
        exact = exact and bool((found == 64 * 127 * 127).all())
    return exact


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


AnyLinear: TypeAlias = QuantizedLinear | Int4Linear | BinaryLinear
AnyEmbedding: TypeAlias = QuantizedEmbedding | Int4Embedding
LINEAR: dict[str, Callable[..., AnyLinear]] = {
    "int8-dynamic": QuantizedLinear,
    "int4": Int4Linear,
    "binary": BinaryLinear,
}
EMBEDDING: dict[str, Callable[..., AnyEmbedding]] = {
    "int8-dynamic": QuantizedEmbedding,
    "int4": Int4Embedding,
}


def is_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Say whether `module` looks rows up and does no more, but for BART's factor `embed_scale`."""
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    return type(module) is nn.Embedding or scaled


def keep_scale(new: nn.Module, old: nn.Module) -> None:
    """Let `new`, which takes the place of the embedding `old`, multiply its rows by the same factor."""
    scale: float = getattr(old, "embed_scale", 1.0)
    if scale != 1.0:
        setattr(new, "embed_scale", scale)  # noqa: B010  (nn.Module's attributes are typed as modules)
        new.register_forward_hook(partial(_times, scale))


def _times(scale: float, module: nn.Module, inputs: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    return rows * scale


def scheme_of(module: nn.Module) -> str | None:
    """Return the scheme of a quantized layer, None for any other module."""
    kinds = [*LINEAR.items(), *EMBEDDING.items()]
    return next((scheme for scheme, kind in kinds if type(module) is kind), None)


def empty_quantized(module: nn.Module, scheme: str, **options: int | bool) -> AnyLinear | AnyEmbedding:
    """Return the quantized counterpart of `module` with room for its codes, on the same device.

    Args:
        module: a Linear or an Embedding.
        scheme: how its weights are stored.
        options: what the scheme wants to know besides: group_size and accuracy_level (int4, binary),
            symmetric (int4).

    Raises:
        InputError: an unknown scheme or option, or a module that the scheme does not know.
    """
    if scheme not in SCHEMES:
        known = f"Known: {', '.join(SCHEMES)}.{nearest(scheme, SCHEMES)}"
        raise InputError(f"unknown quantization scheme '{scheme}'. {known}")
    try:
        if isinstance(module, nn.Linear):
            bias, device = module.bias is not None, module.weight.device
            linear: AnyLinear = LINEAR[scheme](
                module.in_features, module.out_features, bias, device, **options
            )
            return linear
        if is_table(module) and scheme in EMBEDDING:
            rows, width, device = module.num_embeddings, module.embedding_dim, module.weight.device
            table: AnyEmbedding = EMBEDDING[scheme](rows, width, module.padding_idx, device, **options)
            keep_scale(table, module)
            return table
    except TypeError as error:
        raise InputError(f"scheme {scheme} cannot be made with {options}: {error}") from error
    fit = "a Linear" if scheme not in EMBEDDING else "a Linear or an Embedding"
    raise InputError(f"scheme {scheme}: a {type(module).__name__} cannot be quantized; expected {fit}.")


def matrix_types(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the types in which codes and scales are stored, by tensor name.

    Scales of groups are float16; those of int8's rows float32, as the runtime multiplies by them.
    """
    types = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Int8Matrix | Int4Matrix | BinaryMatrix):
            for part, tensor in module.named_parameters():
                half = part == "scales" and not isinstance(module, Int8Matrix)
                types[f"{name}.{part}"] = torch.float16 if half else tensor.dtype
    return types


def matrix_bytes(model: nn.Module) -> int:
    """Return the bytes that the codes and scales of `model` take in a file, shared ones counted once."""
    types = matrix_types(model)
    return sum(p.numel() * types[n].itemsize for n, p in model.named_parameters() if n in types)


def joined(linears: Sequence[nn.Module]) -> AnyLinear | None:
    """Return several quantized layers of one input as one, or None where they are not of one kind."""
    parts = [m for m in linears if isinstance(m, AnyLinear)]
    first = parts[0] if parts else None
    if first is None or len(parts) < len(linears):
        return None  # low-rank factors, or a layer that quantization skipped
    if any(type(m) is not type(first) or m.options() != first.options() for m in parts):
        return None
    biases = [m.bias for m in parts]
    new = first.like(sum(m.out_features for m in parts), any(b is not None for b in biases))
    for name, like in first.matrix.named_parameters():
        whole = torch.cat([m.matrix.get_parameter(name) for m in parts])
        setattr(new.matrix, name, nn.Parameter(whole, requires_grad=like.requires_grad))
    if new.bias is not None:
        zeros = [torch.zeros(m.out_features) if m.bias is None else m.bias.detach() for m in parts]
        new.bias = nn.Parameter(torch.cat(zeros), requires_grad=False)
    return new
