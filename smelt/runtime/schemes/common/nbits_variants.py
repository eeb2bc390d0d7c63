"""Groupwise linear layers with operators of more bits than the weights: MatMulNBits of 2, 4 or 8.

Files store the small codes; they are expanded once, when a graph is loaded. The
operators give the same results: zero is shifted to the operator's default, and activations are rounded
alike. The kernels of more bits are mostly faster while a matrix is in a cache, those of fewer bits where it
must be read from memory, and processors differ (docs/measurements/int8-groupwise.md); so `onnx: {autotune}`
measures.

With float32 activations (accuracy level 0) ONNX Runtime 1.31 has a fast kernel for 4 bits only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smelt.runtime.schemes.common.groupwise import (
    ACCURACY_LEVEL,
    group_size,
    num_groups,
    quantizes_activation_blocks,
)
from smelt.runtime.schemes.common.int4_expansion import INT4_ZERO_POINT
from smelt.runtime.schemes.scheme import PackedMatrix, SchemeOptions

if TYPE_CHECKING:
    from torch import Tensor

_BITS = (2, 4, 8)
_BYTES = "BytesOfMiddledNibbles"
_SHIFT = 128 - INT4_ZERO_POINT


def nbits_variants(code_bits: int, options: SchemeOptions) -> tuple[str, ...]:
    """Return the operators for codes of `code_bits` bits, the default first."""
    wider = _BITS if quantizes_activation_blocks(options) else (code_bits,)
    return tuple(f"MatMulNBits, {bits} bits" for bits in wider if bits >= code_bits)


def variant_bits(matrix: PackedMatrix, default_bits: int) -> int:
    """Return the bits of the exported codes of `matrix`."""
    return next((bits for bits in _BITS if matrix.variant.endswith(f" {bits} bits")), default_bits)


def emit_int4_to_int8(nibbles: Tensor) -> Tensor:
    """Emit 8-bit codes, uint8 [..., 2 n], for pairs of 4-bit ones, uint8 [..., n]."""
    from smelt.runtime.layers import emit

    return emit.expand_by_table(_BYTES, nibbles, 2)


def int4_to_int8_table() -> dict[str, Any]:
    """Return the bytes of each pair of 4-bit codes, the low one first, uint8 [256, 2]."""
    import numpy as np

    pairs = np.arange(256)[:, None] >> np.array([0, 4]) & 15
    return {_BYTES: (pairs + _SHIFT).astype(np.uint8)}


def int8_zero_points(zeros: Tensor, middle: int) -> Tensor:
    """Return zero points uint8 [N, G] of codes with the middle `middle` as those of 8-bit ones."""
    return zeros + (128 - middle)


def nbits_variant_node(matrix: PackedMatrix, own: int, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
    """Return the operator of the variant of `matrix` with random codes, for timing, and its constants."""
    import torch
    from onnx import helper

    options, bits, rows = matrix.options, variant_bits(matrix, own), matrix.tensor("codes").shape[0]
    size = group_size(options)
    count = num_groups(matrix.width, size)
    numbers = torch.Generator().manual_seed(0)
    shape = (rows, count, size * bits // 8)
    codes = torch.randint(0, 256, shape, generator=numbers, dtype=torch.uint8)
    tensors = {f"{y}.codes": codes, f"{y}.scales": torch.full((rows, count), 0.01)}
    if matrix.has("zeros"):
        tensors[f"{y}.zeros"] = torch.full((rows, -(-count * bits // 8)), 1, dtype=torch.uint8)
    layout: dict[str, Any] = {"K": matrix.width, "N": rows, "bits": bits, "block_size": size}
    layout[ACCURACY_LEVEL.name] = int(options[ACCURACY_LEVEL.name])
    made = helper.make_node("MatMulNBits", [x, *tensors], [y], domain="com.microsoft", **layout)
    return made, tensors
