"""Parts shared by schemes with one scale per group of inputs: options, groups, MatMulNBits.

ONNX Runtime's MatMulNBits multiplies float32 activations with the dequantized weights
(accuracy level 0), or first turns every block of activations, as long as a group, into int8 (level 4):

    scale = max |x| / 127        x_q = round(x / scale)        round half to even

Source: onnxruntime/core/mlas/lib, sqnbitgemm (QuantizeARow_CompInt8). Which levels compute as documented
was measured with ONNX Runtime 1.31 on x86-64: 4-bit codes with groups of 16 to 128, 2-bit codes with
groups of 32 to 128; there torch and runtime differ by 2e-6 of the output's standard deviation.

Shapes: N = outputs, K = inputs, g = group size, G = groups = ceil(K / g).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from smelt.quantization.scheme import PackedMatrix, SchemeOption, SchemeOptions

if TYPE_CHECKING:
    from torch import Tensor

GROUP_SIZE = SchemeOption("group_size", 64, (16, 32, 64, 128), "inputs that share a scale or a codebook")
ACCURACY_LEVEL = SchemeOption(
    "accuracy_level",
    4,
    (0, 4),
    "activations: 4: int8 blocks, 0: float32",
    expected="0 (float32) or 4 (int8 blocks)",
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
MATMUL_NBITS = {"MatMulNBits": (2, 3)}
_WHY = "it multiplies packed weights (MatMulNBits)"
# OpenVINO 2026.4 loads MatMulNBits, but has no accuracy level: it multiplies float32 activations, which
# saves no time, or rounds them by its own option
_OPENVINO = "it multiplies packed weights with int8 blocks of activations (MatMulNBits)"
NBITS_UNSUPPORTED_TARGETS = {"ort-cuda": _WHY, "tensorrt": _WHY, "openvino": _OPENVINO}
# for codes of 4 and 8 bits, which OpenVINO reads in another form (`emit.blockwise_linear`)
BLOCKWISE_UNSUPPORTED_TARGETS = {
    "ort-cuda": _WHY,
    "tensorrt": "TensorRT supports blockwise scales for 4-bit weights, and one scale per row for 8-bit ones",
}
BLOCKWISE_MIN_OPSET = {"openvino": 21}
FLOAT16_SCALES = "half_scales"


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


def fake_quantize_blocks(x: Tensor, size: int) -> Tensor:
    """Return float32 `x` [..., K] after quantizing and dequantizing each block of g values as int8."""
    width = x.shape[-1]
    if width % size:
        from torch.nn import functional as F

        x = F.pad(x, (0, -width % size))
    blocks: Tensor = x.unflatten(-1, (-1, size))
    scales = blocks.abs().amax(dim=-1, keepdim=True) / 127
    left = (blocks * safe_reciprocal(scales)).round_() * scales
    return left.flatten(-2)[..., :width]


def quantizes_activation_blocks(options: SchemeOptions) -> bool:
    """Return whether activations become int8 blocks."""
    return bool(options[ACCURACY_LEVEL.name])


def groupwise_linear(matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return the result of MatMulNBits, float32 [..., N]."""
    from torch.nn import functional as F

    if quantizes_activation_blocks(matrix.options):
        x = fake_quantize_blocks(x, group_size(matrix.options))
    return F.linear(x, matrix.dequantized(), bias)


def groupwise_constants(matrix: PackedMatrix) -> dict[str, Tensor]:
    """Return the scales in float16: their rounding error is far below the quantization error."""
    return {FLOAT16_SCALES: matrix.tensor("scales").detach().half()}


def emit_matmul_nbits(
    matrix: PackedMatrix,
    x: Tensor,
    bias: Tensor | None,
    bits: int,
    codes: Tensor,
    zeros: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Emit MatMulNBits.

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
    layout = emit.NBitsLayout(matrix.width, scales.shape[0], bits, group_size(options))
    return emit.matmul_nbits(x, codes, scales, zeros, bias, layout, int(options[ACCURACY_LEVEL.name]))


def nbits_float_activation_nodes(node: Any) -> list[Any]:
    """Return a MatMulNBits node with the same codes and float32 activations."""
    for attribute in node.attribute:
        if attribute.name == ACCURACY_LEVEL.name:
            attribute.i = 0
    return [node]
