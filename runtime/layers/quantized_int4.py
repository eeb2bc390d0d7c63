"""Layers of 4-bit codes, one scale (and zero point) for each group of a row's weights: scheme int4.

value = (code - zero) * scale, code and zero between 0 and 15; zero is 8 in symmetric matrices, which
store none. Codes are stored as ONNX Runtime's MatMulNBits reads them: two in a byte, the first in the
low half. Scales are stored as float16: what rounding them costs is far below the 4 bits' own error. In
memory they are float32, because transformers takes the type of a model's first float parameter for its own.

Shapes: N = outputs (rows), K = inputs (columns), g = group size, G = ceil(K / g).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.runtime.layers import emit
from smelt.runtime.layers.quantized_groups import GROUP_SIZES, blocks_as_int8, check_group, group_count

ZERO = 8


def pack_nibbles(codes: Tensor) -> Tensor:
    """Put two codes into one byte along the last axis: uint8 [..., n] -> uint8 [..., ceil(n / 2)]."""
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the codes of `pack_nibbles`, uint8 [..., 2 n]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def _nibbles_as_floats(packed: Tensor) -> Tensor:
    """Return the codes of `pack_nibbles` as float32 [..., 2 n], by operators that leave torch well.

    torch 2.13's exporter makes an int8 of a shifted uint8, which ONNX Runtime refuses.
    """
    both = packed.float()
    high = torch.floor(both / 16)
    return torch.stack([both - 16 * high, high], dim=-1).flatten(-2)


class Int4Matrix(nn.Module):
    """A matrix of 4-bit codes.

    codes: uint8 [N, G, g / 2]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G / 2)], or
    None where all are 8. A module of its own, so that an embedding and the head tied to it can hold the
    very same one.
    """

    zeros: nn.Parameter | None
    half_scales: Tensor | None

    def __init__(
        self,
        rows: int,
        columns: int,
        group_size: int,
        symmetric: bool,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        groups = group_count(columns, group_size)
        self.width, self.group_size, self.symmetric = columns, group_size, symmetric
        codes = torch.zeros(rows, groups, group_size // 2, dtype=torch.uint8, device=device)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(torch.ones(rows, groups, device=device), requires_grad=False)
        self.register_buffer("half_scales", None, persistent=False)
        zeros = torch.zeros(rows, -(-groups // 2), dtype=torch.uint8, device=device)
        self.zeros = None if symmetric else nn.Parameter(zeros, requires_grad=False)
        self._values: tuple[tuple[int, int], Tensor] | None = None

    def prepare_export(self) -> None:
        """Keep the scales as the graph stores them."""
        self.half_scales = self.scales.detach().half()

    def set_(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
        """Take over what a method decided.

        Args:
            codes: uint8 [N, G, g], 0 to 15.
            scales: [N, G].
            zeros: uint8 [N, G], or None where the matrix is symmetric.
        """
        assert (zeros is None) == self.symmetric
        self.codes.data, self.scales.data = pack_nibbles(codes), scales.half().float()
        if self.zeros is not None and zeros is not None:
            self.zeros.data = pack_nibbles(zeros)
        self._values = None

    def dequantize(self) -> Tensor:
        """Return the values, float32 [N, K]."""
        codes = unpack_nibbles(self.codes).float()
        zeros: Tensor | float = float(ZERO)
        if self.zeros is not None:
            zeros = unpack_nibbles(self.zeros)[:, : self.codes.shape[1], None].float()
        return ((codes - zeros) * self.scales[..., None]).flatten(1)[:, : self.width]

    def values(self) -> Tensor:
        """Return `dequantize()`, computed once for the same memory."""
        place = self.codes.data_ptr(), self.scales.data_ptr()
        if self._values is None or self._values[0] != place:
            self._values = (place, self.dequantize())
        return self._values[1]

    def rows(self, ids: Tensor) -> Tensor:
        """Return some rows, float32 [..., K], for int64 `ids` [...]; also in an exported graph."""
        flat = ids.flatten()
        codes = _nibbles_as_floats(self.codes.index_select(0, flat))
        zeros: Tensor | float = float(ZERO)
        if self.zeros is not None:
            zeros = _nibbles_as_floats(self.zeros.index_select(0, flat))[:, : self.codes.shape[1], None]
        scales = self.scales if self.half_scales is None else self.half_scales
        scales = scales.index_select(0, flat).float()[..., None]
        rows = ((codes - zeros) * scales).flatten(1)[:, : self.width]
        return rows.reshape(*ids.shape, self.width)


class Int4Linear(nn.Module):
    """y = x W^T + b with 4-bit weights; activations float32, or int8 per block (accuracy level 4)."""

    weight = None  # T5 asks its layers for the type of their weight, and goes on where there is none

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: torch.device | None = None,
        *,
        group_size: int,
        symmetric: bool,
        accuracy_level: int,
    ) -> None:
        super().__init__()
        check_group(group_size, GROUP_SIZES, accuracy_level)
        self.in_features, self.out_features = in_features, out_features
        self.accuracy_level = accuracy_level
        self.matrix = Int4Matrix(out_features, in_features, group_size, symmetric, device)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device)) if bias else None

    def options(self) -> dict[str, int | bool]:
        """Return what the structure says of this layer besides its scheme."""
        matrix = self.matrix
        return {
            "group_size": matrix.group_size,
            "symmetric": matrix.symmetric,
            "accuracy_level": self.accuracy_level,
        }

    def like(self, out_features: int, bias: bool) -> Int4Linear:
        """Return a layer of the same kind with other outputs, on the meta device."""
        options = self.options()
        return Int4Linear(
            self.in_features,
            out_features,
            bias,
            torch.device("meta"),
            group_size=int(options["group_size"]),
            symmetric=bool(options["symmetric"]),
            accuracy_level=int(options["accuracy_level"]),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [..., K] to float32 [..., N]."""
        matrix = self.matrix
        if emit.export_target() is not None:
            layout = emit.Layout(self.in_features, self.out_features, 4, matrix.group_size)
            assert matrix.half_scales is not None, "prepare_export comes before the export"
            return emit.matmul_nbits(
                x, matrix.codes, matrix.half_scales, matrix.zeros, self.bias, layout, self.accuracy_level
            )
        if self.accuracy_level == 4:
            x = blocks_as_int8(x, matrix.group_size)
        return F.linear(x, matrix.values(), self.bias)

    def extra_repr(self) -> str:
        """Say the sizes and the scheme."""
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, int4, {self.options()}"
        )


class Int4Embedding(nn.Module):
    """An embedding of 4-bit rows, dequantized when looked up; a row of zeros stays one."""

    def __init__(
        self,
        rows: int,
        width: int,
        padding_idx: int | None,
        device: torch.device | None = None,
        *,
        group_size: int,
        symmetric: bool,
        accuracy_level: int,
    ) -> None:
        super().__init__()
        check_group(group_size, GROUP_SIZES, accuracy_level)
        self.num_embeddings, self.embedding_dim, self.padding_idx = rows, width, padding_idx
        self.accuracy_level = accuracy_level  # of the head that may be tied to it
        self.matrix = Int4Matrix(rows, width, group_size, symmetric, device)

    def options(self) -> dict[str, int | bool]:
        """Return what the structure says of this layer besides its scheme."""
        matrix = self.matrix
        return {
            "group_size": matrix.group_size,
            "symmetric": matrix.symmetric,
            "accuracy_level": self.accuracy_level,
        }

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 [...] to float32 [..., D]."""
        return self.matrix.rows(ids)

    def extra_repr(self) -> str:
        """Say the sizes and the scheme."""
        return f"{self.num_embeddings}, {self.embedding_dim}, int4, {self.options()}"
