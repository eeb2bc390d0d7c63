"""From float weights to codes: a coder decides them, the scheme knows the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from smelt.compress.quantize.training.straight_through import straight_through
from smelt.core.errors import InputError
from smelt.runtime.layers.adapted import AdaptedLinear
from smelt.runtime.layers.matrix import Matrix
from smelt.runtime.layers.quantized import (
    Quantized,
    QuantizedEmbedding,
    empty_quantized,
    is_quantized,
    matrix_bytes,
)
from smelt.runtime.schemes.parts.groups import groups_of
from smelt.runtime.schemes.registry import defaults, find
from smelt.runtime.schemes.scheme import Codes, Grid, Options, Scheme

# Scales are kept as float16, which ends there.
_LARGEST = 60_000.0


class Coder(Protocol):
    """Decides which codes of a scheme stand for a matrix; what else it looks at, it brings along."""

    def __call__(self, weight: Tensor, scheme: Scheme, options: Options) -> Codes:
        """Return codes and their grid for `weight`, float32 [N, K]."""


# Finds the grid of groups, float32 [N, G, g], of a matrix of K inputs.
Fit: TypeAlias = Callable[[Tensor, int, Scheme, Options], Grid]


def plain_fit(groups: Tensor, width: int, scheme: Scheme, options: Options) -> Grid:
    """Return the scheme's own grid of `groups`: a `Fit`."""
    return scheme.fit(groups, width, options)


def round_to_nearest(weight: Tensor, scheme: Scheme, options: Options) -> Codes:
    """Let every weight become the nearest value on the scheme's own grid: a `Coder` that needs no data."""
    return nearest_on(plain_fit, weight, scheme, options)


def nearest_on(fit: Fit, weight: Tensor, scheme: Scheme, options: Options) -> Codes:
    """Let every weight become the nearest value on the grid that `fit` finds."""
    groups = groups_of(weight, scheme.group(weight.shape[1], options))
    grid = fit(groups, weight.shape[1], scheme, options)
    return Codes(scheme.nearest(groups, grid, options), grid)


def fill_(matrix: Matrix, weight: Tensor, coder: Coder = round_to_nearest) -> None:
    """Decide codes and scales for `weight`, float [N, K], and put them into `matrix`."""
    matrix.set_(coder(weight.detach().float(), matrix.scheme, matrix.options))


def fake(weight: Tensor, matrix: Matrix) -> Tensor:
    """Return what codes of `weight` would stand for in the layout of `matrix`; gradients pass straight.

    Args:
        weight: float [rows, K]; any rows, where the scheme decides row by row.
        matrix: whose scheme and options are taken.

    Returns:
        float32 [rows, K].
    """
    with torch.no_grad():
        codes, grid = round_to_nearest(weight.detach().float(), matrix.scheme, matrix.options)
        values = matrix.scheme.values(codes, grid, matrix.options).flatten(1)[:, : weight.shape[1]]
    return straight_through(weight, values)


def fake_activations(x: Tensor, matrix: Matrix) -> Tensor:
    """Return the activations that a layer of `matrix` trains on; gradients pass straight through."""
    with torch.no_grad():
        seen = matrix.scheme.seen_in_training(matrix, x)
    return x if seen is x else straight_through(x, seen)


def require_finite(weight: Tensor) -> None:
    """Refuse weights of which no scale could be kept.

    Raises:
        InputError: some are not finite, or too large.
    """
    largest = float(weight.detach().abs().max()) if weight.numel() else 0.0
    if not largest < _LARGEST:
        raise InputError(
            f"its largest weight is {largest:g}; expected numbers below {_LARGEST:g}."
            " The training before it has probably gone astray.",
            code="non-finite-weights",
        )


def quantize_module(
    module: nn.Module, scheme: str, options: Options | None = None, coder: Coder = round_to_nearest
) -> Quantized:
    """Return the quantized counterpart of a Linear, a Conv2d or an Embedding, codes and scales decided.

    Args:
        module: with float weights.
        scheme: by name.
        options: all that the scheme wants to know; None for its defaults.
        coder: decides.

    Raises:
        InputError: a module or options that the scheme does not know, or weights that are not finite.
    """
    new = empty_quantized(module, scheme, defaults(find(scheme)) if options is None else options)
    weight = module.weight
    assert isinstance(weight, Tensor)
    require_finite(weight)
    fill_(new.matrix, weight.flatten(1), coder)
    if not isinstance(new, QuantizedEmbedding) and new.bias is not None:
        assert isinstance(module.bias, Tensor)
        new.bias.data = module.bias.detach().clone()
    return new.train(module.training)


def coded_bits(model: nn.Module, stored: int = 4) -> float:
    """Return the bits of a coded weight with its part of all that is stored of it, each matrix counted once.

    That is scales, zero points and codebooks, and the pair of low rank beside it.

    Args:
        model: with at least one quantized layer.
        stored: bytes of a float weight in the file.
    """
    matrices = {id(m.matrix): m.matrix for m in model.modules() if is_quantized(m)}
    pairs = {
        id(p): p for m in model.modules() if isinstance(m, AdaptedLinear) for p in m.adapter.parameters()
    }
    found = matrix_bytes(nn.ModuleList(matrices.values())) + stored * sum(p.numel() for p in pairs.values())
    weights = sum(len(matrix.codes) * matrix.width for matrix in matrices.values())
    return round(8 * found / weights, 3)
