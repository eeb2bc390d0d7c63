"""GPTQ: round column by column and compensate each error in the remaining columns.

Frantar et al. 2023, GPTQ, arXiv:2210.17323, and its published code (gptq.py, fasterquant): with H = 2 X X^T
of the layer's inputs X and U the upper Cholesky factor of the inverse of the damped H, the columns are
rounded one by one; the error of column j, divided by U_jj, is subtracted from the columns after it along U's
row, at once inside a block of 128, and afterwards from the rest. The blocks of a model are processed one by
one, each on the outputs of the quantized ones before it; and so are the layers of a block, those with the
same input together (`true-sequential` of the published code, the default of GPTQModel).

With `act_order: static` the columns with the largest diagonal of H are rounded first, while many columns can
still compensate their errors (`desc_act` of the published code, `actorder: static` of llm-compressor). The
grid of each group is that of the original weights in their own layout (`static_groups`), so the result has
the same form as without: a group is a run of neighboring columns, and needs no index in the exported graph.

With `gptaq_alpha` the target of a layer is its output in the float model: Li et al. 2025, GPTAQ: Efficient
Finetuning-Free Quantization for Asymmetric Calibration, arXiv:2504.02692, and its published code. With R the
layer's inputs in the float model, D = 2 (R - X) X^T, and column j before rounding, w_j, what w_j lacks on
R - X is added to the columns after it:

    P = alpha triu(D U^T, 1) U          w_k += w_j P_jk for k > j

The published code uses the rounded w_j for columns beyond the block of 128, so that its result depends on the
size of the block; here it is the w_j of the paper's equation throughout. All layers of a block then see the
inputs of the unquantized block, which the float model next to it needs.

Shapes: N = outputs, K = inputs, G = groups, g = inputs of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.sequential import ModelPart, RunningBlock
from smelt.calibration.statistics import (
    HESSIAN_DAMPING,
    InputStatistics,
    NotInvertibleError,
    inverse_cholesky,
    warn_of_few_tokens,
)
from smelt.compress.quantize import plan_layers
from smelt.compress.quantize.low_rank_correction import (
    CorrectedWeight,
    correction_metric,
    quantize_with_correction,
)
from smelt.compress.quantize.nested_settings import LowRankCorrection
from smelt.compress.quantize.plan_layers import (
    GridFinder,
    PlannedLayer,
    concatenate_rows,
    dequantize_codes,
    rows_at_once,
)
from smelt.compress.quantize.settings import ActOrder
from smelt.core.errors import InputError
from smelt.models.edits import is_masked
from smelt.quantization.groupwise import split_into_groups
from smelt.quantization.scheme import Scheme, SchemeOptions, UnpackedWeights
from smelt.quantization.schemes.registry import find_scheme
from smelt.stage import Context

_BLOCK_COLUMNS = 128  # columns per block of lazy updates


class ColumnUpdates(NamedTuple):
    """How the error of each column is compensated in later ones: the same for all rows of a layer.

    order: of the columns, int64 [K]. factor: U of H in this order, float32 [K, K] (see `inverse_cholesky`).
    damping: that of H. dead: inputs that are always 0, bool [K]. shift: P, float32 [K, K]
    (None without GPTAQ).
    """

    order: Tensor
    factor: Tensor
    damping: float
    dead: Tensor
    shift: Tensor | None = None


def column_updates(
    statistics: InputStatistics, act_order: ActOrder, gptaq_alpha: float | None = None
) -> ColumnUpdates:
    """Return the column updates for a layer with these input statistics.

    Args:
        statistics: with second moments; GPTAQ needs cross moments, too, and is not used without.
        act_order: order of the columns.
        gptaq_alpha: strength of GPTAQ; None: without.

    Raises:
        NotInvertibleError: the second moment cannot be inverted.
    """
    assert statistics.second_moment is not None
    diagonal = statistics.second_moment.diagonal()
    order = torch.arange(len(diagonal))
    if act_order == "static":
        order = diagonal.argsort(descending=True, stable=True)
    factor, damping = inverse_cholesky(statistics, order)
    shift = None
    if gptaq_alpha is not None and statistics.cross_moment is not None:
        cross = statistics.cross_moment[order[:, None], order] * (2 / max(1, statistics.tokens))
        shift = (gptaq_alpha * (cross @ factor.T).triu_(1) @ factor).float()
    return ColumnUpdates(order, factor.float(), damping, diagonal == 0, shift)


def gptq_quantize(
    weight: Tensor,
    updates: ColumnUpdates,
    scheme: Scheme,
    options: SchemeOptions,
    find_grid: GridFinder,
    zeros: Tensor | None = None,
) -> UnpackedWeights:
    """Return the quantized weights for `weight`, float32 [N, K].

    Args:
        weight: not changed.
        updates: those of the layer's inputs.
        scheme: the scheme with the grid and the rounding of columns.
        options: options of the scheme.
        find_grid: finds the grid of groups.
        zeros: bool [N, K], weights that are kept at zero; the compensation that they would get is passed to
            later columns, as in SparseGPT's joint quantization (arXiv:2301.00774, section 3.3).
    """
    size, order, factor = scheme.group_size(weight.shape[1], options), updates.order, updates.factor
    updated = weight.masked_fill(updates.dead, 0.0)
    # Grids are found after zeroing, as in the published code; except mean magnitudes (binary, ternary), which
    # zeros would make too small, and grids fitted to all weights (kmeans4), which only gain if at least a
    # fifth of the inputs is dead.
    ranged = scheme.supports_clipping and not scheme.requires_training
    grid = find_grid(split_into_groups(updated if ranged else weight, size), weight.shape[1], scheme, options)
    codes = scheme.quantize(split_into_groups(updated, size), grid, options)
    stored = scheme.stored_qparams(grid, options)  # what later columns have to compensate
    updated = updated[:, order]  # from here on in the order of rounding
    for start in range(0, updated.shape[1], _BLOCK_COLUMNS):
        end = min(start + _BLOCK_COLUMNS, updated.shape[1])
        errors, columns = torch.empty_like(updated[:, start:end]), torch.empty_like(updated[:, start:end])
        for j in range(start, end):
            input_index = int(order[j])
            group, position = divmod(input_index, size)
            group_grid = {name: _group_slice(tensor, group) for name, tensor in stored.items()}
            column = updated[:, j].clone()
            if zeros is not None:
                column[zeros[:, input_index]] = 0.0
            column_codes = scheme.quantize(column[:, None, None], group_grid, options)
            codes[:, group, position] = column_codes[:, 0, 0]
            value = scheme.dequantize(column_codes, group_grid, options)[:, 0, 0]
            errors[:, j - start] = (updated[:, j] - value) / factor[j, j]
            updated[:, j:end] -= torch.outer(errors[:, j - start], factor[j, j:end])
            if updates.shift is not None:
                columns[:, j - start] = column
                updated[:, j:end] += torch.outer(column, updates.shift[j, j:end])
        updated[:, end:] -= errors @ factor[start:end, end:]
        if updates.shift is not None:
            updated[:, end:] += columns @ updates.shift[start:end, end:]
    return UnpackedWeights(codes, grid)


def _group_slice(tensor: Tensor, group: int) -> Tensor:
    """Return the part of a grid tensor for one group; a tensor with one group, or none, applies to all."""
    return tensor[:, group : group + 1] if tensor.dim() > 1 and tensor.shape[1] > 1 else tensor


class GptqRunner:
    """State of a GPTQ run.

    Args:
        samples: calibration samples.
        find_grid: finds grids.
        act_order: order of the columns.
        gptaq_alpha: strength of GPTAQ where cross moments are collected; None: without.
        ctx: gets the details of each layer and warnings.

    Attributes:
        codes: quantized weights by `PlannedLayer.weight_id`.
        corrections: settings of low-rank corrections by weight; the effective weight is the sum of both.
        pairs: the corrections with their quantized weights.
    """

    def __init__(
        self,
        samples: CalibrationSamples,
        find_grid: GridFinder,
        act_order: ActOrder,
        gptaq_alpha: float | None,
        ctx: Context,
    ) -> None:
        self.samples, self.find_grid, self.ctx = samples, find_grid, ctx
        self.act_order, self.gptaq_alpha = act_order, gptaq_alpha
        self.codes: dict[int, UnpackedWeights] = {}
        self.corrections: dict[int, LowRankCorrection] = {}
        self.pairs: dict[int, CorrectedWeight] = {}
        self.left: dict[str, float] = {}
        self.dead_inputs: dict[str, int] = {}
        self.damped: dict[str, float] = {}
        self.unreached: list[str] = []
        self.token_counts: list[tuple[int, int]] = []

    def calibrate(self, layers: Sequence[PlannedLayer], part: ModelPart) -> None:
        """Quantize `layers` in `part` on their inputs, each weight once; set their weights to the results.

        Layers with the same input are quantized together, in the order in which they are called.

        Raises:
            InputError: inputs of a layer are not finite, or its Hessian cannot be inverted with any damping.
        """
        first = {layer.weight_id: layer for layer in reversed(layers) if layer.weight_id not in self.codes}
        layers_by_name = {layer.name: layer for layer in first.values()}
        modules = {name: [layer.module] for name, layer in layers_by_name.items()}
        groups = [list(modules)]
        if isinstance(part, RunningBlock) and self.gptaq_alpha is None:
            groups = part.group_by_input(modules)
        for names in groups:
            with part.collect({name: modules[name] for name in names}) as statistics:
                self.quantize([layers_by_name[name] for name in names], statistics)

    @torch.no_grad()
    def quantize(
        self, layers: Sequence[PlannedLayer], statistics_by_layer: dict[str, InputStatistics]
    ) -> None:
        """Quantize `layers`, and set their weights to the results; `statistics_by_layer` is consumed."""
        for layer in layers:
            statistics = statistics_by_layer.pop(layer.name)
            if not statistics.tokens:
                self.unreached.append(layer.name)
                continue
            if not bool(statistics.squares.isfinite().all()):
                raise InputError(
                    f"quantize: {layer.name}: the layer's inputs are not finite. The training before"
                    " this step has probably diverged; lower its learning_rate.",
                    code="non-finite-activations",
                )
            self._quantize_layer(layer, statistics)

    def _quantize_layer(self, layer: PlannedLayer, seen: InputStatistics) -> None:
        """Quantize one layer; all of its rows share the inverse Hessian."""
        weight, updates = layer.module.weight, self._column_updates(layer, seen)
        parts = [
            self._quantize_rows(layer, chunk, seen, updates)
            for chunk in weight.split(self._rows_at_once(layer))
        ]
        error, nearest_error = sum(result[1] for result in parts), sum(result[2] for result in parts)
        self.left[layer.name] = error / nearest_error if nearest_error > 0 else 1.0
        if dead := int((seen.squares == 0).sum()):
            self.dead_inputs[layer.name] = dead
        self.codes[layer.weight_id] = concatenate_rows(len(weight), (result[0] for result in parts))
        self.token_counts.append((seen.tokens, weight.shape[1]))

    def _rows_at_once(self, layer: PlannedLayer) -> int:
        """Return how many rows of a layer are quantized at once; with a correction, all."""
        count, width = (int(size) for size in layer.module.weight.shape)
        if layer.weight_id in self.corrections:
            return count
        limit = plan_layers.MAX_WEIGHTS_AT_ONCE
        return rows_at_once(count, width, limit, find_scheme(layer.scheme), layer.options)

    def _column_updates(self, layer: PlannedLayer, seen: InputStatistics) -> ColumnUpdates:
        try:
            updates = column_updates(seen, self.act_order, self.gptaq_alpha)
        except NotInvertibleError as error:
            raise InputError(
                f"quantize: {layer.name}: {error}. Use method: rtn, or other calibration samples.",
                code="not-invertible",
                setting="method",
            ) from error
        if updates.damping > HESSIAN_DAMPING:
            self.damped[layer.name] = updates.damping
        return updates

    def _quantize_rows(
        self, layer: PlannedLayer, rows: Tensor, seen: InputStatistics, updates: ColumnUpdates
    ) -> tuple[UnpackedWeights, float, float]:
        """Quantize some rows of a layer, and set them to the results.

        Returns:
            Quantized weights, their squared output error, and that of rounding to nearest.
        """
        scheme, weight = find_scheme(layer.scheme), rows.detach().float().cpu()
        zeros = weight == 0 if is_masked(layer.module) else None
        codes, pair = self._quantize_weight(layer, weight, seen, zeros, updates)
        groups, grid = split_into_groups(weight, codes.q_weight.shape[2]), codes.qparams
        if bool((seen.squares == 0).any()):  # dead inputs count in the grid of rounding to nearest
            grid = self.find_grid(groups, weight.shape[1], scheme, layer.options)
        nearest = scheme.quantize(groups, grid, layer.options)
        nearest_values = dequantize_codes(UnpackedWeights(nearest, grid), scheme, layer.options, weight)
        nearest_error = _output_error(nearest_values.sub_(weight), seen.judged)
        values = dequantize_codes(codes, scheme, layer.options, weight)
        if pair is not None:
            values, self.pairs[layer.weight_id] = values + pair.correction, pair
        error = _output_error(values - weight, seen.judged)
        rows.copy_(values)
        return codes, error, nearest_error

    def _quantize_weight(
        self,
        layer: PlannedLayer,
        weight: Tensor,
        seen: InputStatistics,
        zeros: Tensor | None,
        updates: ColumnUpdates,
    ) -> tuple[UnpackedWeights, CorrectedWeight | None]:
        """Return the quantized weights for `weight`, and the low-rank correction if the layer gets one."""
        scheme = find_scheme(layer.scheme)

        def quantize(remainder: Tensor) -> UnpackedWeights:
            kept_zeros = zeros if remainder is weight else None  # weights minus a correction have no zeros
            return gptq_quantize(remainder, updates, scheme, layer.options, self.find_grid, kept_zeros)

        if layer.weight_id not in self.corrections:
            return quantize(weight), None
        low_rank = self.corrections[layer.weight_id]
        metric, judged = correction_metric(low_rank, seen), correction_metric(low_rank, seen.judged)
        values = partial(dequantize_codes, scheme=scheme, options=layer.options, weight=weight)
        pair = quantize_with_correction(weight, quantize, values, low_rank, metric, judged)
        return pair.codes, pair

    def report(self) -> None:
        """Write the results to the details and warnings of `ctx`."""
        self.ctx.details["gptq_error"] = {name: float(f"{value:.3g}") for name, value in self.left.items()}
        if self.dead_inputs:
            self.ctx.details["dead_inputs"] = self.dead_inputs
        if self.damped:
            layer = max(self.damped, key=lambda name: self.damped[name])
            self.ctx.warn(
                "more-damping",
                f"gptq: the Hessians of {len(self.damped)} layers could only be inverted with more"
                f" damping (up to {self.damped[layer]:g} of the mean diagonal, in {layer}). Increase"
                " calibration_samples.",
            )
        if self.unreached:
            self.ctx.warn(
                "uncalibrated-layers",
                f"No calibration sample reaches {', '.join(self.unreached)}; the weights of these"
                " layers are rounded to nearest. Add calibration samples that use them.",
            )
        warn_of_few_tokens(self.token_counts, self.samples, self.ctx)


def _output_error(off: Tensor, statistics: InputStatistics) -> float:
    """Return the squared output error for the weight error `off`, float32 [N, K]."""
    assert statistics.second_moment is not None
    return float(((off @ statistics.second_moment.float()) * off).sum())
