"""Reconstruction: a least-squares refit of the remaining weights compensates the pruned inputs.

A linear layer y = W x + b loses the inputs of the pruned heads or neurons. The weights W' for the kept inputs
x_k and the bias b' minimize the output error on calibration samples (He et al. 2017, Channel pruning,
arXiv:1707.06168, section 3.1: reconstruction with the kept channels; the ridge follows SparseGPT):

    minimize  sum |W x + b - W' x_k - b'|^2 + e |W' - W_k|^2
    W' = W_k + W_c M_ck (M_kk + e I)^-1          c: the pruned inputs, M = X X^T
    b' = b + W m - W' m_k                         where there is a bias: M around the means m of the inputs

e is a small fraction of the mean of M_kk's diagonal; a larger e keeps W' closer to the plain cut W_k, which
inputs without variance keep. The rows of W are independent, so in a factorized layer only the factor that
reads the inputs is refitted, and this is optimal for the product of both. Where zeros of W have to be kept
(sparsify), each row is fitted on its own nonzero positions.

Shapes: N = outputs, K = inputs, k = kept ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from smelt.calibration.run_blocks import run_blocks, visit_blocks
from smelt.calibration.samples import CalibrationSamples, load_calibration_samples
from smelt.calibration.sequential import RunningBlock
from smelt.calibration.statistics import InputStatistics, warn_of_few_tokens
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.units import (
    AttentionGroup,
    FeedForwardGroup,
    cut_heads,
    cut_neurons,
    half_path,
    linear_with_inputs,
)
from smelt.core.artifact import Artifact
from smelt.core.near_ties import first_within_tolerance
from smelt.models.edits import Edit, is_masked
from smelt.models.families.registry import Block
from smelt.models.layers import LowRankLinear
from smelt.models.streamed_model import StreamedModel
from smelt.stage import Context

if TYPE_CHECKING:
    from smelt.compress.quantize.requantize import Requantizer, RoundWeights


# Groups that lose units, each with a function that returns its kept units, int64, ascending.
UnitSelection: TypeAlias = Sequence[tuple[AttentionGroup | FeedForwardGroup, Callable[[], Tensor]]]
# Fraction of the mean diagonal of M that is added to the diagonal.
RECONSTRUCTION_DAMPING = 0.01
# Limits of the refit with fixed zeros: conjugate gradient steps, and residual relative to the first one.
_MAX_ITERATIONS, _TOLERANCE = 100, 1e-4


def cut_units(
    model: Any,
    edits: list[Edit],
    selection: UnitSelection,
    samples: CalibrationSamples | None,
    ctx: Context,
    streamed: StreamedModel | None = None,
    codes: Requantizer | None = None,
) -> dict[str, float]:
    """Remove all units that `selection` does not keep; with `samples`, refit the layers that read the rest.

    The refit runs block by block: each layer is fitted on its inputs after all earlier cuts, attentions
    before feed-forward parts.

    Args:
        model: float32, in eval mode, on the CPU; changed in place.
        edits: the edits of the model; the cuts are appended.
        selection: each group once.
        samples: calibration samples for the refit; None for no refit.
        ctx: device, threads, progress; gets a warning if a layer has fewer tokens than inputs.
        streamed: the model, if its blocks are read and written one by one.
        codes: quantizes each refitted layer at once if the model was quantized, so that later layers are
            fitted on the outputs of the quantized weights.

    Returns:
        The results of `refit_layer` by layer name, rounded.
    """
    if samples is None:
        for block in visit_blocks(model, ctx, streamed):
            for group, select in _selection_in_block(block, selection):
                _cut_group(model, edits, group, select())
        return {}
    error_ratios: dict[str, float] = {}
    token_counts: list[tuple[int, int]] = []
    for step in run_blocks(model, samples, ctx, stage="prune", offloaded=streamed):
        for group, select in _selection_in_block(step.block, selection):
            name = group.structure.linear_layers[-1]
            statistics, old_weight = (
                layer_input_statistics(step, model, name),
                linear_with_inputs(model, name).weight.detach(),
            )
            kept_inputs = _cut_group(model, edits, group, select())
            rounded = codes.rounder_of(model, half_path(model, name, "down")) if codes is not None else None
            error_ratios[name] = round(
                refit_layer(model, name, old_weight, kept_inputs, statistics, rounded), 4
            )
            token_counts.append((statistics.tokens, len(kept_inputs)))
            del statistics, old_weight  # before the next ones are made
    warn_of_few_tokens(token_counts, samples, ctx)
    return error_ratios


def _selection_in_block(block: Block, chosen: UnitSelection) -> UnitSelection:
    """Return the groups of `chosen` that are parts of `block`, attentions first."""
    return [(group, select) for group, select in chosen if group.structure in block.parts]


def _cut_group(
    model: Any, edits: list[Edit], group: AttentionGroup | FeedForwardGroup, kept_indices: Tensor
) -> Tensor:
    """Cut one group; return the kept inputs of its last linear layer."""
    if isinstance(group, AttentionGroup):
        return cut_heads(model, edits, group, kept_indices)
    return cut_neurons(model, edits, group, kept_indices)


def layer_input_statistics(step: RunningBlock, model: nn.Module, name: str) -> InputStatistics:
    """Return the input statistics of the linear layer `name` in the block's present state."""
    with step.collect({name: [linear_with_inputs(model, name)]}) as statistics:
        return statistics[name]


@torch.no_grad()
def refit_layer(
    model: Any,
    name: str,
    old_weight: Tensor,
    kept_indices: Tensor,
    statistics: InputStatistics,
    round_weights: RoundWeights | None = None,
) -> float:
    """Refit the weights and the bias of the layer `name` after its inputs were cut to `kept_indices`.

    Args:
        model: changed in place.
        name: a linear or factorized layer.
        old_weight: the weight before the cut, float [N, K]; of a factorized layer that of `down`.
        kept_indices: the indices of the kept inputs, int64 [k], ascending.
        statistics: the input statistics before the cut, with the second moment [K, K].
        round_weights: rounds the weights of a quantized layer. With few bits, rounding a refit may cost more
            than the refit gains; then the weights of the plain cut are used and only the bias is fitted.

    Returns:
        The squared output error relative to that of the plain cut, on the samples held back from calibration
        if there are any; 1 for a layer without inputs.
    """
    layer, owner = linear_with_inputs(model, name), bias_owner(model.get_submodule(name))
    mean = None if owner.bias is None else statistics.mean
    moment, judged_moment = (_moment_around(each, mean) for each in (statistics, statistics.judged))
    removed = torch.ones(statistics.width, dtype=torch.bool)
    removed[kept_indices] = False
    old = old_weight.detach().double().cpu()
    if is_masked(layer):
        fitted = solve_least_squares_with_zeros(old, moment, kept_indices, removed)
    else:
        fitted = solve_least_squares(old, moment, kept_indices, removed)

    def error_of(weight: Tensor, moment: Tensor = moment) -> float:
        difference = old.clone()
        difference[:, kept_indices] -= weight
        return _squared_error(difference, moment)

    if round_weights is not None:
        kept_statistics = _select_inputs(statistics, kept_indices)
        rounded = [
            round_weights(weight, kept_statistics).double() for weight in (old[:, kept_indices], fitted)
        ]
        fitted = rounded[first_within_tolerance([error_of(weight) for weight in rounded])]
    layer.weight.copy_(fitted)
    if mean is not None:
        shift = old @ mean - fitted @ mean[kept_indices]
        if owner is not layer:
            shift = owner.weight.double().cpu() @ shift
        owner.bias.add_(shift.to(owner.bias))
    cut_error = error_of(old[:, kept_indices], judged_moment)
    return error_of(fitted, judged_moment) / cut_error if cut_error > 0 else 1.0


def _moment_around(statistics: InputStatistics, mean: Tensor | None) -> Tensor:
    """Return the second moment around `mean`, or around 0."""
    assert statistics.second_moment is not None
    return statistics.second_moment if mean is None else statistics.centered_second_moment(mean)


def _select_inputs(statistics: InputStatistics, places: Tensor) -> InputStatistics:
    """Return the statistics of the inputs `places`, int64 [k]."""
    assert statistics.second_moment is not None
    return replace(
        statistics,
        sums=statistics.sums[places],
        squares=statistics.squares[places],
        magnitudes=statistics.magnitudes[places],
        second_moment=statistics.second_moment[places][:, places],
        held_back=None,
    )


def solve_least_squares(weight: Tensor, moment: Tensor, kept_indices: Tensor, removed: Tensor) -> Tensor:
    """Return W', float64 [N, k], from W [N, K], M [K, K], the kept indices and the mask of removed inputs."""
    matrix, target = _normal_equations(weight, moment, kept_indices, removed)
    if not float(matrix.diagonal().max()) > 0:  # no sample reached it
        return weight[:, kept_indices]
    solved: Tensor = torch.linalg.solve(matrix, target.t())
    return weight[:, kept_indices] + solved.t()


def solve_least_squares_with_zeros(
    weight: Tensor, moment: Tensor, kept_indices: Tensor, removed: Tensor
) -> Tensor:
    """Return W' like `solve_least_squares`, but keep the zeros of each row of W [N, K].

    Each row has its own equations. All are solved together by conjugate gradients (Hestenes & Stiefel
    1952), scaled by the diagonal, on the nonzero positions. The iteration starts at the plain cut and
    improves with each step, so the result is never worse.
    """
    matrix, target = _normal_equations(weight, moment, kept_indices, removed)
    diagonal = matrix.diagonal()
    if not float(diagonal.max()) > 0:
        return weight[:, kept_indices]
    mask = weight[:, kept_indices] != 0
    change, residual = torch.zeros_like(target), target * mask
    scaled = residual / diagonal
    along, size = scaled.clone(), (residual * scaled).sum(dim=1, keepdim=True)
    tolerance = _TOLERANCE**2 * size
    for _ in range(_MAX_ITERATIONS):
        if bool((size <= tolerance).all()):
            break
        mapped = (along @ matrix) * mask
        step = size / (along * mapped).sum(dim=1, keepdim=True).clamp(min=1e-300)
        change += step * along
        residual -= step * mapped
        scaled = residual / diagonal
        previous_size, size = size, (residual * scaled).sum(dim=1, keepdim=True)
        along = scaled + size / previous_size.clamp(min=1e-300) * along
    return weight[:, kept_indices] + change


def _normal_equations(
    weight: Tensor, moment: Tensor, kept_indices: Tensor, removed: Tensor
) -> tuple[Tensor, Tensor]:
    """Return M_kk + e I, float64 [k, k], and W_c M_ck [N, k]."""
    matrix = moment[kept_indices][:, kept_indices]
    matrix.diagonal().add_(RECONSTRUCTION_DAMPING * float(matrix.diagonal().mean()))
    return matrix, weight[:, removed] @ moment[removed][:, kept_indices]


def _squared_error(weight: Tensor, moment: Tensor) -> float:
    return max(0.0, float(((weight @ moment) * weight).sum()))


def bias_owner(module: nn.Module) -> nn.Linear:
    """Return the Linear that holds the bias of a layer: itself, or `up` of a factorized layer."""
    owner = module.up if isinstance(module, LowRankLinear) else module
    assert isinstance(owner, nn.Linear)
    return owner


def load_reconstruction_samples(
    model: Any, src: Artifact, settings: PruneSettings, ctx: Context
) -> CalibrationSamples | None:
    """Return the calibration samples for the reconstruction; None without reconstruction or samples."""
    if not settings.reconstruct:
        return None
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None or not len(split):
        ctx.warn(
            "no-calibration-data",
            "Without samples the remaining weights are not refitted (reconstruct), and quality drops more."
            " Add data: {calibration: FILE} or data: {train: FILE}, or set reconstruct: false.",
        )
        return None
    samples = load_calibration_samples(
        model, src, settings.calibration_samples, ctx, "prune", padded=True, held_back=True
    )
    ctx.details["calibration"] = samples.details
    return samples
