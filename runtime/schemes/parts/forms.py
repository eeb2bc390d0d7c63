"""Products of codes in groups by operators of more bits than the codes have: MatMulNBits of 2, 4 or 8.

Files hold the small codes; what the operator multiplies is made of them once, when a graph is loaded. The
operators give the same numbers: zero is shifted to where the operator has it, and activations are rounded
alike. The kernels of more bits are mostly faster while a matrix lies in a cache, those of fewer where it has
to be fetched from memory, and processors differ (docs/measurements/int8-groupwise.md); so `onnx: {tune}`
measures.

With float32 activations (accuracy level 0) ONNX Runtime 1.31 has a fast kernel of 4 bits alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smelt.runtime.schemes.parts.groups import ACCURACY_LEVEL, group_count, group_size, rounds_activations
from smelt.runtime.schemes.parts.nibbles import MIDDLE
from smelt.runtime.schemes.scheme import Coded, Options

if TYPE_CHECKING:
    from torch import Tensor

_BITS = (2, 4, 8)
_BYTES = "BytesOfMiddledNibbles"
_SHIFT = 128 - MIDDLE


def forms_of(own: int, options: Options) -> tuple[str, ...]:
    """Return the operators for codes of `own` bits: first the one that they leave as by default."""
    wider = _BITS if rounds_activations(options) else (own,)
    return tuple(f"MatMulNBits, {bits} bits" for bits in wider if bits >= own)


def bits_of(matrix: Coded, own: int) -> int:
    """Return in how many bits the product of `matrix` leaves."""
    return next((bits for bits in _BITS if matrix.form.endswith(f" {bits} bits")), own)


def as_bytes(nibbles: Tensor) -> Tensor:
    """Emit 8-bit codes, uint8 [..., 2 n], for pairs of 4-bit ones, uint8 [..., n]."""
    from smelt.runtime.layers import emit

    return emit.spread(_BYTES, nibbles, 2)


def load_tables() -> dict[str, Any]:
    """Return the bytes of each pair of 4-bit codes, the low one first, uint8 [256, 2]."""
    import numpy as np

    pairs = np.arange(256)[:, None] >> np.array([0, 4]) & 15
    return {_BYTES: (pairs + _SHIFT).astype(np.uint8)}


def byte_zeros(zeros: Tensor, middle: int) -> Tensor:
    """Return zero points uint8 [N, G] of codes whose middle is `middle` as those of 8-bit ones."""
    return zeros + (128 - middle)


def node(matrix: Coded, own: int, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
    """Return the operator of the form of `matrix` with random codes, to be timed alone, and its constants."""
    import torch
    from onnx import helper

    options, bits, rows = matrix.options, bits_of(matrix, own), matrix.tensor("codes").shape[0]
    size = group_size(options)
    count = group_count(matrix.width, size)
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
