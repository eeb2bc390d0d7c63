"""What schemes with one scale per group of inputs share: their options, the groups, MatMulNBits.

ONNX Runtime's MatMulNBits multiplies float32 activations with the weights that the codes stand for
(accuracy level 0), or first turns every block of activations, as long as a group, into int8 (level 4):

    scale = max |x| / 127        x_q = round(x / scale)        round half to even

Source: onnxruntime/core/mlas/lib, sqnbitgemm (QuantizeARow_CompInt8). Which levels are computed as said
was measured with ONNX Runtime 1.31 on x86-64: 4-bit codes with groups of 16 to 128, 2-bit codes with
groups of 32 to 128; there torch and runtime differ by 2e-6 of the output's spread.

Shapes: N = outputs, K = inputs, g = group size, G = groups = ceil(K / g).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from smelt.runtime.schemes.scheme import Coded, Option, Options

if TYPE_CHECKING:
    from torch import Tensor

GROUP_SIZE = Option("group_size", 64, (16, 32, 64, 128), "inputs that share a scale or a codebook")
ACCURACY_LEVEL = Option(
    "accuracy_level",
    4,
    (0, 4),
    "activations: 4: int8 blocks, 0: float32",
    expected="0 (float32) or 4 (int8 blocks)",
)


def two_bit_group_size(scheme: str) -> Option:
    """Return the group sizes of a scheme that leaves as 2-bit codes."""
    return replace(
        GROUP_SIZE,
        allowed=(32, 64, 128),
        others=f"group_size 16: {scheme} groups hold 32, 64 or 128 weights; ONNX Runtime has no fast 2-bit"
        " product of 16",
    )


# The inputs of MatMulNBits that hold scales and zero points.
OPERATORS = {"MatMulNBits": (2, 3)}
_WHY = "it multiplies packed weights (MatMulNBits)"
# OpenVINO 2026.4 loads MatMulNBits, but knows no accuracy level: it multiplies float32 activations, which
# gains no time, or rounds them as its own option says
_OPENVINO = "it multiplies packed weights with int8 blocks of activations (MatMulNBits)"
REFUSED = {"ort-cuda": _WHY, "tensorrt": _WHY, "openvino": _OPENVINO}
# of codes of 4 and 8 bits, which OpenVINO reads in a form of their own (layers/emit_blocks.py)
REFUSED_WHERE_BLOCKED = {
    "ort-cuda": _WHY,
    "tensorrt": "TensorRT has scales for blocks of 4-bit codes, and of 8-bit ones for whole rows",
}
OLDEST_WHERE_BLOCKED = {"openvino": 21}
HALF_SCALES = "half_scales"


def group_size(options: Options) -> int:
    """Return g."""
    return int(options[GROUP_SIZE.name])


def groups_of(weight: Tensor, size: int) -> Tensor:
    """Cut [N, K] into groups along the inputs, [N, G, g]; the last one is filled up with zeros."""
    from torch.nn import functional as F

    groups: Tensor = F.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
    return groups


def group_count(width: int, size: int) -> int:
    """Return G."""
    return -(-width // size)


def inverse(scales: Tensor) -> Tensor:
    """Return 1 / scale; 0 for groups of zeros, whose codes are then the zero point."""
    return scales.reciprocal().where(scales != 0, 0.0)


def blocks_as_int8(x: Tensor, size: int) -> Tensor:
    """Return what is left of float32 `x` [..., K] after each block of g values went through int8."""
    width = x.shape[-1]
    if width % size:
        from torch.nn import functional as F

        x = F.pad(x, (0, -width % size))
    blocks: Tensor = x.unflatten(-1, (-1, size))
    scales = blocks.abs().amax(dim=-1, keepdim=True) / 127
    left = (blocks * inverse(scales)).round_() * scales
    return left.flatten(-2)[..., :width]


def rounds_activations(options: Options) -> bool:
    """Say whether activations become int8 blocks."""
    return bool(options[ACCURACY_LEVEL.name])


def product(matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return what MatMulNBits computes, float32 [..., N]."""
    from torch.nn import functional as F

    if rounds_activations(matrix.options):
        x = blocks_as_int8(x, group_size(matrix.options))
    return F.linear(x, matrix.values(), bias)


def graph_tensors(matrix: Coded) -> dict[str, Tensor]:
    """Return the scales as the graph stores them: what rounding them costs is far below the codes' error."""
    return {HALF_SCALES: matrix.tensor("scales").detach().half()}


def emit_product(
    matrix: Coded,
    x: Tensor,
    bias: Tensor | None,
    bits: int,
    codes: Tensor,
    zeros: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Emit MatMulNBits.

    Args:
        matrix: whose scales are taken unless others are given.
        x: float32 [..., K].
        bias: float32 [N] or None.
        bits: of a code.
        codes: uint8 [N, G, g * bits / 8].
        zeros: as the operator wants them, None for the middle code everywhere.
        scales: float32 [N, G].
    """
    from smelt.runtime.layers import emit

    options = matrix.options
    scales = matrix.tensor(HALF_SCALES) if scales is None else scales
    layout = emit.Layout(matrix.width, scales.shape[0], bits, group_size(options))
    return emit.matmul_nbits(x, codes, scales, zeros, bias, layout, int(options[ACCURACY_LEVEL.name]))


def exact_nodes(node: Any) -> list[Any]:
    """Let a MatMulNBits multiply the same codes with float32 activations."""
    for attribute in node.attribute:
        if attribute.name == ACCURACY_LEVEL.name:
            attribute.i = 0
    return [node]
