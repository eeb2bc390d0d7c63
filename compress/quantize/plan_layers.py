"""Select the layers to quantize and their schemes, and quantize the planned layers.

A quantizer chooses the quantized weights of a matrix, a scheme stores them. Fake quantization rounds in the
forward pass and has an identity gradient in the backward pass (the straight-through estimator). Weights whose
scales underflow in float16 are reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.data.labels import HEAD_SUFFIXES
from smelt.models.edits import module_names, replace_layer
from smelt.models.empty_model import quantized_bytes
from smelt.models.families.registry import family_of, reads_arrays, token_lookup_modules
from smelt.models.layers import (
    LowRankConv,
    LowRankCorrectedLinear,
    LowRankEmbedding,
    LowRankLinear,
    with_low_rank_correction,
)
from smelt.models.user_module import fixed_layers
from smelt.quantization.groupwise import split_into_groups
from smelt.quantization.layers import (
    QuantizedEmbedding,
    QuantizedLayer,
    QuantizedMatrix,
    SplitLinear,
    empty_quantized,
    is_embedding_table,
    is_quantized,
)
from smelt.quantization.scheme import OptionValue, QuantParams, Scheme, SchemeOptions, UnpackedWeights
from smelt.quantization.schemes.registry import SCHEMES, default_options, find_scheme, is_row_independent

# Smaller weights are checked: float16 ends at 2^-24, and 8-bit steps are 1/255 of the largest weight.
_SMALL_MAGNITUDE = 1e-3
# Maximum relative error of a matrix that rounding its scales to float16 may add.
_MAX_EXTRA_ERROR = 0.02


class ActivationRange(NamedTuple):
    """The activations that are not clipped."""

    low: float
    high: float


@dataclass(frozen=True)
class PlannedLayer:
    """A layer that will be quantized: the module, its first name, the scheme and its options.

    multiplies: whether it multiplies (Linear, Conv2d) instead of looking up rows.
    """

    module: Any
    name: str
    scheme: str
    options: Mapping[str, OptionValue]
    multiplies: bool

    @property
    def weight_id(self) -> int:
        """The identity of its weight, which other layers may share."""
        return id(self.module.weight)

    @property
    def needs_range(self) -> bool:
        """Whether it needs the range of its activations."""
        return self.multiplies and SCHEMES[self.scheme].calibrates_activations(self.options)


def plan_layers(model: Any, settings: QuantizeSettings) -> list[PlannedLayer]:
    """Return the layers of `model` to quantize by `settings`, in the model's order."""
    head = output_layer(model)
    embedding_weights = {id(m.weight) for m in token_embeddings(model)}
    separate, fixed = set(cp_convolutions(model)), fixed_layers(model)
    has_parts = not isinstance(settings.scheme, str)
    encoder = set(model.get_encoder().modules()) if has_parts else set()
    planned = []
    for module, names in module_names(model).items():
        if any(fnmatchcase(n, pattern) for n in names for pattern in settings.exclude_patterns):
            continue
        if module in fixed:
            continue
        is_linear = isinstance(module, nn.Linear)
        scheme = settings.scheme_of("encoder" if module in encoder else "decoder")
        if isinstance(module, nn.Conv2d) and SCHEMES[scheme].supports_conv and is_convolutional(model):
            if module in separate:
                continue
            options = settings.scheme_options(scheme)
            planned.append(PlannedLayer(module, names[0], scheme, options, multiplies=True))
            continue
        if is_linear:
            if module is head and not settings.quantizes_output_layer:
                continue
        elif not (
            is_embedding_table(module)
            and settings.quantizes_embeddings
            and id(module.weight) in embedding_weights
        ):
            continue
        if module is head or not is_linear:
            scheme = settings.resolved_embedding_scheme
        planned.append(PlannedLayer(module, names[0], scheme, settings.scheme_options(scheme), is_linear))
    return planned


def cp_convolutions(model: Any) -> list[Any]:
    """Return the convolutions from CP factorization, which are kept in float.

    Their channels have very different ranges, and one scale for all loses the small ones: the int8 error was
    a third of the outputs' standard deviation, against a twentieth for unfactorized convolutions.
    """
    conv_steps = [list(m.steps) for m in model.modules() if isinstance(m, LowRankConv)]
    return [
        step
        for steps in conv_steps
        if any(convolution.groups != 1 for convolution in steps)
        for step in steps
    ]


def is_convolutional(model: Any) -> bool:
    """Return whether `model` may be a convolutional network; patches of transformers do not count."""
    family = family_of(model)
    return family is not None and not family.stacks(model.config.to_dict())


def quantize_layers(
    model: Any,
    layers: Collection[PlannedLayer],
    ranges: Mapping[int, ActivationRange],
    quantizer: WeightQuantizer | None = None,
    codes: Mapping[int, UnpackedWeights] = MappingProxyType({}),
    corrections: Mapping[int, tuple[Tensor, Tensor]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Quantize `layers` of `model` in place; return the edits.

    Args:
        model: changed in place.
        layers: its planned layers.
        ranges: of the activations by `PlannedLayer.weight_id`, for layers that need them.
        quantizer: chooses the quantized weights; None: rounds to nearest.
        codes: quantized weights that are already chosen, by `PlannedLayer.weight_id`.
        corrections: low-rank corrections by `PlannedLayer.weight_id`: float32 [N, r] and [r, K].

    Raises:
        InputError: a layer's weights are not finite, or its range is missing.
    """
    # by the weight's identity: the first module quantized from it
    quantized: dict[int, tuple[str, Any]] = {}
    edits: list[dict[str, Any]] = []
    for layer in layers:
        weight = layer.weight_id  # taken before the module is replaced: a freed id may be reused
        shared_matrix = quantized[weight][1].matrix if weight in quantized else None
        new_layer = quantize_planned(layer, ranges, quantizer, codes.get(weight), shared_matrix)
        first_name, first_layer = quantized.setdefault(weight, (layer.name, new_layer))
        options = dict(layer.options)
        edit = {"op": "quantize", "module": layer.name, "scheme": layer.scheme, **options}
        replace_layer(model, edits, layer.name, new_layer, edit)
        if first_layer is not new_layer:
            if layer.needs_range:  # the first one may be an embedding, which has no range
                first_layer.matrix.set_activation_range_(*ranges[weight])
            new_layer.matrix = first_layer.matrix
            edits.append({"op": "share", "module": f"{layer.name}.matrix", "with": f"{first_name}.matrix"})
        if layer.multiplies and weight in corrections:
            up, down = corrections[weight]
            edit = {"op": "adapter", "module": layer.name, "rank": len(down)}
            replace_layer(model, edits, layer.name, with_low_rank_correction(new_layer, up, down), edit)
    return edits


def require_finite_layers(layers: Collection[PlannedLayer]) -> None:
    """Check that the weights of `layers` are finite, before any method uses them.

    Raises:
        InputError: the weights of a layer are not finite.
    """
    for layer in layers:
        try:
            require_quantizable(layer.module.weight)
        except InputError as error:
            raise InputError(f"quantize: {layer.name}: {error}", code=error.code) from error


def quantize_planned(
    layer: PlannedLayer,
    ranges: Mapping[int, ActivationRange],
    quantizer: WeightQuantizer | None = None,
    codes: UnpackedWeights | None = None,
    matrix: QuantizedMatrix | None = None,
) -> Any:
    """Return the quantized layer for `layer`; arguments and errors as in `quantize_layers`.

    codes: of the layer, if already chosen. matrix: that of another layer with the same weight.
    """
    chosen = (quantizer or round_to_nearest) if codes is None else lambda *_: codes
    try:
        quantized = quantize_module(layer.module, layer.scheme, layer.options, chosen, matrix)
    except InputError as error:
        raise InputError(f"quantize: {layer.name}: {error}", code=error.code) from error
    if layer.needs_range:
        if layer.weight_id not in ranges:
            raise InputError(
                f"quantize: {layer.name}: scheme {layer.scheme} needs an activation range, but none"
                " was calibrated. Add calibration samples, or exclude the layer.",
                code="missing-range",
            )
        quantized.matrix.set_activation_range_(*ranges[layer.weight_id])
    return quantized


def output_layer(model: Any) -> Any:
    """Return the layer that computes the logits: the vocabulary projection, or a classifier's last layer."""
    head = model.get_output_embeddings()
    if isinstance(head, LowRankLinear) and any(head.up.weight is m.weight for m in token_embeddings(model)):
        head = head.up  # the part that is tied to the embedding
    if head is None and type(model).__name__.endswith(HEAD_SUFFIXES):
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        head = next((m for m in reversed(linears) if m.out_features == model.config.num_labels), None)
    if head is None and reads_arrays(model.config.to_dict()) and model.config.output_layers:
        head = model.get_submodule(model.config.output_layers[-1])
    return head


def token_embeddings(model: Any) -> list[Any]:
    """Return the token embeddings (not of positions or token types)."""
    if is_convolutional(model):
        return []
    tables = [m.table if isinstance(m, LowRankEmbedding) else m for m in token_lookup_modules(model)]
    return [m for m in tables if is_embedding_table(m)]


def unused_patterns(model: Any, patterns: list[str]) -> list[str]:
    """Return the patterns that match no module name, except `auto`."""
    names = [n for n, _ in model.named_modules(remove_duplicate=False)]
    return [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        return outputs[0], None


def straight_through(weight: Tensor, values: Tensor) -> Tensor:
    """Return `values`, whose gradient is passed to `weight` unchanged.

    Bengio et al. 2013, Estimating or Propagating Gradients Through Stochastic Neurons, arXiv:1308.3432.

    Args:
        weight: float32, the trained weights.
        values: the dequantized values of `weight`, same shape.
    """
    out: Tensor = _StraightThrough.apply(weight, values.detach())  # type: ignore[no-untyped-call]
    return out


# Scales are stored as float16, which ends there.
_MAX_MAGNITUDE = 60_000.0


class WeightQuantizer(Protocol):
    """Chooses the quantized weights of a matrix for a scheme; holds any further data itself."""

    def __call__(self, weight: Tensor, scheme: Scheme, options: SchemeOptions) -> UnpackedWeights:
        """Return the quantized weights and their grid for `weight`, float [N, K]."""


# Finds the grid of groups, float32 [N, G, g], of a matrix of K inputs.
GridFinder: TypeAlias = Callable[[Tensor, int, Scheme, SchemeOptions], QuantParams]


def scheme_grid(groups: Tensor, width: int, scheme: Scheme, options: SchemeOptions) -> QuantParams:
    """Return the scheme's own grid of `groups`; a `GridFinder`."""
    return scheme.compute_qparams(groups, width, options)


def round_to_nearest(weight: Tensor, scheme: Scheme, options: SchemeOptions) -> UnpackedWeights:
    """Return `weight` rounded to nearest on the scheme's own grid; a `WeightQuantizer`."""
    return round_on_grid(scheme_grid, weight, scheme, options)


# A larger matrix is quantized in parts of its rows, so that intermediate results need little memory.
MAX_WEIGHTS_AT_ONCE = 2**24  # by GPTQ, which goes through all columns for each part
_ROUNDED_AT_ONCE = 2**22


def rows_at_once(rows: int, width: int, limit: int, scheme: Scheme, options: SchemeOptions) -> int:
    """Return how many rows of a matrix [rows, width] are quantized at once: `limit` weights, or all."""
    return max(1, limit // width) if is_row_independent(scheme, width, options) else rows


def concatenate_rows(rows: int, parts: Iterable[UnpackedWeights]) -> UnpackedWeights:
    """Return the quantized weights of all `rows` from `parts`, of which one is in memory at a time."""
    merged: UnpackedWeights | None = None
    end = 0
    for chunk in parts:
        if len(chunk.q_weight) == rows:
            return chunk
        if merged is None:
            grid = {name: _with_rows(tensor, rows) for name, tensor in chunk.qparams.items()}
            merged = UnpackedWeights(_with_rows(chunk.q_weight, rows), grid)
        start, end = end, end + len(chunk.q_weight)
        merged.q_weight[start:end] = chunk.q_weight
        for name, tensor in chunk.qparams.items():
            merged.qparams[name][start:end] = tensor
    assert merged is not None
    return merged


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    return tensor.new_empty(rows, *tensor.shape[1:])


def round_on_grid(
    find_grid: GridFinder, weight: Tensor, scheme: Scheme, options: SchemeOptions
) -> UnpackedWeights:
    """Return `weight`, float [N, K], rounded to nearest on the grid from `find_grid`."""
    rows, width = weight.shape
    size = scheme.group_size(width, options)

    def quantized() -> Iterator[UnpackedWeights]:
        for chunk in weight.split(rows_at_once(rows, width, _ROUNDED_AT_ONCE, scheme, options)):
            groups = split_into_groups(chunk.float(), size)
            grid = find_grid(groups, width, scheme, options)
            yield UnpackedWeights(scheme.quantize(groups, grid, options), grid)

    return concatenate_rows(rows, quantized())


def quantize_into(
    matrix: QuantizedMatrix, weight: Tensor, quantizer: WeightQuantizer = round_to_nearest
) -> None:
    """Quantize `weight`, float [N, K], and store the result in `matrix`."""
    matrix.set_weight_(quantizer(weight.detach(), matrix.scheme, matrix.options))


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
        grid = matrix.scheme.stored_qparams(grid, matrix.options)
        values = matrix.scheme.dequantize(codes, grid, matrix.options).flatten(1)[:, : weight.shape[1]]
    return straight_through(weight, values)


def fake_quantize_activations(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Return `x` fake-quantized for a layer of `matrix`, with straight-through gradients."""
    with torch.no_grad():
        quantized = matrix.scheme.fake_quantize_activations(matrix, x)
    return x if quantized is x else straight_through(x, quantized)


def require_quantizable(weight: Tensor) -> None:
    """Check that scales of `weight` can be stored.

    Raises:
        InputError: weights are not finite, or too large.
    """
    # without abs(), which would copy a large embedding
    largest = float(torch.stack(weight.detach().aminmax()).abs().max()) if weight.numel() else 0.0
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
    matrix: QuantizedMatrix | None = None,
) -> QuantizedLayer:
    """Return the quantized layer for a Linear, a Conv2d or an Embedding.

    Args:
        module: the layer with float weights.
        scheme: the name of the scheme.
        options: all options of the scheme; None for its defaults.
        quantizer: chooses the quantized weights.
        matrix: the quantized weights, if they are known.

    Raises:
        InputError: the scheme does not support the module or the options, or weights are not finite.
    """
    quantized = empty_quantized(
        module, scheme, default_options(find_scheme(scheme)) if options is None else options
    )
    if matrix is None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        require_quantizable(weight)
        quantize_into(quantized.matrix, weight.flatten(1), quantizer)
    else:
        quantized.matrix = matrix
    if not isinstance(quantized, QuantizedEmbedding) and quantized.bias is not None:
        assert isinstance(module.bias, Tensor)
        quantized.bias.data = module.bias.detach().clone()
    return quantized.train(module.training)


def quantized_weight_bits(model: nn.Module, stored: int = 4) -> float:
    """Return the mean stored bits per quantized weight, each matrix counted once.

    Scales, zero points, codebooks and low-rank corrections are included. The two halves of a split layer are
    the bits of the same weights.

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
    total_bytes = quantized_bytes(nn.ModuleList(matrices.values())) + stored * sum(
        p.numel() for p in pairs.values()
    )
    second_halves = {
        id(half.matrix)
        for m in model.modules()
        if isinstance(m, SplitLinear)
        for half in m.second.modules()
        if is_quantized(half)
    }
    weights = sum(
        len(matrix.codes) * matrix.width for key, matrix in matrices.items() if key not in second_halves
    )
    return round(8 * total_bytes / weights, 3)


def dequantize_codes(
    codes: UnpackedWeights, scheme: Scheme, options: SchemeOptions, weight: Tensor
) -> Tensor:
    """Return the dequantized `codes` of a matrix like `weight` [N, K], float32 [N, K].

    Scales are those that are stored: with double quantization their quantized values.
    """
    grid = scheme.stored_qparams(codes.qparams, options)
    return scheme.dequantize(codes.q_weight, grid, options).flatten(1)[:, : weight.shape[1]]


def small_weights(layers: Collection[PlannedLayer]) -> dict[str, Tensor]:
    """Return copies of the weights of layers whose weights are all small, float32 [N, K], by name."""
    copies: dict[str, Tensor] = {}
    for layer in layers:
        weight = layer.module.weight.detach()
        # without abs(), which would copy a large embedding
        largest = max(map(abs, map(float, weight.aminmax()))) if weight.numel() else 0.0
        if 0 < largest < _SMALL_MAGNITUDE:
            copies[layer.name] = weight.float().clone()
    return copies


def scale_underflow_warnings(
    layers: Collection[PlannedLayer], weights: Mapping[str, Tensor]
) -> list[Message]:
    """Return a warning for each matrix whose scales lose too much precision in float16.

    weights: the result of `small_weights` before any method changed the weights to their quantized values.
    """
    layers_by_weight: dict[int, list[str]] = {}
    largest: dict[int, float] = {}
    for layer in layers:
        if layer.name in weights and _loses_digits(layer, weights[layer.name]):
            layers_by_weight.setdefault(layer.weight_id, []).append(layer.name)
            largest[layer.weight_id] = float(weights[layer.name].abs().max())
    return [
        warning(
            "scale-underflow",
            f"{', '.join(names)}: the largest weight is only {largest[weight]:g}, so float16 scales"
            " lose precision or underflow to 0, and the quantized weights may be inaccurate. Keep"
            f" the layer in float with exclude: {json.dumps(names)}.",
        )
        for weight, names in layers_by_weight.items()
    ]


def _loses_digits(layer: PlannedLayer, weight: Tensor) -> bool:
    """Return whether rounding a matrix loses more than rounding the same matrix scaled up."""
    rows, width = weight.shape
    stored = SCHEMES[layer.scheme].stored_tensors(rows, width, layer.options).get("scales")
    if stored is None or stored.file_dtype != "float16":
        return False
    return (
        _relative_error(layer, weight) - _relative_error(layer, weight / weight.abs().max())
        > _MAX_EXTRA_ERROR
    )


def _relative_error(layer: PlannedLayer, weight: Tensor) -> float:
    """Return the rounding error of `weight` relative to its norm."""
    scheme = SCHEMES[layer.scheme]
    codes, grid = round_to_nearest(weight, scheme, layer.options)
    values = scheme.dequantize(codes, grid, layer.options).flatten(1)[:, : weight.shape[1]]
    # squares of 1e-25 underflow in float32
    return float((values - weight).double().norm() / weight.double().norm())
