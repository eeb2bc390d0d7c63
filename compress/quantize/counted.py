"""Bits a weight of a model's codes, counted as they are stored."""

from __future__ import annotations

from torch import nn

from smelt.runtime.layers.quantized import is_quantized, matrix_bytes


def coded_bits(model: nn.Module) -> float:
    """Return the bits of a coded weight with its part of scales and zero points, each matrix counted once.

    Args:
        model: with at least one quantized layer.
    """
    matrices = {id(m.matrix): m.matrix for m in model.modules() if is_quantized(m)}
    bits = 8 * matrix_bytes(nn.ModuleList(matrices.values()))
    weights = sum(len(matrix.codes) * matrix.width for matrix in matrices.values())
    return round(bits / weights, 3)
