"""The cost of `quantize`, estimated without torch: the bytes of the result, GPTQ, AWQ, sensitivities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from smelt.compress.quantize.settings import AUTO, QuantizeSettings
from smelt.models.costs import (
    Batch,
    CostInputs,
    StepCost,
    Work,
    calibration_batches,
    cubic_solver_work,
    forward_work,
    is_streamed,
    num_tokens,
    one_shot_cost,
    pass_bytes,
    total,
)
from smelt.models.model_size import FLOAT_BYTES, ModelSize
from smelt.quantization.scheme import OptionValue
from smelt.quantization.schemes.registry import SCHEMES, bits_per_weight

_HESSIAN_BYTES = 8  # float64
_MOMENT_COPIES = 3  # of the largest second moment, while its factor is computed
_COLUMNS = 128  # that GPTQ updates at once
_CALLS_PER_COLUMN = 60
_STRIDE_FACTOR = 4  # of reading and writing columns, which are not contiguous
_PASSES_PER_WEIGHT = 70  # of reading and writing, to find a grid and to round
_CLIP_PASSES = 200  # to search clipping
_SCALE_CANDIDATES = 20  # of AWQ, for each norm
_HQQ_PASSES = 20 * 6
_STATE_BYTES = 2**30  # of hidden states that are kept in memory


def quantized_size(settings: QuantizeSettings, size: ModelSize) -> ModelSize:
    """Return the size of the quantized model in files: weights, scales and zero points of each matrix."""
    if settings.mixed_precision is not None:
        mixed = settings.mixed_precision
        widths = [settings.scheme_options(SCHEMES[name].name) for name in settings.used_schemes()]
        bits = mixed.target_bits or max(
            bits_per_weight(SCHEMES[name], options)
            for name, options in zip(settings.used_schemes(), widths, strict=True)
        )
        return size.stored_as(bits / 8, bits / 8)
    options = settings.scheme_options(settings.scheme)
    if not size.stacks:  # convolutions
        each = bits_per_weight(SCHEMES[settings.scheme], options) / 8
        return size.stored_as(each, each)
    stored = weights = 0.0
    for stack in size.stacks:
        for rows, columns in stack.matrices:
            weights += stack.layers * rows * columns
            stored += stack.layers * rows * columns * _bytes(settings.scheme, options, columns)
    if settings.correction is not None:
        rank = settings.correction.rank
        stored += (
            size.bytes_per_weight
            * rank
            * sum(stack.layers * (n + m) for stack in size.stacks for n, m in stack.matrices)
        )
    other = size.other_weights * size.table_bytes_per_weight
    table = settings.resolved_embedding_scheme
    each = _bytes(table, settings.scheme_options(table), size.width)
    for part, is_quantized in (
        (size.table_weights, settings.embeddings), (size.head_weights, settings.output_layer)
    ):  # fmt: skip
        other += part * (each if is_quantized else size.table_bytes_per_weight)
    outside = size.table_weights + size.head_weights + size.other_weights
    return size.stored_as(stored / max(1.0, weights), other / max(1, outside))


def _bytes(scheme: str, options: Mapping[str, OptionValue], columns: int) -> float:
    return bits_per_weight(SCHEMES[scheme], options, columns) / 8


def works_by_block(settings: QuantizeSettings, inputs: CostInputs) -> bool:
    """Return whether a large model is quantized block by block (see `open_large_model`)."""
    moves_scales = settings.scales_inputs or settings.smoothquant_alpha is not None
    whole = settings.loads_whole_model or (moves_scales and inputs.source.is_encoder_decoder)
    return not whole and not (settings.needs_calibration and inputs.is_gpu)


def quantize_cost(settings: QuantizeSettings, inputs: CostInputs) -> StepCost:
    """Return the cost of `quantize` with these settings."""
    size, streamed = inputs.source, works_by_block(settings, inputs)
    result = quantized_size(settings, inputs.result)
    passes = _PASSES_PER_WEIGHT + (_CLIP_PASSES if settings.clip != "none" else 0)
    passes += _HQQ_PASSES if settings.method == "hqq" else 0
    work = Work.of("moved", passes * FLOAT_BYTES * size.parameters)
    by_block = streamed and is_streamed(size)
    # a float copy of the largest matrix, instead of a block's, or next to the quantized weights of all
    more = float(FLOAT_BYTES * size.largest_matrix + 2 * (0 if by_block else result.stored_bytes))
    more = max(0.0, more - 2 * FLOAT_BYTES * size.largest_block) if by_block else more
    if not settings.needs_calibration:
        return one_shot_cost(inputs, result=result, work=work, more_bytes=more, streamed=streamed)
    batches = calibration_batches(inputs, settings.calibration_samples)
    once = total([forward_work(size, batch, inputs.task) for batch in batches])
    more = max(more, max((pass_bytes(size, batch) for batch in batches), default=0))
    if settings.compensates_rounding:
        solving, held = _gptq(size, batches, by_block=by_block)
        work, more = work + solving + once * 2, more + held
    if settings.scales_inputs:
        work += once * _SCALE_CANDIDATES
    if settings.needs_activation_ranges or settings.smoothquant_alpha is not None:
        work += once * 2
    if settings.mixed_precision is not None or AUTO in settings.exclude:
        few = calibration_batches(inputs, settings.sensitivity_samples)
        layers = sum(stack.layers * len(stack.matrices) for stack in size.stacks)
        # each layer is quantized alone, and the model runs from its block on
        work += total([forward_work(size, batch, inputs.task) for batch in few]) * (layers / 2)
    cost = one_shot_cost(inputs, result=result, work=work, more_bytes=more, streamed=streamed)
    return cost if batches else replace(cost, work=None)


def _gptq(size: ModelSize, batches: list[Batch], by_block: bool) -> tuple[Work, float]:
    """Return the work and the memory of second moments, their factors, and the columns of all layers."""
    tokens, work = num_tokens(batches), Work()
    largest, moments = 0.0, 0.0
    for stack in size.stacks:
        flops = sum(2 * tokens * columns**2 + rows * columns**2 for rows, columns in stack.matrices)
        column_bytes = FLOAT_BYTES * (3 * _COLUMNS / 2 + 8) * _STRIDE_FACTOR
        moved = sum(columns * rows * column_bytes for rows, columns in stack.matrices)
        each = (
            Work.of("matrix", flops)
            + Work.of("moved", moved)
            + Work.of("calls", sum(columns * _CALLS_PER_COLUMN for _, columns in stack.matrices))
            + cubic_solver_work([columns for _, columns in stack.matrices]) * 2  # float64
        )
        work += each * stack.layers
        moments = max(moments, sum(_HESSIAN_BYTES * columns**2 for _, columns in stack.matrices))
        largest = max([largest, *(_HESSIAN_BYTES * columns**2 for _, columns in stack.matrices)])
    states = min(_STATE_BYTES, FLOAT_BYTES * tokens * size.width)
    codes = 0 if by_block else size.block_weights  # one byte a weight until they are packed
    return work, moments + _MOMENT_COPIES * largest + states + codes
