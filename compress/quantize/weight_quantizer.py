"""Quantization of float weights: quantizers choose the quantized weights, schemes store them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from smelt.compress.quantize.training.straight_through import straight_through
from smelt.core.errors import InputError
from smelt.runtime.layers.corrected_linear import LowRankCorrectedLinear
from smelt.runtime.layers.quantized import (
    QuantizedEmbedding,
    QuantizedLayer,
    empty_quantized,
    is_quantized,
    quantized_bytes,
)
from smelt.runtime.layers.quantized_matrix import QuantizedMatrix
from smelt.runtime.schemes.common.groupwise import split_into_groups
from smelt.runtime.schemes.registry import default_options, find_scheme
from smelt.runtime.schemes.scheme import QuantParams, Scheme, SchemeOptions, UnpackedWeights

# Scales are stored as float16, which ends there.
_MAX_MAGNITUDE = 60_000.0


class WeightQuantizer(Protocol):
    """Chooses the quantized weights of a matrix for a scheme; holds any further data itself."""

    def __call__(self, weight: Tensor, scheme: Scheme, options: SchemeOptions) -> UnpackedWeights:
        """Return the quantized weights and their grid for `weight`, float32 [N, K]."""


# Finds the grid of groups, float32 [N, G, g], of a matrix of K inputs.
GridFinder: TypeAlias = Callable[[Tensor, int, Scheme, SchemeOptions], QuantParams]


def scheme_grid(groups: Tensor, width: int, scheme: Scheme, options: SchemeOptions) -> QuantParams:
    """Return the scheme's own grid of `groups`; a `GridFinder`."""
    return scheme.compute_qparams(groups, width, options)


def round_to_nearest(weight: Tensor, scheme: Scheme, options: SchemeOptions) -> UnpackedWeights:
    """Return `weight` rounded to nearest on the scheme's own grid; a `WeightQuantizer`."""
    return round_on_grid(scheme_grid, weight, scheme, options)


def round_on_grid(
    find_grid: GridFinder, weight: Tensor, scheme: Scheme, options: SchemeOptions
) -> UnpackedWeights:
    """Return `weight` rounded to nearest on the grid from `find_grid`."""
    groups = split_into_groups(weight, scheme.group_size(weight.shape[1], options))
    grid = find_grid(groups, weight.shape[1], scheme, options)
    return UnpackedWeights(scheme.quantize(groups, grid, options), grid)


def quantize_into(
    matrix: QuantizedMatrix, weight: Tensor, quantizer: WeightQuantizer = round_to_nearest
) -> None:
    """Quantize `weight`, float [N, K], and store the result in `matrix`."""
    matrix.set_weight_(quantizer(weight.detach().float(), matrix.scheme, matrix.options))


def fake_quantize(weight: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Return `weight` fake-quantized with the scheme of `matrix`, with straight-through gradients.

    Args:
        weight: float [rows, K]; any rows if the scheme treats rows independently.
        matrix: the matrix with the scheme and options.

    Returns:
        float32 [rows, K].
    """
    with torch.no_grad():
        codes, grid = round_to_nearest(weight.detach().float(), matrix.scheme, matrix.options)
        values = matrix.scheme.dequantize(codes, grid, matrix.options).flatten(1)[:, : weight.shape[1]]
    return straight_through(weight, values)


def fake_quantize_activations(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Return `x` fake-quantized for a layer of `matrix`, with straight-through gradients."""
    with torch.no_grad():
        seen = matrix.scheme.fake_quantize_activations(matrix, x)
    return x if seen is x else straight_through(x, seen)


def require_quantizable(weight: Tensor) -> None:
    """Check that scales of `weight` can be stored.

    Raises:
        InputError: weights are not finite, or too large.
    """
    largest = float(weight.detach().abs().max()) if weight.numel() else 0.0
    if not largest < _MAX_MAGNITUDE:
        raise InputError(
            f"the largest weight is {largest:g}, but weights must be below {_MAX_MAGNITUDE:g}. The"
            " training before this step has probably diverged; lower its learning_rate.",
            code="non-finite-weights",
        )


def quantize_module(
    module: nn.Module,
    scheme: str,
    options: SchemeOptions | None = None,
    quantizer: WeightQuantizer = round_to_nearest,
) -> QuantizedLayer:
    """Return the quantized layer for a Linear, a Conv2d or an Embedding.

    Args:
        module: the layer with float weights.
        scheme: the name of the scheme.
        options: all options of the scheme; None for its defaults.
        quantizer: chooses the quantized weights.

    Raises:
        InputError: the scheme does not support the module or the options, or weights are not finite.
    """
    new = empty_quantized(
        module, scheme, default_options(find_scheme(scheme)) if options is None else options
    )
    weight = module.weight
    assert isinstance(weight, Tensor)
    require_quantizable(weight)
    quantize_into(new.matrix, weight.flatten(1), quantizer)
    if not isinstance(new, QuantizedEmbedding) and new.bias is not None:
        assert isinstance(module.bias, Tensor)
        new.bias.data = module.bias.detach().clone()
    return new.train(module.training)


def quantized_weight_bits(model: nn.Module, stored: int = 4) -> float:
    """Return the mean stored bits per quantized weight, each matrix counted once.

    Scales, zero points, codebooks and low-rank corrections are included.

    Args:
        model: a model with at least one quantized layer.
        stored: bytes of a float weight in the file.
    """
    matrices = {id(m.matrix): m.matrix for m in model.modules() if is_quantized(m)}
    pairs = {
        id(p): p
        for m in model.modules()
        if isinstance(m, LowRankCorrectedLinear)
        for p in m.adapter.parameters()
    }
    found = quantized_bytes(nn.ModuleList(matrices.values())) + stored * sum(
        p.numel() for p in pairs.values()
    )
    weights = sum(len(matrix.codes) * matrix.width for matrix in matrices.values())
    return round(8 * found / weights, 3)
