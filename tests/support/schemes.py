"""Matrices and layers of any scheme, for its tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smelt.compress.quantize.coding import fill_, quantize_module
from smelt.runtime.layers.quantized import Matrix, QuantizedLinear, empty_quantized
from smelt.runtime.schemes.int8_dynamic import Int8Dynamic
from smelt.runtime.schemes.registry import SCHEMES, defaults, find
from smelt.runtime.schemes.scheme import Codes, Grid, Options, Scheme, Stored


def filled(scheme: str, weight: torch.Tensor, **options: Any) -> Matrix:
    """Return the matrix of `weight`, rounded to nearest; options that are not given have their defaults."""
    kind = find(scheme)
    matrix = Matrix(kind, *weight.shape, defaults(kind) | options)
    fill_(matrix, weight)
    return matrix


def observing(
    module: nn.Module, scheme: str, options: dict[str, Any] | None = None, largest: float = 4.5
) -> Any:
    """Return the quantized `module`; where its scheme wants a range of activations, that is `largest`."""
    layer = quantize_module(module, scheme, options)
    layer.matrix.set_range_(largest)
    return layer


def random_layer(
    scheme: str, codes: Codes, inputs: int = 100, bias: bool = True, **options: Any
) -> QuantizedLinear:
    """Return a layer of these codes with a random bias."""
    whole = nn.Linear(inputs, len(codes.codes), bias)
    layer = empty_quantized(whole, scheme, defaults(find(scheme)) | options).eval()
    assert isinstance(layer, QuantizedLinear)
    layer.matrix.set_(codes)
    if layer.bias is not None:
        layer.bias.data = torch.randn(len(codes.codes))
    return layer


def layouts(scheme: Scheme) -> Iterator[dict[str, Any]]:
    """Yield all options that a scheme can be given."""
    names = [option.name for option in scheme.settings]
    for values in itertools.product(*(option.allowed for option in scheme.settings)):
        yield dict(zip(names, values, strict=True))


class PerTensor(Int8Dynamic):
    """int8 with one scale for the whole matrix, as a scheme with something that is not by row."""

    def fit(self, groups: torch.Tensor, width: int, options: Options) -> Grid:
        """Let the largest magnitude of all be 127."""
        return {"scales": groups.abs().amax().reshape(1, 1) / 127}

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return one scale."""
        return super().storage(rows, width, options) | {"scales": Stored((1,), "float32", by_row=False)}


def per_tensor(weight: torch.Tensor) -> QuantizedLinear:
    """Return a layer of `PerTensor` without a bias."""
    matrix = Matrix(PerTensor(), *weight.shape, {})
    fill_(matrix, weight)
    return QuantizedLinear(weight.shape[1], False, matrix)


ALL = [(name, options) for name, scheme in SCHEMES.items() for options in layouts(scheme)]
IDS = ["-".join([name, *(str(value) for value in options.values())]) for name, options in ALL]
