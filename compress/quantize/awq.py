"""AWQ: scale up input channels with large activations before quantization, and clip the ranges of groups.

Lin et al. 2023, AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration,
arXiv:2306.00978, and its published code (llm-awq). Rounding W s and multiplying with X / s has a smaller
error than rounding W if s is large for the important channels. The scales are searched as in its code. The
float model is calibrated once and changed afterwards; its outputs do not change until weights are quantized.

With `clip`, ranges are clipped where that reduces the output error of the scaled layers; except for queries
and keys, whose own errors hardly predict those of attention scores (as in llm-awq's auto_clip.py).

`mse_grid` and `percentile_grid` clip the ranges of groups without input statistics.

The search follows equations 4 and 5 of the paper and auto_scale.py of its code. For linear layers W with one
input X, with m_j the mean of |X_j| and alpha from 0 to 0.95 in steps of 0.05:

    s = max(m ^ alpha, 1e-4)        s = s / sqrt(max s * min s)
    error = |(Q(W s) / s - W) X|^2, summed over the layers

With duo scaling, as in AutoAWQ and llm-compressor, weights count too: with w_j the mean over the rows of
|W_j| relative to the largest weight with the same scale,

    s = max(m ^ alpha / (w ^ (1 - alpha) + 1e-4), 1e-4)

The alpha with the least error is used, or no scales if none has less error than rounding W to nearest. For
several layers, the published code compares the output of the module around them instead (an attention, a
gated feed-forward part); for one layer the errors are the same. Everything is computed from second moments
over all tokens.

The target of the scales is the producer of the layers' input, or a factor before them:

    a norm that only these layers read                   its weight and bias are divided
    a linear layer that only they read directly          its rows and bias are divided
    anything else                                        the input is multiplied (`ScaledLinear`)

In all three cases the columns of the layers are multiplied, so the float model computes the same. The columns
of a matrix that is also an embedding, or belongs to other layers, are not changed. The output layer, the
largest linear layer, gets no factor of its own.

Shapes: N = outputs, K = inputs of a linear layer, G = groups, g = inputs of a group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.sequential import ModelPart
from smelt.calibration.statistics import InputStatistics, warn_of_few_tokens
from smelt.compress.quantize.hqq import pool_errors, select_per_group
from smelt.compress.quantize.plan_layers import PlannedLayer, output_layer, round_to_nearest
from smelt.compress.quantize.smoothquant import DtypeOf, NormGroup, divide_norm, norm_group
from smelt.core.errors import InputError
from smelt.core.near_ties import first_within_tolerance, is_better
from smelt.models.edits import Edit, module_names, replace_layer
from smelt.models.families.registry import SharedInput, model_attentions, norm_consumers, shared_inputs
from smelt.models.layers import LowRankLinear, ScaledLinear
from smelt.quantization.groupwise import split_into_groups
from smelt.quantization.scheme import QuantParams, Scheme, SchemeOptions, UnpackedWeights
from smelt.quantization.schemes.registry import find_scheme
from smelt.stage import Context

ALPHA_STEPS = 20
_MIN_SCALE = _WEIGHT_OFFSET = 1e-4
_GROUP_OFFSET = 1e-6
_MIN_SHRINK = 0.5  # ranges are clipped to this fraction at most


class LayerToScale(NamedTuple):
    """A matrix, float32 [N, K], with its scheme and options."""

    weight: Tensor
    scheme: Scheme
    options: SchemeOptions


class ScaleSearchResult(NamedTuple):
    """The scales of an input, float32 [K], their alpha, and the error relative to unscaled rounding.

    alpha is None if all scales are 1.
    """

    scales: Tensor
    alpha: float | None
    error_ratio: float


def scales_from_magnitudes(
    magnitudes: Tensor, alpha: float, weight_magnitudes: Tensor | None = None
) -> Tensor:
    """Return s, float32 [K], from m and, for duo scaling, w; both float32 [K]."""
    scales = magnitudes.pow(alpha)
    if weight_magnitudes is not None:
        scales = scales / (weight_magnitudes.pow(1 - alpha) + _WEIGHT_OFFSET)
    scales = scales.clamp(min=_MIN_SCALE)
    return scales / (scales.max() * scales.min()).sqrt()


def relative_weight_magnitudes(products: Sequence[LayerToScale]) -> Tensor:
    """Return w, float32 [K]: the mean over all rows of |W_j| relative to the largest weight of its scale."""
    sums = torch.zeros(products[0].weight.shape[1])
    for weight, scheme, options in products:
        groups = split_into_groups(weight.abs(), scheme.group_size(len(sums), options))
        shared = (0, 1, 2) if scheme.is_per_tensor(options) else -1
        groups = groups / (groups.amax(dim=shared, keepdim=True) + _GROUP_OFFSET)
        sums += groups.flatten(1)[:, : len(sums)].sum(dim=0)
    return sums / sum(len(product.weight) for product in products)


def search_scales(
    products: Sequence[LayerToScale],
    magnitudes: Tensor,
    moment: Tensor,
    weight_magnitudes: Tensor | None = None,
) -> ScaleSearchResult:
    """Return the scales with the least output error of the linear layers with one input.

    Args:
        products: the layers that read it.
        magnitudes: m, float32 [K]; equal in channels that have to share a scale.
        moment: X X^T, float32 [K, K].
        weight_magnitudes: w, float32 [K], for duo scaling; equal in the same channels.
    """
    candidates: list[tuple[Tensor, float | None]] = [(torch.ones_like(magnitudes), None)]
    for step in range(weight_magnitudes is None, ALPHA_STEPS):  # m ^ 0 is 1
        alpha = step / ALPHA_STEPS
        scales = scales_from_magnitudes(magnitudes, alpha, weight_magnitudes)
        if bool(scales.isfinite().all()):
            candidates.append((scales, alpha))
    errors = [sum(_output_error(product, scales, moment) for product in products) for scales, _ in candidates]
    best, plain = first_within_tolerance(errors), errors[0]
    return ScaleSearchResult(*candidates[best], errors[best] / plain if plain > 0 else 1.0)


def _output_error(product: LayerToScale, scales: Tensor, moment: Tensor) -> float:
    weight, scheme, options = product
    quantized = round_to_nearest(weight * scales, scheme, options)
    difference = (
        scheme.dequantize(quantized.q_weight, quantized.qparams, options).flatten(1)[:, : weight.shape[1]]
        / scales
        - weight
    )
    return float(((difference @ moment) * difference).sum())


def clip_and_quantize(product: LayerToScale, moment: Tensor) -> UnpackedWeights:
    """Return the quantized weights with the least output error when up to half of each range is clipped.

    Each group's part of the output is compared alone, as in the published code.

    Args:
        product: the layer, with scales applied.
        moment: X X^T of its scaled inputs, float32 [K, K].
    """
    weight, scheme, options = product
    width = weight.shape[1]
    size = scheme.group_size(width, options)
    groups = split_into_groups(weight, size)
    pad = groups.shape[1] * size - width
    blocks = F.pad(moment, (0, pad, 0, pad)).reshape(groups.shape[1], size, groups.shape[1], size)
    group_moments = torch.stack([blocks[index, :, index] for index in range(groups.shape[1])])  # [G, g, g]
    ends = groups.abs().amax(dim=-1, keepdim=True)
    best = dict(scheme.compute_qparams(groups, width, options))
    least = _group_errors(groups, best, group_moments, scheme, options)
    for step in range(1, int(_MIN_SHRINK * ALPHA_STEPS)):
        end = ends * (1 - step / ALPHA_STEPS)
        grid = scheme.compute_qparams(groups.clamp(-end, end), width, options)
        errors = _group_errors(groups, grid, group_moments, scheme, options)
        better = is_better(errors, least)
        least = torch.where(better, errors, least)
        best = {name: select_per_group(better, grid[name], is_kept) for name, is_kept in best.items()}
    return UnpackedWeights(scheme.quantize(groups, best, options), best)


def _group_errors(
    groups: Tensor, grid: QuantParams, group_moments: Tensor, scheme: Scheme, options: SchemeOptions
) -> Tensor:
    """Return |(Q(W) - W) X|^2 over all weights that share a scale, [N, G]."""
    off = scheme.dequantize(scheme.quantize(groups, grid, options), grid, options) - groups
    return pool_errors((torch.einsum("ngi,gij->ngj", off, group_moments) * off).sum(dim=-1), scheme, options)


@dataclass
class ScaleTarget:
    """Linear layers with one input that will be quantized, and the target of their scales.

    layers: these layers. norm: the norm with all of its readers, if it takes the scales. producer: the linear
    layer that takes them, with the rows that `shared_input` defines. Without either, the input is multiplied.
    """

    layers: list[PlannedLayer]
    norm: NormGroup | None = None
    producer: nn.Linear | None = None
    shared_input: SharedInput = field(default_factory=lambda: SharedInput(()))

    @property
    def kind(self) -> str:
        """The kind of target: norm, product or factor."""
        return "norm" if self.norm else "product" if self.producer else "factor"

    def modules(self, model: Any) -> list[nn.Module]:
        """Return the modules of `model` whose weights `apply` changes."""
        norm = [] if self.norm is None else [model.get_submodule(self.norm.norm), *self.norm.linear_layers]
        producer = [] if self.producer is None else [self.producer]
        return [*norm, *producer, *(layer.module for layer in self.layers)]

    def pool(self, magnitudes: Tensor) -> Tensor:
        """Return `magnitudes`, float [K], averaged over channels that have to share a scale."""
        if self.shared_input.repeats == 1:
            return magnitudes
        heads = magnitudes.reshape(-1, self.shared_input.repeats, self.shared_input.head_dim)
        return heads.mean(dim=1, keepdim=True).expand_as(heads).flatten()

    def apply(self, model: Any, scales: Tensor, kind: DtypeOf, edits: list[Edit]) -> Tensor:
        """Divide the input by `scales`, float32 [K], and multiply the columns; return the applied scales.

        Args:
            model: changed in place; `layers` too, if names change.
            scales: the wanted scales; columns include the rounding of norms and factors by their dtype.
            kind: returns the stored dtype of a tensor from its names.
            edits: edits of the model; a factor appends its own.
        """
        if self.norm is not None:
            names = module_names(model)[model.get_submodule(self.norm.norm)]
            return divide_norm(model, self.norm, scales, kind([f"{name}.weight" for name in names]))
        if self.producer is not None:
            self._divide_rows(self.producer, scales)
        else:
            scales = self._insert_factor(model, scales, kind, edits)
        with torch.no_grad():
            for layer in self.layers:
                layer.module.weight.mul_(scales)
        return scales

    @torch.no_grad()
    def _divide_rows(self, maker: nn.Linear, scales: Tensor) -> None:
        heads = (
            scales.reshape(-1, self.shared_input.repeats, self.shared_input.head_dim)
            if self.shared_input.repeats > 1
            else None
        )
        by_row = scales if heads is None else heads[:, 0].flatten()
        rows = slice(self.shared_input.start, self.shared_input.stop)
        maker.weight[rows].div_(by_row[:, None])
        if maker.bias is not None:
            maker.bias[rows].div_(by_row)

    def _insert_factor(self, model: Any, scales: Tensor, kind: DtypeOf, edits: list[Edit]) -> Tensor:
        dtype = kind([f"{layer.name}.factors" for layer in self.layers])
        factors = (1 / scales).to(dtype).float()
        factors = factors.where(factors.isfinite() & (factors > 0), torch.ones(()))
        for index, layer in enumerate(self.layers):
            scaled = ScaledLinear(layer.module).train(layer.module.training)
            scaled.factors = nn.Parameter(factors.clone(), requires_grad=layer.module.weight.requires_grad)
            replace_layer(model, edits, layer.name, scaled, {"op": "scale", "module": layer.name})
            self.layers[index] = replace(layer, name=f"{layer.name}.linear")
        return 1 / factors


def find_scale_targets(model: Any, layers: Sequence[PlannedLayer]) -> tuple[list[ScaleTarget], list[str]]:
    """Return the scale targets of the linear layers among `layers`, and the names of layers without one."""
    finder = _TargetFinder(model, layers)
    targets = [*finder.norm_targets(), *finder.layer_targets()]
    return targets, [layer.name for layer in layers if layer.multiplies and layer.module not in finder.placed]


class _TargetFinder:
    """The linear layers to be quantized, and those that already have a target."""

    def __init__(self, model: Any, layers: Sequence[PlannedLayer]) -> None:
        self.model, self.names, self.head = model, module_names(model), output_layer(model)
        self.owners: dict[int, set[nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self.owners.setdefault(id(parameter), set()).add(module)
        self.coded = {
            layer.module: layer for layer in layers if layer.multiplies and self._owns_weight(layer.module)
        }
        self.placed: set[nn.Module] = set()

    def norm_targets(self) -> Iterator[ScaleTarget]:
        """Yield a target for each norm that only linear layers read."""
        for consumer in norm_consumers(self.model):
            group = norm_group(self.model, consumer) if consumer.is_foldable else None
            layers = self._claim_layers(group.linear_layers) if group else []
            if layers:
                yield ScaleTarget(layers, norm=group)

    def layer_targets(self) -> Iterator[ScaleTarget]:
        """Yield a target for each other input of layers that will be quantized."""
        inputs = [*shared_inputs(self.model), *self._pairs()]
        inputs += [SharedInput((layer.name,)) for layer in self.coded.values()]
        for shared_input in inputs:
            readers = [_input_layer(self.model.get_submodule(name)) for name in shared_input.consumers]
            producer = self._find_producer(shared_input, readers)
            layers = self._claim_layers([m for m in readers if producer is not None or m is not self.head])
            if layers:
                yield ScaleTarget(
                    layers,
                    producer=producer,
                    shared_input=shared_input
                    if producer is not None
                    else SharedInput(shared_input.consumers),
                )

    def _pairs(self) -> Iterator[SharedInput]:
        for module, names in self.names.items():
            if isinstance(module, LowRankLinear):
                yield SharedInput((f"{names[0]}.up",), f"{names[0]}.down")

    def _claim_layers(self, modules: Collection[nn.Module]) -> list[PlannedLayer]:
        layers = [self.coded[m] for m in modules if m in self.coded and m not in self.placed]
        self.placed |= {layer.module for layer in layers}
        return layers

    def _owns_weight(self, module: nn.Module) -> bool:
        """Return whether no other module shares the weight of `module`."""
        return all(self.owners[id(p)] == {module} for p in module.parameters(recurse=False))

    def _find_producer(self, feed: SharedInput, readers: Sequence[nn.Module]) -> nn.Linear | None:
        """Return the linear layer that always produces the input of `readers`, if it owns its weight."""
        producer = None if feed.producer is None else _output_layer(self.model.get_submodule(feed.producer))
        if not isinstance(producer, nn.Linear):
            return None
        all_of_them = (producer, *readers)
        if not all(type(m) is nn.Linear and self._owns_weight(m) for m in all_of_them):
            return None
        blocks = {tuple(sorted(_block_paths(self.names[m]))) for m in all_of_them}
        return producer if len(blocks) == 1 else None


def _block_paths(names: Sequence[str]) -> Iterator[str]:
    """Yield the block path of each name: the part up to its last number."""
    for name in names:
        parts = name.split(".")
        last_index = max((index for index, part in enumerate(parts) if part.isdigit()), default=-1)
        yield ".".join(parts[: last_index + 1])


def _input_layer(module: nn.Module) -> nn.Module:
    """Return the module that reads the input of a layer."""
    return module.down if isinstance(module, LowRankLinear) else module


def _output_layer(module: nn.Module) -> nn.Module:
    """Return the module that computes the output of a layer."""
    return module.up if isinstance(module, LowRankLinear) else module


class AwqRunner:
    """State of an AWQ run, of all scale targets at once or of one block after another.

    Args:
        model: float32, in eval mode, on the CPU; changed in place with the same outputs.
        layers: its planned layers.
        samples: calibration samples.
        clip: whether to clip ranges too; else no weights are quantized.
        duo_scaling: whether scales depend on weights, too.
        dtype_of: returns the stored dtype of a tensor from its names.
        ctx: gets the details and warnings.

    Attributes:
        targets: all scale targets.
        edits: edits of the model.
        codes: quantized weights by `PlannedLayer.weight_id`.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[PlannedLayer],
        samples: CalibrationSamples,
        clip: bool,
        duo_scaling: bool,
        dtype_of: DtypeOf,
        ctx: Context,
    ) -> None:
        self.targets, self._unscaled = find_scale_targets(model, layers)
        self.edits: list[Edit] = []
        self.codes: dict[int, UnpackedWeights] = {}
        self.model, self._samples, self._dtype_of, self._ctx = model, samples, dtype_of, ctx
        self._duo_scaling = duo_scaling
        self._clip, self._unclipped = clip, _attention_score_layers(model) if clip else set()
        self._order = [layer.name for layer in layers]
        self._names = {id(target): target.layers[0].name for target in self.targets}
        self._found: dict[str, ScaleSearchResult] = {}
        self._token_counts: dict[str, tuple[int, int]] = {}

    def calibrate(self, targets: Sequence[ScaleTarget], part: ModelPart, *, apply: bool = True) -> None:
        """Find the scales of `targets`, and run `part` before any is applied.

        Args:
            targets: the targets in `part`, which no other target's scales change.
            part: the part of the model to run.
            apply: whether to apply the scales, and to clip ranges; otherwise the caller applies them later.

        Raises:
            InputError: inputs of a linear layer are not finite.
        """
        layers = {self._names[id(target)]: [target.layers[0].module] for target in targets}
        with part.collect(layers) as seen:
            part.run()
            self._search(targets, seen)  # all of them first: scales change the rows of producers
            scales = self.apply(targets) if apply else {}
            for target in targets if apply and self._clip else ():
                name = self._names[id(target)]
                if name in self._found:
                    clipped = [
                        layer
                        for layer in target.layers
                        if layer.name.removesuffix(".linear") not in self._unclipped
                    ]
                    self.codes |= _clip_layers(clipped, _second_moment(seen[name]), scales.get(name))

    def _search(self, targets: Sequence[ScaleTarget], seen: Mapping[str, InputStatistics]) -> None:
        _require_finite(self._order, seen, self._samples)
        for target in targets:
            name = self._names[id(target)]
            if seen[name].tokens:
                self._found[name] = _search_target(target, seen[name], self._duo_scaling)
            width = int(target.layers[0].module.in_features)
            self._token_counts[name] = (seen[name].tokens, width)

    def apply(self, targets: Sequence[ScaleTarget]) -> dict[str, Tensor]:
        """Apply the found scales to `targets`; return those of the changed ones by name, float32 [K]."""
        by_name = {self._names[id(target)]: target for target in targets}
        return {
            name: target.apply(self.model, self._found[name].scales, self._dtype_of, self.edits)
            for name, target in by_name.items()
            if name in self._found and self._found[name].alpha is not None
        }

    def renamed(self, layers: Sequence[PlannedLayer]) -> list[PlannedLayer]:
        """Return `layers` with the names that they have after `scale`."""
        current = {layer.module: layer for target in self.targets for layer in target.layers}
        return [current.get(layer.module, layer) for layer in layers]

    def ordered_edits(self) -> list[Edit]:
        """Return the edits of layers that got a factor, in the order of the targets."""
        names = [layer.name.removesuffix(".linear") for t in self.targets for layer in t.layers]
        order = {name: index for index, name in enumerate(names)}
        return sorted(self.edits, key=lambda edit: order[str(edit["module"])])

    def report(self) -> None:
        """Write the results to the details and warnings of the context, in the order of the targets."""
        names = [self._names[id(target)] for target in self.targets]
        _report_scales(self.targets, names, {n: self._found[n] for n in names if n in self._found}, self._ctx)
        self._ctx.details["awq_without_scales"] = self._unscaled  # output layers and shared matrices
        unreached = [
            layer.name
            for target, name in zip(self.targets, names, strict=True)
            if name not in self._found
            for layer in target.layers
        ]
        if unreached:
            self._ctx.warn(
                "uncalibrated-layers",
                f"No calibration sample reaches {', '.join(unreached)}; the weights of these layers are"
                " rounded to nearest. Add calibration samples that use them.",
            )
        warn_of_few_tokens((self._token_counts[name] for name in names), self._samples, self._ctx)


def _require_finite(
    order: list[str], statistics: Mapping[str, InputStatistics], samples: CalibrationSamples
) -> None:
    """Raise an error for inputs that are not finite; it names the first such layer in the model's order."""
    for name in sorted(statistics, key=order.index):
        if not bool(statistics[name].squares.isfinite().all()):
            raise InputError(
                f"quantize: {name}: the layer's inputs on samples of {samples.origin} are not finite."
                " The training before this step has probably diverged; lower its learning_rate.",
                code="non-finite-activations",
            )


def _search_target(target: ScaleTarget, statistics: InputStatistics, duo_scaling: bool) -> ScaleSearchResult:
    products = [_layer_to_scale(layer) for layer in target.layers]
    magnitudes = target.pool((statistics.magnitudes / statistics.tokens).float())
    weight_magnitudes = target.pool(relative_weight_magnitudes(products)) if duo_scaling else None
    result = search_scales(products, magnitudes, _second_moment(statistics), weight_magnitudes)
    if statistics.judged is statistics:
        return result
    moment = _second_moment(statistics.judged)
    error, plain_error = (
        sum(_output_error(product, scales, moment) for product in products)
        for scales in (result.scales, torch.ones_like(result.scales))
    )
    return result._replace(error_ratio=error / plain_error if plain_error > 0 else 1.0)


def _layer_to_scale(layer: PlannedLayer) -> LayerToScale:
    return LayerToScale(layer.module.weight.detach().float(), find_scheme(layer.scheme), layer.options)


def _second_moment(statistics: InputStatistics) -> Tensor:
    assert statistics.second_moment is not None
    return statistics.second_moment.float()


def _clip_layers(
    layers: Sequence[PlannedLayer], moment: Tensor, scales: Tensor | None
) -> dict[int, UnpackedWeights]:
    """Return the quantized weights of linear layers with one input, with clipped ranges."""
    if scales is not None:
        moment = moment / scales / scales[:, None]
    return {layer.weight_id: clip_and_quantize(_layer_to_scale(layer), moment) for layer in layers}


def _attention_score_layers(model: Any) -> set[str]:
    """Return the names of query and key projections, and of both factors of factorized ones."""
    projections = [name for attention in model_attentions(model) for name in (attention.query, attention.key)]
    return {f"{name}{half}" for name in projections for half in ("", ".down", ".up")}


def _report_scales(
    places: Sequence[ScaleTarget], names: Sequence[str], searches: dict[str, ScaleSearchResult], ctx: Context
) -> None:
    """Write alpha, relative error and scale target of each input to the details of `ctx`."""
    ctx.details["awq_error"] = {name: float(f"{search.error_ratio:.3g}") for name, search in searches.items()}
    alphas = {name: search.alpha for name, search in searches.items() if search.alpha is not None}
    ctx.details["awq_alpha"] = alphas
    counts: dict[str, int] = {"norm": 0, "product": 0, "factor": 0}
    for name, target in zip(names, places, strict=True):
        if name in alphas:
            counts[target.kind] += 1
    ctx.details["awq_scales_in"] = counts


_SHRINK_STEPS, _SHRINK_PARTS, _ERROR_POWER = 80, 100, 2.4


def mse_grid(groups: Tensor, width: int, scheme: Scheme, options: SchemeOptions) -> QuantParams:
    """Return the grid of `groups`, float32 [N, G, g], with each range clipped for the least error.

    This follows GPTQ's published code (quant.py, Quantizer.find_params with mse): the range is shrunk in
    steps of a hundredth, down to a fifth, and each group gets the range with the least sum of |error|^2.4.
    The grid of a shrunk group is the shrunk grid, so this works for every scheme.
    """
    best_grid = dict(scheme.compute_qparams(groups, width, options))
    least_errors = _grid_errors(groups, best_grid, scheme, options)
    for step in range(1, _SHRINK_STEPS):
        grid = scheme.compute_qparams(groups * (1 - step / _SHRINK_PARTS), width, options)
        errors = _grid_errors(groups, grid, scheme, options)
        better = is_better(errors, least_errors)
        least_errors = torch.where(better, errors, least_errors)
        best_grid = {
            name: select_per_group(better, grid[name], current) for name, current in best_grid.items()
        }
    return best_grid


def percentile_grid(
    percentile: float, groups: Tensor, width: int, scheme: Scheme, options: SchemeOptions
) -> QuantParams:
    """Return the grid of `groups`, float32 [N, G, g], with ranges clipped at a percentile of magnitudes.

    The percentile of each group's magnitudes is interpolated linearly, as in numpy.percentile; larger weights
    are clipped.

    Args:
        percentile: above 0, at most 100.
        groups: groups of weights.
        width: how many of the G * g inputs are weights; padding is ignored.
        scheme: the scheme of the grid.
        options: options of the scheme.
    """
    size = groups.shape[1] * groups.shape[2]
    original_groups, is_per_tensor = groups, scheme.is_per_tensor(options)
    groups = groups.reshape(1, 1, -1) if is_per_tensor else groups
    ordered = groups.abs().sort(dim=-1, descending=True).values  # padding comes last
    counts = torch.full(groups.shape[1:2], groups.shape[2])
    counts[-1] -= (size - width) * (len(original_groups) if is_per_tensor else 1)
    position = ((counts - 1) * (1 - percentile / 100)).to(ordered)  # counted from the largest
    low = position.floor().long()
    pair = [
        ordered.gather(-1, indices.expand(len(groups), -1)[..., None])
        for indices in (low, position.ceil().long())
    ]
    ends = pair[0] + (pair[1] - pair[0]) * (position - low)[:, None]
    return scheme.compute_qparams(original_groups.clamp(-ends, ends), width, options)


def _grid_errors(groups: Tensor, grid: QuantParams, scheme: Scheme, options: SchemeOptions) -> Tensor:
    """Return the sum of |error|^2.4 over all weights that share a scale, [N, G]."""
    difference = scheme.dequantize(scheme.quantize(groups, grid, options), grid, options) - groups
    return pool_errors(difference.abs_().pow_(_ERROR_POWER).sum(dim=-1), scheme, options)
