"""Ternary weight splitting: each ternary matrix becomes the sum of two binary ones, and trains on.

Bai et al. 2021, BinaryBERT, arXiv:2012.15701, section 3.2, equations 5 to 8. A ternary model of half the
width learns more easily than a binary one; split, it computes the same with twice the matrices of one bit,
and the training of these begins there. With I the places of a group that are not zero, n its weights, n0
those outside of I, s its scale, and w the float weights behind the codes,

    in I           v1 = m w                   v2 = (1 - m) w
    w > 0 outside  v1 = w + b                 v2 = -b
    else           v1 = b                     v2 = w - b

    b = (n s - sum |w|) / (2 n0)              m = (A11 + A22 - A12) / (2 A11)

with A11 the sum of |w| in I, A12 and A22 those of |v1| and |v2| outside. So v1 + v2 = w, both have the mean
magnitude s / 2, and their signs agree in I alone: the two binary matrices add up to the ternary one.

Where float weights and codes were not made for each other (codes by GPTQ, learned scales), b or m may leave
their ranges, and are kept at their ends: signs are right all the same, mean magnitudes not quite.

Shapes: N = outputs, G = groups of a row, g = inputs of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.quantize.through_codes import LatentEmbedding, LatentLinear, latents_of
from smelt.compress.train.settings import TrainingSettings
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.layers.matrix import Matrix
from smelt.runtime.layers.quantized import QuantizedLinear
from smelt.runtime.layers.split import SplitLinear
from smelt.runtime.models.structure import Edit, replace_module
from smelt.runtime.schemes.parts.groups import groups_of
from smelt.runtime.schemes.registry import SCHEMES, find
from smelt.runtime.schemes.scheme import Codes, Scheme

_LEAST = 1e-3  # b in scales, m in parts of one


def split_groups(weight: Tensor, codes: Tensor, scales: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return v1 and v2 of groups, float64 [N, G, g].

    Args:
        weight: w, [N, G, g].
        codes: -1, 0 or 1, [N, G, g].
        scales: s, [N, G].
        real: which places of a row are weights and do not only fill its last group up, bool [G, g].
    """
    w, s = weight.double(), scales.double()[..., None]
    inside = (codes != 0) & real
    w = torch.where(inside & (w.sign() != codes), s * codes, w)
    outside = ~inside & real
    sizes = w.abs()

    def total(values: Tensor, where: Tensor) -> Tensor:
        return (values * where).sum(dim=-1, keepdim=True)

    n, n0 = real.sum(dim=-1).double()[:, None], outside.sum(dim=-1, keepdim=True).double()
    b = (n * s - total(sizes, real)) / (2 * n0.clamp(min=1))
    b = torch.maximum(b, _LEAST * s)
    v1, v2 = torch.where(w > 0, w + b, b), torch.where(w > 0, -b, w - b)
    a11 = total(sizes, inside)
    part = (a11 + total(v2.abs(), outside) - total(v1.abs(), outside)) / (2 * a11)
    m = part.where(a11 > 0, 0.5).clamp(_LEAST, 1 - _LEAST)
    return torch.where(inside, m * w, v1) * real, torch.where(inside, (1 - m) * w, v2) * real


def split_first(model: nn.Module, edits: list[Edit], settings: TrainingSettings, ctx: Context) -> list[Edit]:
    """Split the ternary layers of `model` before it trains, where the settings ask for it; return its edits.

    Raises:
        InputError: it cannot be done (see `split_layers`).
    """
    if settings.qat is None or not settings.qat.weight_splitting:
        return edits
    edits, ctx.details["split_layers"] = split_layers(model, edits)
    return edits


def split_layers(model: nn.Module, edits: list[Edit]) -> tuple[list[Edit], int]:
    """Split the ternary linear layers of `model` in place, float weights behind both halves.

    A matrix that is looked up too stays as it is: tables have no binary codes.

    Args:
        model: with float weights behind its codes (`put_latent`).
        edits: its structure.

    Returns:
        The structure of the result, and how many layers were split.

    Raises:
        InputError: no layer is ternary, or one has a scale for a whole row, or a low-rank pair beside it.
    """
    latents = latents_of(model)
    looked_up = {id(m.home.matrix) for _, m in latents if isinstance(m, LatentEmbedding)}
    made: dict[int, SplitLinear] = {}
    for name, latent in latents:
        matrix = latent.home.matrix
        if not isinstance(latent, LatentLinear) or not matrix.scheme.halves or id(matrix) in looked_up:
            continue
        if id(latent) not in made:
            edits = _room(edits, name, matrix)
            made[id(latent)] = _halves(latent).train(latent.training)
        replace_module(model, name, made[id(latent)])
    if not made:
        known = " or ".join(name for name, scheme in SCHEMES.items() if scheme.halves)
        raise InputError(
            f"qat: weight_splitting: makes two layers of each {known} one, and the model has none. Put"
            f" quantize:"
            f" {{scheme: {known}}} and a training before this step, or leave it out.",
            code="no-layer-of-scheme",
            setting="qat.weight_splitting",
        )
    return edits, len(made)


def _room(edits: list[Edit], name: str, matrix: Matrix) -> list[Edit]:
    """Return `edits` with two binary layers where `name` was a ternary one.

    Raises:
        InputError: there cannot be two.
    """
    place = next((i for i, e in enumerate(edits) if e["op"] == "quantize" and e["module"] == name), None)
    if place is None:
        raise InputError(
            f"qat: weight_splitting: '{name}' has a low-rank pair beside its codes, which cannot be split."
            f" Leave"
            " low_rank_correction or lora out before it.",
            code="has-low-rank-correction",
            setting="qat.weight_splitting",
        )
    scheme, options = _halved(matrix)
    if matrix.scheme.group(matrix.width, matrix.options) != scheme.group(matrix.width, options):
        raise InputError(
            f"qat: weight_splitting: '{name}' has a scale for each row, and {scheme.name} codes have one"
            f" for each"
            " group of inputs. Quantize with granularity: group.",
            code="wrong-granularity",
            setting="qat.weight_splitting",
        )
    halves = [
        {"op": "quantize", "module": f"{name}.{half}", "scheme": scheme.name, **options}
        for half in ("first", "second")
    ]
    return [*edits[:place], {"op": "split", "module": name}, *halves, *edits[place + 1 :]]


def _halved(matrix: Matrix) -> tuple[Scheme, dict[str, Any]]:
    """Return the scheme of the halves, and those of the matrix's options that it has."""
    scheme = find(matrix.scheme.halves)
    return scheme, {one.name: matrix.options[one.name] for one in scheme.settings}


def _halves(latent: LatentLinear) -> SplitLinear:
    """Return the layer as two, with float weights behind them."""
    matrix = latent.home.matrix
    size = matrix.scheme.group(matrix.width, matrix.options)
    codes, grid = matrix.decided()
    signs = matrix.scheme.values(codes, grid, matrix.options).sign()
    real = groups_of(torch.ones(1, matrix.width), size)[0] > 0
    parts = split_groups(groups_of(latent.weight.detach(), size), signs, grid["scales"], real)
    scheme, options = _halved(matrix)
    halves = []
    for number, part in enumerate(parts):
        home = QuantizedLinear(
            latent.in_features,
            latent.bias is not None and number == 0,
            Matrix(scheme, latent.out_features, matrix.width, options),
        )
        home.matrix.set_(Codes(part >= 0, {"scales": grid["scales"] / 2}))
        if home.bias is not None:
            home.bias.data = latent.bias.detach().clone()
        weight = nn.Parameter(part.flatten(1)[:, : matrix.width].float())
        halves.append(LatentLinear(home, weight).train(latent.training))
    return SplitLinear(*halves)
