"""Choose the rank of each layer: by its own rule, or from one parameter budget over all layers.

A layer is factorized below a rank limit and kept whole otherwise: see `rank_limits`. The limit is a rule from
measurements. The time of a linear layer on a CPU grows with its weights, and each layer has a fixed overhead:
its inputs are quantized, its kernel is set up. Two factors have fewer weights and one linear layer more
(alone, or with the first factor packed with others of the same input). Measured in ONNX Runtime's int8
(DynamicQuantizeMatMul), one more linear layer takes as long as reading 100,000 weights with one row of
activations, as in each step of a decoder, and as multiplying with 5,000 with the rows of a whole text; thin
matrices take up to a tenth longer for the same weights. Measured: docs/measurements/techniques.md.

In float32 factors gain earlier. The rule depends neither on a later scheme nor on the machine: so the same
recipe makes the same model everywhere, and the result is not slower in int8.

Shapes: M = outputs, K = inputs of a layer; h, w = height and width of an image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from smelt.calibration.samples import CalibrationSamples, model_outputs
from smelt.compress.factorize.settings import DEFAULT_ENERGY, FactorizeSettings
from smelt.compress.factorize.svd import LayerMetrics, low_rank_layer
from smelt.core.errors import InputError
from smelt.core.near_ties import round_significant
from smelt.models.edits import replace_layer
from smelt.models.families.registry import blocks_of, encoder_inputs
from smelt.models.layers import SharedLinear
from smelt.stage import Context
from smelt.tasks.samples import IGNORE_INDEX, TensorBatch

# Overhead of one more linear layer, in weights
DECODING_OVERHEAD_WEIGHTS = 100_000
SEQUENCE_OVERHEAD_WEIGHTS = 5_000
# Effective weights of the original matrix, as a fraction, since thin matrices are slower
LOW_RANK_EFFICIENCY = 0.9


def faster_below_rank(rows: int, columns: int, full_sequence: bool) -> float:
    """Return the rank below which factors are predicted to be faster than the matrix [rows, columns].

    Args:
        rows: outputs of the layer.
        columns: its inputs.
        full_sequence: whether it gets the tokens of a whole text at once instead of one per step.
    """
    return max(
        0.0,
        LOW_RANK_EFFICIENCY * rows * columns
        - (SEQUENCE_OVERHEAD_WEIGHTS if full_sequence else DECODING_OVERHEAD_WEIGHTS),
    ) / (rows + columns)


def full_sequence_layers(model: Any) -> set[str]:
    """Return the names of the linear layers of `model` that get the tokens of a whole text at once.

    They are those of the encoder, and the keys and values of cross-attention, computed once per text. Linear
    layers of a decoder mostly get one token per step; an output layer gets one per text or step.
    """
    layers: set[str] = set()
    divided = {n for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, SharedLinear)}
    for block in blocks_of(model):
        for attention in block.attentions:
            if attention.cross:
                layers |= {attention.key, attention.value}
            elif not block.stack.causal:
                layers |= set(attention.linear_layers)
        if not block.stack.causal:
            layers |= {layer for part in block.feed_forwards for layer in part.linear_layers}
    return layers | {f"{name}.shared" for name in layers & divided}


# Sensitivity: each layer alone is reduced to half of its weights, on few samples in few batches; each batch
# costs a run of the model per layer, and batches of other lengths give other values.
_SENSITIVITY_RATIO = 0.5
_SENSITIVITY_SAMPLES = 8
_SENSITIVITY_BATCHES = 2


@dataclass(frozen=True)
class LayerSpectrum:
    """A layer in a budget: its singular values (float64, falling), its sizes, and the weight of its error.

    rank_limit: the rank from which it is kept whole. weight: the cost of a relative squared error of 1, in a
    unit common to all layers.
    """

    singular_values: Tensor
    rows: int
    columns: int
    rank_limit: float
    weight: float = 1.0


def choose_ranks(
    model: Any,
    layers: Mapping[str, nn.Linear],
    limits: Mapping[str, float],
    metrics: LayerMetrics,
    settings: FactorizeSettings,
    ctx: Context,
) -> dict[str, int]:
    """Return the chosen rank of each layer; a layer is kept whole from its limit on.

    Args:
        model: not changed.
        layers: of the model, by name.
        limits: see `rank_limits`.
        metrics: their error metrics.
        settings: rank, keep_ratio, energy or parameter_budget.
        ctx: progress; `details["sensitivity"]` receives the sensitivity of each layer, if it was
            measured.
    """
    if settings.parameter_budget is None:
        ranks = {}
        for index, (name, layer) in enumerate(layers.items(), start=1):
            ranks[name] = choose_layer_rank(name, layer, metrics, settings)
            ctx.progress(index, len(layers), f"rank of {name}")
        return ranks
    spectra: dict[str, LayerSpectrum] = {}
    for index, (name, layer) in enumerate(layers.items(), start=1):
        sigma = metrics.decompose(name, layer).singular_values
        spectra[name] = LayerSpectrum(sigma, layer.out_features, layer.in_features, limits[name])
        ctx.progress(index, len(layers), f"spectrum of {name}")
    if settings.objective == "sensitivity":
        sensitivities = rank_sensitivities(model, layers, spectra, metrics, ctx)
        ctx.details["sensitivity"] = sensitivities
        spectra = {name: replace(spectrum, weight=sensitivities[name]) for name, spectrum in spectra.items()}
    return allocate_ranks(spectra, settings.parameter_budget)


def choose_layer_rank(name: str, layer: nn.Linear, metrics: LayerMetrics, settings: FactorizeSettings) -> int:
    """Return the rank of the layer `name` without a budget: given, or by energy."""
    if settings.rank is not None or settings.keep_ratio is not None:
        return _given_rank(layer.out_features, layer.in_features, settings)
    return rank_of_energy(metrics.decompose(name, layer).singular_values, settings.energy or DEFAULT_ENERGY)


def smaller_below_rank(rows: int, columns: int) -> float:
    """Return the rank below which factors have fewer weights than the matrix [rows, columns]."""
    return rows * columns / (rows + columns)


def rank_limits(
    model: Any, layers: Mapping[nn.Linear, Sequence[str]], settings: FactorizeSettings
) -> dict[str, float]:
    """Return the rank limit below which each layer gains in `optimize_for`, by its first name.

    Args:
        model: the model with the layers.
        layers: with all their names.
        settings: with optimize_for.
    """
    full_sequence = full_sequence_layers(model)
    limits = {}
    for layer, names in layers.items():
        rows, columns = layer.weight.shape
        limit = smaller_below_rank(rows, columns)
        if settings.optimize_for == "latency":
            limit = min(limit, faster_below_rank(rows, columns, not full_sequence.isdisjoint(names)))
        limits[names[0]] = limit
    return limits


def _given_rank(rows: int, columns: int, settings: FactorizeSettings) -> int:
    if isinstance(settings.rank, int):
        return min(settings.rank, rows, columns)
    assert settings.keep_ratio is not None
    return max(1, int(settings.keep_ratio * rows * columns / (rows + columns)))


def rank_of_energy(sigma: Tensor, energy: float) -> int:
    """Return the smallest rank that keeps `energy` of the sum of squares of `sigma` (float64, falling)."""
    squares = sigma.square()
    # the dropped share is summed from the small end, where a difference from 1 would be rounding noise
    dropped = squares.flip(0).cumsum(0).flip(0)
    return max(1, int((dropped > (1 - energy) * squares.sum()).sum()))


def rank_sensitivities(
    model: Any,
    layers: Mapping[str, nn.Linear],
    spectra: Mapping[str, LayerSpectrum],
    metrics: LayerMetrics,
    ctx: Context,
) -> dict[str, float]:
    """Return the effect of each factorized layer alone on the model's outputs, per relative squared error.

    It is the mean squared change of all outputs (logits, embeddings) at half of the layer's weights, over
    the relative squared error of the layer (ASVD, arXiv:2312.05821, uses the change of perplexity to choose
    ranks).
    """
    assert metrics.rows is not None
    batches = _spread_batches(metrics.rows, _SENSITIVITY_SAMPLES, _SENSITIVITY_BATCHES)
    encoded = _with_encoder_outputs(model, batches)
    encoder_modules = set(model.get_encoder().modules()) if encoded else set()
    full_outputs = list(_token_outputs(model, batches))
    values = sum(out.numel() for out in full_outputs)
    sensitivities = {}
    for index, (name, layer) in enumerate(layers.items(), start=1):
        size = spectra[name].rows * spectra[name].columns
        rank = max(1, int(_SENSITIVITY_RATIO * size / (spectra[name].rows + spectra[name].columns)))
        pair, error = low_rank_layer(
            layer, rank, metrics.metric_of(name, layer), metrics.decompose(name, layer)
        )
        inputs = batches if layer in encoder_modules or not encoded else encoded
        replace_layer(model, [], name, pair, {})
        try:
            squared_error = sum(
                float((out - right).square().sum(dtype=torch.float64))
                for out, right in zip(_token_outputs(model, inputs), full_outputs, strict=True)
            )
        finally:
            replace_layer(model, [], name, layer, {})
        sensitivities[name] = round_significant(squared_error / values / max(error**2, 1e-12))
        ctx.progress(index, len(layers), "sensitivity of each layer")
    return sensitivities


def _spread_batches(samples: CalibrationSamples, wanted: int, runs: int) -> list[TensorBatch]:
    """Return about `wanted` samples, the first ones of `runs` batches, evenly spaced."""
    count = min(runs, len(samples.batches))
    batches = [
        samples.batches[(2 * index + 1) * len(samples.batches) // (2 * count)] for index in range(count)
    ]
    per_batch = -(-wanted // count)
    return [{name: value[:per_batch] for name, value in batch.items()} for batch in batches]


@torch.inference_mode()
def _with_encoder_outputs(model: Any, batches: Sequence[TensorBatch]) -> list[dict[str, Any]]:
    """Return `batches` as inputs of a decoder, with encoder outputs; empty without an encoder."""
    if not model.config.is_encoder_decoder:
        return []
    decoder_batches = []
    for batch in batches:
        states = model.get_encoder()(**encoder_inputs(batch)).last_hidden_state
        decoder_inputs = {name: value for name, value in batch.items() if name != model.main_input_name}
        decoder_batches.append(
            {**decoder_inputs, "encoder_outputs": BaseModelOutput(last_hidden_state=states)}
        )
    return decoder_batches


def _token_outputs(model: Any, batches: Sequence[Mapping[str, Any]]) -> Iterator[Tensor]:
    """Yield the outputs of `model` for each batch, without logits of padding, float [..., V]."""
    for batch, out in zip(batches, model_outputs(model, batches), strict=True):
        labels = batch.get("labels")
        padded = labels is not None and out.dim() == 3 and labels.shape == out.shape[:2]
        yield out[labels != IGNORE_INDEX] if padded else out.clone()


def allocate_ranks(layers: Mapping[str, LayerSpectrum], budget: float) -> dict[str, int]:
    """Return the ranks that minimize the sum of weighted relative squared errors within the budget.

    A rank r below the layer's limit costs r (M + K) weights, the whole layer M K and no error. For a given
    price per weight, each layer's best choice is independent; the price is found by bisection (Lagrangian
    relaxation, as in rate-distortion optimization), so that all layers together are within the budget.

    Args:
        layers: by name.
        budget: fraction of all their weights to keep.

    Returns:
        ranks; of a layer that is kept whole, min(M, K).

    Raises:
        InputError: rank 1 in every layer that gains exceeds the budget.
    """
    num_weights = sum(layer.rows * layer.columns for layer in layers.values())
    max_weights = budget * num_weights
    if (min_weights := sum(_num_parameters(layer, 1) for layer in layers.values())) > max_weights:
        gaining = sum(layer.rank_limit > 1 for layer in layers.values())
        raise InputError(
            f"factorize: parameter_budget {budget:g} of the weights of {len(layers)} layers is too"
            f" small, even with rank 1 in all {gaining} layers that can be factorized. Set at"
            f" least {math.ceil(1000 * min_weights / num_weights) / 1000:g}, or optimize_for: size, which"
            " factorizes more layers.",
            code="budget-too-small",
            setting="parameter_budget",
        )
    errors = {name: _rank_errors(layer) for name, layer in layers.items()}
    low, high = 0.0, max(float(layer.weight) for layer in layers.values()) + 1.0
    best_ranks = dict.fromkeys(layers, 1)
    for _ in range(100):
        price = (low + high) / 2
        ranks = {name: _best_rank(layer, errors[name], price) for name, layer in layers.items()}
        if sum(_num_parameters(layer, ranks[name]) for name, layer in layers.items()) > max_weights:
            low = price
        else:
            high, best_ranks = price, ranks
    return best_ranks


def _rank_errors(layer: LayerSpectrum) -> Tensor:
    """Return the weighted relative squared error of rank 0, 1, ..., float64."""
    squares = layer.singular_values.square()
    dropped = squares.flip(0).cumsum(0).flip(0)
    squared_errors = torch.cat([dropped, dropped.new_zeros(1)])
    return squared_errors * (layer.weight / float(squares.sum().clamp(min=1e-300)))


def _best_rank(layer: LayerSpectrum, errors: Tensor, price: float) -> int:
    """Return the rank with the least sum of error and price; the full rank if the whole layer has it."""
    ranks = torch.arange(len(errors))
    pays = ranks < layer.rank_limit
    pays[0] = False  # rank 0 would remove the layer
    cost = ranks * float(layer.rows + layer.columns)
    total = torch.where(pays, errors + price * cost, torch.inf)
    best_rank = int(total.argmin())
    full_cost = price * layer.rows * layer.columns
    return (
        best_rank
        if bool(pays.any()) and float(total[best_rank]) < full_cost
        else min(layer.rows, layer.columns)
    )


def _num_parameters(layer: LayerSpectrum, rank: int) -> int:
    if rank < layer.rank_limit:
        return rank * (layer.rows + layer.columns)
    return layer.rows * layer.columns


def tucker2_macs(conv: nn.Conv2d, inner: int | None, outer: int) -> int:
    """Return the multiply-accumulates of Tucker-2 for each output position.

    The first 1 x 1 convolution is computed at each input position; their number follows from the stride.
    """
    taps = math.prod(conv.kernel_size)
    first_macs = 0 if inner is None else math.prod(conv.stride) * conv.in_channels * inner
    return first_macs + taps * (inner or conv.in_channels) * outer + outer * conv.out_channels


def cp_macs(conv: nn.Conv2d, rank: int) -> int:
    """Return the multiply-accumulates of CP for each output position."""
    height, width = conv.kernel_size
    vertical_stride, horizontal_stride = conv.stride
    return rank * (
        vertical_stride * horizontal_stride * conv.in_channels
        + horizontal_stride * height
        + width
        + conv.out_channels
    )


def convolution_macs(conv: nn.Conv2d) -> int:
    """Return the multiply-accumulates of a convolution for each output position."""
    return math.prod(conv.kernel_size) * conv.in_channels * conv.out_channels


def count_factorized_weights(conv: nn.Conv2d, method: str, ranks: tuple[int, ...]) -> int:
    """Return the number of weights of the factors of `conv`, without its bias."""
    taps, (in_channels, out_channels) = math.prod(conv.kernel_size), (conv.in_channels, conv.out_channels)
    if method == "cp":
        return ranks[0] * (in_channels + sum(conv.kernel_size) + out_channels)
    inner = ranks[0] if len(ranks) == 2 else None
    first_weights = 0 if inner is None else in_channels * inner
    return first_weights + taps * (inner or in_channels) * ranks[-1] + ranks[-1] * out_channels
