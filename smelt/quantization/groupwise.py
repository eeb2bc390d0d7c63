"""Parts shared by schemes with one scale per group of inputs: options, groups, packed codes, MatMulNBits.

ONNX Runtime's MatMulNBits multiplies float32 activations with the dequantized weights
(accuracy level 0), or first turns every block of activations, as long as a group, into int8 (level 4):

    scale = max |x| / 127        x_q = round(x / scale)        round half to even

With activation_bits 4 the largest of a block is 7 instead of 127, the uniform quantization of BinaryBERT (Bai
et al. 2021, arXiv:2012.15701; github.com/huawei-noah/Pretrained-Language-Model, BinaryBERT/transformer,
utils_quant.py, SymQuantizer without its clipping) by block instead of by row. No runtime multiplies 4-bit
activations: they are rounded by standard operators, and multiplied in float32.

Source: onnxruntime/core/mlas/lib, sqnbitgemm (QuantizeARow_CompInt8). Which levels compute as documented
was measured with ONNX Runtime 1.31 on x86-64: 4-bit codes with groups of 16 to 128, 2-bit codes with
groups of 32 to 128; there torch and runtime differ by 2e-6 of the output's standard deviation.

Codes of fewer than eight bits are packed into bytes, the first code in the lowest bits, as MatMulNBits reads
them. bitsandbytes, and so MatMulBnb4, stores the first of two in the highest ones (`high_first`).

Shapes: N = outputs, K = inputs, g = group size, G = groups = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.quantization.scheme import (
    MatrixUse,
    OptionValue,
    PackedMatrix,
    Scheme,
    SchemeOption,
    SchemeOptions,
)

if TYPE_CHECKING:
    from torch import Tensor

GROUP_SIZE = SchemeOption("group_size", 64, (16, 32, 64, 128), "inputs that share a scale or a codebook")
SYMMETRIC = SchemeOption(
    "symmetric",
    True,
    (True, False),
    "false: with zero points; positive: no negative scales, for TensorRT",
)
ACCURACY_LEVEL = SchemeOption(
    "accuracy_level",
    4,
    (0, 4),
    "activations: 4: int8 blocks, 0: float32",
    expected="0 (float32) or 4 (int8 blocks)",
)
ACTIVATION_BITS = SchemeOption(
    "activation_bits",
    8,
    (8, 4),
    "of blocks of activations, integers with accuracy_level 4: 4: simulated in float32, slower; of 4-bit"
    " floats: 16: weights alone are quantized",
)


def two_bit_group_size(scheme: str) -> SchemeOption:
    """Return the group sizes of a scheme that is exported to 2-bit codes."""
    return replace(
        GROUP_SIZE,
        allowed=(32, 64, 128),
        rejection=f"group_size 16: {scheme} supports groups of 32, 64 or 128 weights; ONNX Runtime has no"
        " fast 2-bit matrix multiplication for 16",
    )


# The inputs of MatMulNBits that hold scales and zero points.
MATMUL_NBITS = "MatMulNBits"
_WHY = "it multiplies packed weights (MatMulNBits)"
# OpenVINO 2026.4 loads MatMulNBits, but has no accuracy level: it multiplies float32 activations, which
# saves no time, or rounds them by its own option
_OPENVINO = "it multiplies packed weights with int8 blocks of activations (MatMulNBits)"
NBITS_UNSUPPORTED_TARGETS = {"tensorrt": _WHY, "openvino": _OPENVINO}
# for codes of 4 and 8 bits, which OpenVINO reads in another form (`emit.blockwise_linear`)
BLOCKWISE_UNSUPPORTED_TARGETS = {
    "tensorrt": "TensorRT supports blockwise scales for 4-bit weights, and one scale per row for 8-bit ones",
}
BLOCKWISE_MIN_OPSET = {"openvino": 21}
FLOAT16_SCALES = "half_scales"
CUDA_TARGET = "ort-cuda"
# The CUDA provider's MatMulNBits ignores the accuracy level: activations stay float.
CUDA_OPTIONS = {ACCURACY_LEVEL.name: (0,)}


def group_size(options: SchemeOptions) -> int:
    """Return g."""
    return int(options[GROUP_SIZE.name])


def split_into_groups(weight: Tensor, size: int) -> Tensor:
    """Split [N, K] into groups along the inputs, [N, G, g]; the last one is padded with zeros."""
    from torch.nn import functional as F

    groups: Tensor = F.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
    return groups


def num_groups(width: int, size: int) -> int:
    """Return G."""
    return -(-width // size)


def safe_reciprocal(scales: Tensor) -> Tensor:
    """Return 1 / scale; 0 for groups of zeros, whose codes are then the zero point."""
    return scales.reciprocal().where(scales != 0, 0.0)


def fake_quantize_blocks(x: Tensor, size: int, bits: int = 8) -> Tensor:
    """Return float32 `x` [..., K] after quantizing and dequantizing each block of g values to `bits` bits."""
    width = x.shape[-1]
    if width % size:
        from torch.nn import functional as F

        x = F.pad(x, (0, -width % size))
    blocks: Tensor = x.unflatten(-1, (-1, size))
    scales = blocks.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
    dequantized = (blocks * safe_reciprocal(scales)).round_() * scales
    values: Tensor = dequantized.flatten(-2)[..., :width]
    return values


def quantizes_activation_blocks(options: SchemeOptions) -> bool:
    """Return whether the operator turns activations into int8 blocks."""
    return bool(options[ACCURACY_LEVEL.name]) and not simulates_activations(options)


def simulates_activations(options: SchemeOptions) -> bool:
    """Return whether activations are rounded to fewer bits than an operator has, before it."""
    return bool(options[ACCURACY_LEVEL.name]) and _activation_bits(options) != ACTIVATION_BITS.default


def _activation_bits(options: SchemeOptions) -> int:
    return int(options.get(ACTIVATION_BITS.name, ACTIVATION_BITS.default))


def operator_level(options: SchemeOptions) -> int:
    """Return the accuracy level of the operator."""
    return int(options[ACCURACY_LEVEL.name]) if quantizes_activation_blocks(options) else 0


def nbits_float_activation_nodes(node: Any) -> list[Any]:
    """Return a MatMulNBits node with the same codes and float32 activations."""
    for attribute in node.attribute:
        if attribute.name == ACCURACY_LEVEL.name:
            attribute.i = 0
    return [node]


class GroupwiseScheme(Scheme):
    """A scheme with one scale per group of inputs, exported to MatMulNBits."""

    unsupported_targets: ClassVar[Mapping[str, str]] = NBITS_UNSUPPORTED_TARGETS
    required_options: ClassVar[Mapping[str, Mapping[str, tuple[OptionValue, ...]]]] = {
        CUDA_TARGET: CUDA_OPTIONS
    }
    supported_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {CUDA_TARGET: ("fp16",)}
    operators: ClassVar[tuple[str, ...]] = (MATMUL_NBITS,)

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return g."""
        return group_size(options)

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or rounded per block (accuracy level 4)."""
        from torch.nn import functional as F

        return F.linear(self.fake_quantize_activations(matrix, x), matrix.dequantized(), bias)

    def fake_quantize_activations(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """Return quantized and dequantized blocks, in the type of `x`; `x` itself at accuracy level 0."""
        options = matrix.options
        if not self.quantizes_activations(options):
            return x
        return fake_quantize_blocks(x.float(), group_size(options), _activation_bits(options)).to(x.dtype)

    def quantizes_activations(self, options: SchemeOptions) -> bool:
        """Return whether the accuracy level is 4."""
        return bool(options[ACCURACY_LEVEL.name])

    def simulates_activations(self, options: SchemeOptions) -> bool:
        """Return whether they have 4 bits."""
        return simulates_activations(options)

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the scales in float16: their rounding error is far below the quantization error."""
        return {FLOAT16_SCALES: matrix.tensor("scales").detach().half()}

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return the same operator at accuracy level 0."""
        return nbits_float_activation_nodes(node)


def emit_matmul_nbits(
    matrix: PackedMatrix,
    x: Tensor,
    bias: Tensor | None,
    bits: int,
    codes: Tensor,
    zeros: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Emit MatMulNBits, after the rounding of activations that it does not have.

    Args:
        matrix: its scales are used unless others are given.
        x: float32 [..., K].
        bias: float32 [N] or None.
        bits: of a code.
        codes: uint8 [N, G, g * bits / 8].
        zeros: in the operator's layout, None for the middle code everywhere.
        scales: float32 [N, G].
    """
    from smelt.quantization import emit

    options = matrix.options
    scales = matrix.tensor(FLOAT16_SCALES) if scales is None else scales
    if simulates_activations(options):
        x = fake_quantize_blocks(x, group_size(options), _activation_bits(options))
    layout = emit.NBitsLayout(matrix.width, scales.shape[0], bits, group_size(options))
    return emit.matmul_nbits(x, codes, scales, zeros, bias, layout, operator_level(options))


def pack_nibbles(codes: Tensor, high_first: bool = False) -> Tensor:
    """Pack two codes into one byte along the last axis: uint8 [..., n] -> uint8 [..., ceil(n / 2)]."""
    import torch

    codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    low, high = (1, 0) if high_first else (0, 1)
    return codes[..., low::2] | (codes[..., high::2] << 4)


def unpack_nibbles(packed: Tensor, high_first: bool = False) -> Tensor:
    """Return the codes of `pack_nibbles`, uint8 [..., 2 n]."""
    import torch

    nibbles = [packed & 15, packed >> 4]
    return torch.stack(nibbles[::-1] if high_first else nibbles, dim=-1).flatten(-2)


def unpack_nibbles_float(packed: Tensor, high_first: bool = False) -> Tensor:
    """Return the codes of `pack_nibbles` as float32 [..., 2 n], with operators that can be exported.

    torch 2.13's exporter turns a shifted uint8 into an int8, which ONNX Runtime rejects.
    """
    import torch

    packed_float = packed.float()
    high = torch.floor(packed_float / 16)
    nibbles = [packed_float - 16 * high, high]
    return torch.stack(nibbles[::-1] if high_first else nibbles, dim=-1).flatten(-2)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack eight bits into one byte along the last axis: bool [..., 8 n] -> uint8 [..., n]."""
    import torch

    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    bit_groups: Tensor = bits.to(torch.uint8).unflatten(-1, (-1, 8))
    return (bit_groups << shifts).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Return the bits of `pack_bits`, bool [..., 8 n]."""
    import torch

    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack as many codes of `bits` (1, 2, 4 or 8) into a byte as fit: uint8 [..., n] -> uint8 [..., m]."""
    import torch

    codes_per_byte = 8 // bits
    if codes_per_byte == 1:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    padded: Tensor = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % codes_per_byte)).unflatten(
        -1, (-1, codes_per_byte)
    )
    return (padded << shifts).sum(dim=-1, dtype=torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of `pack_codes`, uint8 [..., m * 8 / bits]."""
    import torch

    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    unpacked: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return unpacked.flatten(-2)


def pack_base_n(codes: Tensor, base: int, count: int) -> Tensor:
    """Pack `count` codes below `base` into a byte, the first the lowest digit: uint8 [..., n] -> [..., m]."""
    import torch

    powers = base ** torch.arange(count, dtype=torch.uint8, device=codes.device)
    padded: Tensor = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % count)).unflatten(-1, (-1, count))
    return (padded * powers).sum(dim=-1, dtype=torch.uint8)


def unpack_base_n_float(packed: Tensor, base: int, count: int) -> Tensor:
    """Return the `count` digits of each byte in `base`, the lowest first, with exportable operators.

    They are the codes of `pack_base_n`; with base 2^b and 8 / b digits also those of `pack_codes`.

    Returns:
        float32 [..., count * n] for uint8 [..., n].
    """
    import torch

    quotient = packed.float()
    digits = []
    for _ in range(count - 1):
        higher = torch.floor(quotient / base)
        digits.append(quotient - base * higher)
        quotient = higher
    return torch.stack([*digits, quotient], dim=-1).flatten(-2)


def lookup_digits(
    matrix: PackedMatrix, ids: Tensor, size: int, *, base: int, digits: int, values: tuple[float, float]
) -> Tensor:
    """Return rows of a matrix whose codes are digits, float32 [..., K], with exportable operators.

    Args:
        matrix: codes of `digits` digits in `base` per byte, and a scale per group.
        ids: int64 [...], the rows.
        size: weights of a group.
        base: of the digits.
        digits: per byte, the lowest first.
        values: a factor and an addend: a weight is (factor * digit + addend) * scale.
    """
    flat, (factor, addend) = ids.flatten(), values
    codes = unpack_base_n_float(matrix.tensor("codes").index_select(0, flat), base, digits)[..., :size]
    stored_scales = matrix.tensor(FLOAT16_SCALES if matrix.has(FLOAT16_SCALES) else "scales")
    scales = stored_scales.index_select(0, flat).float()[..., None]
    rows = ((factor * codes + addend) * scales).flatten(1)[:, : matrix.width]
    return rows.reshape(*ids.shape, matrix.width)
