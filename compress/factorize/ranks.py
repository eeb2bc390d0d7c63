"""Which rank each layer gets: by a rule of its own, or from one budget over all layers.

A layer gains below a limit, and stays whole at it and above: see `limits_of`.

Shapes: M = outputs, K = inputs of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from smelt.compress.calibration.rows import CalibrationRows, outputs
from smelt.compress.factorize.by_time import largest_rank, reading_texts
from smelt.compress.factorize.metrics import Metrics
from smelt.compress.factorize.settings import DEFAULT_ENERGY, FactorizeSettings
from smelt.compress.factorize.svd import thin_pair
from smelt.compress.train.data import IGNORE, TensorBatch
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.models.structure import replace_layer

# Where damage is measured: each layer alone at half of its weights, on so many rows, in so many batches: a
# batch costs a run of the model for each layer, and those of other lengths say other things.
_DAMAGE_RATIO = 0.5
_DAMAGE_ROWS = 8
_DAMAGE_BATCHES = 2


@dataclass(frozen=True)
class Spectrum:
    """A layer of a budget: its singular values (float64, falling), its sizes, and what its error costs.

    limit: the rank from which it stays whole. weight: what a relative squared error of 1 would cost, in a
    unit that all layers have in common.
    """

    sigma: Tensor
    rows: int
    columns: int
    limit: float
    weight: float = 1.0


def find_ranks(
    model: Any,
    layers: Mapping[str, nn.Linear],
    limits: Mapping[str, float],
    metrics: Metrics,
    settings: FactorizeSettings,
    ctx: Context,
) -> dict[str, int]:
    """Return the rank of each layer, that which is asked for; a layer stays whole from its limit on.

    Args:
        model: left as it was.
        layers: of it, by name.
        limits: see `limits_of`.
        metrics: in what their errors are measured.
        settings: rank, ratio, energy or budget.
        ctx: its `progress` is told; `details["sensitivity"]` says what the layers did alone, if that was
        measured.
    """
    if settings.parameter_budget is None:
        ranks = {}
        for at, (name, layer) in enumerate(layers.items(), start=1):
            ranks[name] = rank_alone(name, layer, metrics, settings)
            ctx.progress(at, len(layers), f"rank of {name}")
        return ranks
    found: dict[str, Spectrum] = {}
    for at, (name, layer) in enumerate(layers.items(), start=1):
        sigma = metrics.decomposed(name, layer).sigma
        found[name] = Spectrum(sigma, layer.out_features, layer.in_features, limits[name])
        ctx.progress(at, len(layers), f"spectrum of {name}")
    if settings.objective == "sensitivity":
        damage = damages(model, layers, found, metrics, ctx)
        ctx.details["sensitivity"] = {name: float(f"{value:.3g}") for name, value in damage.items()}
        found = {name: replace(seen, weight=damage[name]) for name, seen in found.items()}
    return shared_budget(found, settings.parameter_budget)


def rank_alone(name: str, layer: nn.Linear, metrics: Metrics, settings: FactorizeSettings) -> int:
    """Return the rank of the layer `name` where there is no budget: given, or by energy."""
    if settings.rank is not None or settings.keep_ratio is not None:
        return _given_rank(layer.out_features, layer.in_features, settings)
    return rank_of_energy(metrics.decomposed(name, layer).sigma, settings.energy or DEFAULT_ENERGY)


def saving(rows: int, columns: int) -> float:
    """Return below which rank a pair has fewer weights than the matrix [rows, columns]."""
    return rows * columns / (rows + columns)


def limits_of(
    model: Any, layers: Mapping[nn.Linear, Sequence[str]], settings: FactorizeSettings
) -> dict[str, float]:
    """Return below which rank each layer gains what `settings` aim at, by its first name.

    Args:
        model: that they are of.
        layers: with all the names that they have.
        settings: with their aim.
    """
    many = reading_texts(model)
    found = {}
    for layer, names in layers.items():
        rows, columns = layer.weight.shape
        limit = saving(rows, columns)
        if settings.optimize_for == "latency":
            limit = min(limit, largest_rank(rows, columns, not many.isdisjoint(names)))
        found[names[0]] = limit
    return found


def _given_rank(rows: int, columns: int, settings: FactorizeSettings) -> int:
    if isinstance(settings.rank, int):
        return min(settings.rank, rows, columns)
    assert settings.keep_ratio is not None
    return max(1, int(settings.keep_ratio * rows * columns / (rows + columns)))


def rank_of_energy(sigma: Tensor, energy: float) -> int:
    """Return the smallest rank that keeps `energy` of the sum of squares of `sigma` (float64, falling)."""
    squares = sigma.square()
    # the share that a rank drops is summed from the small end, where a difference from 1 would be noise
    dropped = squares.flip(0).cumsum(0).flip(0)
    return max(1, int((dropped > (1 - energy) * squares.sum()).sum()))


def damages(
    model: Any, layers: Mapping[str, nn.Linear], found: Mapping[str, Spectrum], metrics: Metrics, ctx: Context
) -> dict[str, float]:
    """Return what each layer alone does to the model's outputs when it is thin, per relative squared error.

    It is the mean squared change of all outputs (logits, vectors) at half of the layer's weights, divided by
    the relative squared error that this leaves in the layer (ASVD, arXiv:2312.05821, takes the change of
    perplexity for its choice of ranks).
    """
    assert metrics.rows is not None
    batches = _few(metrics.rows, _DAMAGE_ROWS, _DAMAGE_BATCHES)
    encoded = _encoded(model, batches)
    inside = _of_encoder(model) if encoded else set()
    whole = list(_of_tokens(model, batches))
    values = sum(out.numel() for out in whole)
    damage = {}
    for at, (name, layer) in enumerate(layers.items(), start=1):
        size = found[name].rows * found[name].columns
        rank = max(1, int(_DAMAGE_RATIO * size / (found[name].rows + found[name].columns)))
        pair, error = thin_pair(layer, rank, metrics.of(name, layer), metrics.decomposed(name, layer))
        read = batches if layer in inside or not encoded else encoded
        replace_layer(model, [], name, pair, {})
        try:
            off = sum(
                float((out - right).square().sum(dtype=torch.float64))
                for out, right in zip(_of_tokens(model, read), whole, strict=True)
            )
        finally:
            replace_layer(model, [], name, layer, {})
        damage[name] = off / values / max(error**2, 1e-12)
        ctx.progress(at, len(layers), "damage of each layer")
    return damage


def _few(rows: CalibrationRows, wanted: int, runs: int) -> list[TensorBatch]:
    """Return about `wanted` rows, the first ones of `runs` batches, which lie as far apart as can be."""
    count = min(runs, len(rows.batches))
    batches = [rows.batches[(2 * at + 1) * len(rows.batches) // (2 * count)] for at in range(count)]
    each = -(-wanted // count)
    return [{name: value[:each] for name, value in batch.items()} for batch in batches]


@torch.inference_mode()
def _encoded(model: Any, batches: Sequence[TensorBatch]) -> list[dict[str, Any]]:
    """Return `batches` as a decoder alone needs them, with what the encoder gives; empty without one."""
    if not model.config.is_encoder_decoder:
        return []
    found = []
    for batch in batches:
        read = {name: batch[name] for name in ("input_ids", "attention_mask")}
        states = model.get_encoder()(**read).last_hidden_state
        rest = {name: value for name, value in batch.items() if name != "input_ids"}
        found.append({**rest, "encoder_outputs": BaseModelOutput(last_hidden_state=states)})
    return found


def _of_encoder(model: Any) -> set[nn.Module]:
    return set(model.get_encoder().modules())


def _of_tokens(model: Any, batches: Sequence[Mapping[str, Any]]) -> Iterator[Tensor]:
    """Yield what `model` makes of each batch, logits of padding left out, float [..., V]."""
    for batch, out in zip(batches, outputs(model, batches), strict=True):
        labels = batch.get("labels")
        padded = labels is not None and out.dim() == 3 and labels.shape == out.shape[:2]
        yield out[labels != IGNORE] if padded else out.clone()


def shared_budget(layers: Mapping[str, Spectrum], parameters: float) -> dict[str, int]:
    """Give each layer the rank that makes the sum of weighted relative squared errors smallest.

    A rank r below the layer's limit costs r (M + K) weights, the whole layer M K and no error. For a price of
    a weight, each layer's best choice is its own; the price is found by bisection (the Lagrangian of the
    problem, as rate-distortion optimization does it), so that all of them together stay within the budget.

    Args:
        layers: by name.
        parameters: fraction of all their weights that may stay.

    Returns:
        ranks; of a layer that stays whole, min(M, K).

    Raises:
        InputError: rank 1 wherever a pair gains is more than the budget.
    """
    whole = sum(layer.rows * layer.columns for layer in layers.values())
    wanted = parameters * whole
    if (least := sum(_cost(layer, 1) for layer in layers.values())) > wanted:
        gaining = sum(layer.limit > 1 for layer in layers.values())
        raise InputError(
            f"factorize: parameter_budget: {parameters:g} of the weights of {len(layers)} layers is less"
            f" than rank 1 leaves where a pair gains ({gaining} of them). Say at least"
            f" {math.ceil(1000 * least / whole) / 1000:g}; with optimize_for: size more layers gain.",
            code="budget-too-small",
            setting="parameter_budget",
        )
    errors = {name: _errors(layer) for name, layer in layers.items()}
    low, high = 0.0, max(float(layer.weight) for layer in layers.values()) + 1.0
    best = dict.fromkeys(layers, 1)
    for _ in range(100):
        price = (low + high) / 2
        ranks = {name: _best(layer, errors[name], price) for name, layer in layers.items()}
        if sum(_cost(layer, ranks[name]) for name, layer in layers.items()) > wanted:
            low = price
        else:
            high, best = price, ranks
    return best


def _errors(layer: Spectrum) -> Tensor:
    """Return the weighted relative squared error of rank 0, 1, ..., float64."""
    squares = layer.sigma.square()
    dropped = squares.flip(0).cumsum(0).flip(0)
    whole = torch.cat([dropped, dropped.new_zeros(1)])
    return whole * (layer.weight / float(squares.sum().clamp(min=1e-300)))


def _best(layer: Spectrum, errors: Tensor, price: float) -> int:
    """Return the rank whose error and price are least; that of the whole layer where that is it."""
    ranks = torch.arange(len(errors))
    pays = ranks < layer.limit
    pays[0] = False  # a layer without any weight is another technique's
    cost = ranks * float(layer.rows + layer.columns)
    total = torch.where(pays, errors + price * cost, torch.inf)
    thin = int(total.argmin())
    whole = price * layer.rows * layer.columns
    return thin if bool(pays.any()) and float(total[thin]) < whole else min(layer.rows, layer.columns)


def _cost(layer: Spectrum, rank: int) -> int:
    if rank < layer.limit:
        return rank * (layer.rows + layer.columns)
    return layer.rows * layer.columns
