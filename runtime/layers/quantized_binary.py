"""Linear layers of binary weights: a sign and one scale for each group of a row's weights.

value = scale if the bit is 1, else -scale. Stored as one bit a weight: bit i of byte j belongs to the
weight 8 j + i of its group. Scales are stored as float16, so that groups of 64 take 1.25 bits a weight; in
memory they are float32, because transformers takes the type of a model's first float parameter for its own.
They leave as MatMulNBits with 2-bit codes (1 is -1, 3 is +1, the zero point is 2); the graph holds the
bits, and ONNX Runtime widens them once, when the session is opened.

Shapes: N = outputs (rows), K = inputs (columns), g = group size, G = ceil(K / g).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.runtime.layers import emit
from smelt.runtime.layers.quantized_groups import blocks_as_int8, check_group, group_count

# Groups of 16 have no kernel for 2-bit codes in ONNX Runtime: it unpacks them at every call.
GROUP_SIZES = (32, 64, 128)


def pack_bits(bits: Tensor) -> Tensor:
    """Put eight bits into one byte along the last axis: bool [..., 8 n] -> uint8 [..., n]."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    eights: Tensor = bits.to(torch.uint8).unflatten(-1, (-1, 8))
    return (eights << places).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Return the bits of `pack_bits`, bool [..., 8 n]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & 1).bool().flatten(-2)


class BinaryMatrix(nn.Module):
    """A matrix of signs. codes: uint8 [N, G, g / 8]; scales: float32 [N, G], each a float16."""

    half_scales: Tensor | None

    def __init__(self, rows: int, columns: int, group_size: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.width, self.group_size = columns, group_size
        groups = group_count(columns, group_size)
        codes = torch.zeros(rows, groups, group_size // 8, dtype=torch.uint8, device=device)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(torch.ones(rows, groups, device=device), requires_grad=False)
        self.register_buffer("half_scales", None, persistent=False)
        self._values: tuple[tuple[int, int], Tensor] | None = None

    def prepare_export(self) -> None:
        """Keep the scales as the graph stores them."""
        self.half_scales = self.scales.detach().half()

    def set_(self, positive: Tensor, scales: Tensor) -> None:
        """Take over what a method decided: bool [N, G, g], true for +1, and scales [N, G]."""
        self.codes.data, self.scales.data = pack_bits(positive), scales.half().float()
        self._values = None

    def dequantize(self) -> Tensor:
        """Return the values, float32 [N, K]."""
        scales = self.scales[..., None]
        return torch.where(unpack_bits(self.codes), scales, -scales).flatten(1)[:, : self.width]

    def values(self) -> Tensor:
        """Return `dequantize()`, computed once for the same memory."""
        place = self.codes.data_ptr(), self.scales.data_ptr()
        if self._values is None or self._values[0] != place:
            self._values = (place, self.dequantize())
        return self._values[1]


class BinaryLinear(nn.Module):
    """y = x W^T + b with binary weights; activations float32, or int8 per block (accuracy level 4)."""

    weight = None  # T5 asks its layers for the type of their weight, and goes on where there is none

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: torch.device | None = None,
        *,
        group_size: int,
        accuracy_level: int,
    ) -> None:
        super().__init__()
        check_group(group_size, GROUP_SIZES, accuracy_level)
        self.in_features, self.out_features = in_features, out_features
        self.accuracy_level = accuracy_level
        self.matrix = BinaryMatrix(out_features, in_features, group_size, device)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device)) if bias else None

    def options(self) -> dict[str, int | bool]:
        """Return what the structure says of this layer besides its scheme."""
        return {"group_size": self.matrix.group_size, "accuracy_level": self.accuracy_level}

    def like(self, out_features: int, bias: bool) -> BinaryLinear:
        """Return a layer of the same kind with other outputs, on the meta device."""
        return BinaryLinear(
            self.in_features,
            out_features,
            bias,
            torch.device("meta"),
            group_size=self.matrix.group_size,
            accuracy_level=self.accuracy_level,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [..., K] to float32 [..., N]."""
        matrix = self.matrix
        if emit.export_target() is not None:
            layout = emit.Layout(self.in_features, self.out_features, 2, matrix.group_size)
            assert matrix.half_scales is not None, "prepare_export comes before the export"
            codes = emit.widened_bits(matrix.codes)
            return emit.matmul_nbits(
                x, codes, matrix.half_scales, None, self.bias, layout, self.accuracy_level
            )
        if self.accuracy_level == 4:
            x = blocks_as_int8(x, matrix.group_size)
        return F.linear(x, matrix.values(), self.bias)

    def extra_repr(self) -> str:
        """Say the sizes and the scheme."""
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, binary, {self.options()}"
        )
