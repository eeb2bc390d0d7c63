"""Low-rank corrections of quantized layers: W ~ Q + A B.

For fixed quantized weights Q, the best correction of the error W - Q is its truncated singular value
decomposition; for a fixed correction, Q is the quantization of W - A B. They are updated alternately:

    Q_t = q(W - A_{t-1} B_{t-1}),    A_t B_t = SVD_r(W - Q_t)

From A B = 0 this is LoftQ (Li et al. 2023, arXiv:2310.08659, algorithm 1), and one round of it LQER (Zhang et
al. 2024, arXiv:2402.02446, equations 8 and 9). From A B = SVD_r(W) the largest singular directions are
removed from the weights before quantization (SVDQuant, Li et al. 2024, arXiv:2411.05007, equation 5).
Rounding to a grid that depends on the weights is not a projection, so an iteration may increase the error:
the best is kept.

Error metrics: of weights; of weights scaled by the mean magnitude of each input (LQER's S, equations 11 to
13); of outputs, by the second moment of the inputs (QERA, Zhang et al. 2024, arXiv:2410.06040, theorem 1,
with the ridge of `whitened_svd_metric` in compress/factorize/svd.py).

Shapes: N = outputs, K = inputs of a layer, r = rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.statistics import InputStatistics, cached_statistics, collect_statistics
from smelt.compress.factorize.svd import ErrorMetric, asvd_metric, low_rank_factors, whitened_svd_metric
from smelt.compress.quantize.nested_settings import LowRankCorrection
from smelt.compress.quantize.plan_layers import PlannedLayer, WeightQuantizer, dequantize_codes, output_layer
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.core.near_ties import is_better
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.registry import find_scheme
from smelt.stage import Context

_MAX_LISTED = 3  # layers that a warning lists


@dataclass(frozen=True)
class CorrectedWeight:
    """Quantized weights and their low-rank correction.

    up: float32 [N, r]; down: float32 [r, K]. error_ratios: by iteration, the squared error in the chosen
    metric relative to that of the quantized weights alone, on the samples held back from calibration if there
    are any. This correction has the smallest error on the calibration samples.
    """

    codes: UnpackedWeights
    up: Tensor
    down: Tensor
    error_ratios: tuple[float, ...]

    @property
    def correction(self) -> Tensor:
        """A B, float32 [N, K]."""
        return self.up @ self.down


@torch.no_grad()
def quantize_with_correction(
    weight: Tensor,
    quantize: Callable[[Tensor], UnpackedWeights],
    dequantize: Callable[[UnpackedWeights], Tensor],
    settings: LowRankCorrection,
    metric: ErrorMetric,
    judged: ErrorMetric | None = None,
) -> CorrectedWeight:
    """Return the quantized weights and the low-rank correction for `weight`, float32 [N, K].

    Args:
        weight: not changed.
        quantize: quantizes weights, float32 [N, K].
        dequantize: returns the dequantized weights, float32 [N, K].
        settings: rank (limited to the smaller side), iterations and initialization.
        metric: the error metric.
        judged: the metric of the reported errors, if it is another one.
    """
    judged = judged or metric
    rank = min(settings.rank, *weight.shape)
    uncorrected = quantize(weight)
    base_error = judged.squared_error(weight - dequantize(uncorrected))
    codes, error_ratios = uncorrected, []
    best: tuple[float, UnpackedWeights, Tensor, Tensor] | None = None
    if settings.init == "svd":
        up, down = _svd_pair(weight, rank, metric)
        codes = quantize(weight - up @ down)
    for iteration in range(settings.iterations):
        if iteration:
            codes = quantize(weight - up @ down)
        residual = weight - dequantize(codes)
        up, down = _svd_pair(residual, rank, metric)
        error = metric.squared_error(residual - up @ down)
        error_ratios.append(judged.squared_error(residual - up @ down) / base_error if base_error else 0.0)
        if best is None or is_better(error, best[0]):
            best = error, codes, up, down
    assert best is not None
    return CorrectedWeight(best[1], best[2], best[3], tuple(error_ratios))


def _svd_pair(weight: Tensor, rank: int, metric: ErrorMetric) -> tuple[Tensor, Tensor]:
    up, down, _ = low_rank_factors(weight, rank, metric)
    return up.float(), down.float()


def correction_metric(settings: LowRankCorrection, statistics: InputStatistics | None) -> ErrorMetric:
    """Return the error metric of a layer; that of weights if there are no input statistics.

    Raises:
        InputError: the layer's inputs are not finite.
    """
    if settings.objective == "weights" or statistics is None or not statistics.tokens:
        return ErrorMetric()
    if not bool(statistics.squares.isfinite().all()):
        raise InputError(
            "the layer's inputs are not finite. The training before this step has probably diverged;"
            " lower its learning_rate.",
            code="non-finite-activations",
        )
    if settings.objective == "inputs":
        return asvd_metric(statistics.magnitudes / statistics.tokens, 1.0)
    assert statistics.second_moment is not None
    return whitened_svd_metric(statistics.second_moment, statistics.sums, statistics.tokens, bias=False)


def layers_to_correct(model: Any, layers: Sequence[PlannedLayer]) -> list[PlannedLayer]:
    """Return the layers that get a correction: linear layers, each weight once, without the output layer.

    Matrices that are also embeddings get none, because the correction does not apply to lookups.
    """
    head = output_layer(model)
    tables = {layer.weight_id for layer in layers if not layer.multiplies}
    by_weight: dict[int, PlannedLayer] = {}
    for layer in layers:
        if layer.multiplies and layer.module is not head and layer.weight_id not in tables:
            by_weight.setdefault(layer.weight_id, layer)
    return list(by_weight.values())


def find_corrections(
    model: Any,
    layers: Sequence[PlannedLayer],
    settings: QuantizeSettings,
    quantizer: WeightQuantizer,
    samples: CalibrationSamples | None,
    src: Artifact,
    ctx: Context,
) -> dict[int, CorrectedWeight]:
    """Return quantized weights and corrections of the linear layers among `layers`; `model` is not changed.

    Args:
        model: float32, in eval mode, on the CPU.
        layers: its planned layers.
        settings: settings with `low_rank_correction`.
        quantizer: chooses the quantized weights.
        samples: calibration samples; None if none are needed.
        src: the artifact of the model.
        ctx: reports progress.

    Returns:
        The results by `PlannedLayer.weight_id`.

    Raises:
        InputError: inputs of a layer are not finite.
    """
    targets, low_rank = layers_to_correct(model, layers), settings.correction
    assert low_rank is not None
    corrected: dict[int, CorrectedWeight] = {}
    with ExitStack() as stack:
        statistics: Mapping[str, InputStatistics] = {}
        if settings.calibrates_correction and samples is not None and targets:
            modules = {layer.name: [layer.module] for layer in targets}
            second_moments = low_rank.objective == "outputs"
            if settings.smoothquant_alpha is None:
                context = cached_statistics(
                    model, samples, modules, ctx, artifact_key=src.key, second=second_moments
                )
            else:  # the model differs from the stored one, so cached statistics do not apply
                context = collect_statistics(model, samples, modules, ctx, second=second_moments)
            statistics = stack.enter_context(context)
        for index, layer in enumerate(targets, start=1):
            corrected[layer.weight_id] = _correct_layer(
                layer, low_rank, quantizer, statistics.get(layer.name)
            )
            ctx.progress(index, len(targets), f"low-rank correction of {layer.name}")
    return corrected


def _correct_layer(
    layer: PlannedLayer,
    low_rank: LowRankCorrection,
    quantizer: WeightQuantizer,
    statistics: InputStatistics | None,
) -> CorrectedWeight:
    scheme, weight = find_scheme(layer.scheme), layer.module.weight.detach().float().cpu()
    try:
        metric = correction_metric(low_rank, statistics)
        judged = correction_metric(low_rank, statistics and statistics.judged)
    except InputError as error:
        raise InputError(f"quantize: {layer.name}: {error}", code=error.code) from error
    return quantize_with_correction(
        weight,
        lambda left: quantizer(left, scheme, layer.options),
        lambda codes: dequantize_codes(codes, scheme, layer.options, weight),
        low_rank,
        metric,
        judged,
    )


def correction_details(
    layers: Sequence[PlannedLayer], corrections: Mapping[int, CorrectedWeight], rank: int
) -> dict[str, Any]:
    """Return details for the report: the number of weights in corrections, and their relative errors."""
    names = {layer.weight_id: layer.name for layer in reversed(layers)}
    return {
        "rank": rank,
        "layers": len(corrections),
        "weights": sum(pair.up.numel() + pair.down.numel() for pair in corrections.values()),
        "error_left": {
            names[w]: [float(f"{ratio:.3g}") for ratio in pair.error_ratios]
            for w, pair in corrections.items()
        },
    }


def oversized_correction_warnings(
    layers: Sequence[PlannedLayer],
    corrections: Mapping[int, CorrectedWeight],
    quantized_bits: float,
    stored_bits: int,
) -> list[Message]:
    """Return a warning about corrections that take as many bytes as the quantization of their layer saves.

    Args:
        layers: the planned layers.
        corrections: their corrections.
        quantized_bits: bits per quantized weight.
        stored_bits: bits of a float weight in the file.
    """
    names = {layer.weight_id: layer.name for layer in reversed(layers)}
    larger = []
    for weight, pair in corrections.items():
        rows, columns = len(pair.up), pair.down.shape[1]
        correction_size = pair.up.numel() + pair.down.numel()
        if correction_size * stored_bits >= rows * columns * (stored_bits - quantized_bits):
            larger.append(names[weight])
    if not larger:
        return []
    return [
        warning(
            "no-size-reduction",
            f"low_rank_correction: the correction of {len(larger)} of {len(corrections)} layers needs as many"
            f" bytes as quantization saves ({', '.join(larger[:_MAX_LISTED])}"
            f"{', ...' if len(larger) > _MAX_LISTED else ''}). Lower the rank, or keep these layers in float"
            " with exclude.",
            setting="low_rank_correction",
        )
    ]
