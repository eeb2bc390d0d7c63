"""From a float layer to a quantized one: which method decides for which kind of matrix."""

from __future__ import annotations

from torch import Tensor, nn

from smelt.compress.quantize import binary, int4, int8_dynamic
from smelt.core.errors import InputError
from smelt.runtime.layers.quantized import AnyEmbedding, AnyLinear, Int8Matrix, empty_quantized
from smelt.runtime.layers.quantized_binary import BinaryMatrix
from smelt.runtime.layers.quantized_int4 import Int4Matrix

Matrix = Int8Matrix | Int4Matrix | BinaryMatrix
# Scales are kept as float16, which ends there.
_LARGEST = 60_000.0


def fill_(matrix: Matrix, weight: Tensor) -> None:
    """Decide codes and scales for `weight`, float [N, K], and put them into `matrix`."""
    if isinstance(matrix, Int4Matrix):
        int4.fill_(matrix, weight)
    elif isinstance(matrix, BinaryMatrix):
        binary.fill_(matrix, weight)
    else:
        int8_dynamic.fill_(matrix, weight)


def fake(weight: Tensor, matrix: Matrix) -> Tensor:
    """Return what codes of `weight` in the layout of `matrix` stand for, with a gradient to `weight`."""
    if isinstance(matrix, Int4Matrix):
        return int4.fake(weight, matrix)
    if isinstance(matrix, BinaryMatrix):
        return binary.fake(weight, matrix)
    return int8_dynamic.fake(weight)


def quantize_module(module: nn.Module, scheme: str, **options: int | bool) -> AnyLinear | AnyEmbedding:
    """Return the quantized counterpart of a Linear or an Embedding, codes and scales decided.

    Raises:
        InputError: a module or options that the scheme does not know, or weights that are not finite.
    """
    new = empty_quantized(module, scheme, **options)
    weight = module.weight
    assert isinstance(weight, Tensor)
    largest = float(weight.detach().abs().max()) if weight.numel() else 0.0
    if not largest < _LARGEST:
        raise InputError(
            f"its largest weight is {largest:g}; expected numbers below {_LARGEST:g}."
            " The training before it has probably gone astray."
        )
    fill_(new.matrix, weight)
    if isinstance(new, AnyLinear) and new.bias is not None:
        assert isinstance(module.bias, Tensor)
        new.bias.data = module.bias.detach().clone()
    return new.train(module.training)
