"""Dequantization of a model for stages that remove weights or units, and requantization afterwards.

    edits, codes = dequantize_model(model, edits, src, ctx, "prune")
    ...                                     # change the float layers of `model`
    edits = codes.requantize(model, edits, ctx)

The float weights are the dequantized ones, so the results of GPTQ, AWQ or training are preserved. Afterwards
each layer has the same scheme and options again. A removed row is removed with its quantized weights and
scales, a removed column with its quantized weights; a group of inputs with one scale is regrouped if it was
cut. For each group of the result:

- all its weights come from one old group and none has changed: quantized weights and scales are kept;
- its grid has to be kept (zeros were inserted): changed weights are rounded to the nearest value of the grid;
- else: the grid is fitted again as in the step `quantize`, and weights are rounded to nearest, or by GPTQ if
  that step used it and input statistics of the layer were collected.

Weights that are rounded again start from the original float weights if these are known: stored by a training,
or those of the step before a `quantize` that rounded to nearest. The changes of the stage are added to them.

Shapes: N = outputs, K = inputs, n and k = the kept ones, g = inputs that share a scale, G = groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from smelt.calibration.statistics import InputStatistics, NotInvertibleError
from smelt.compress.model_input import AFTER_QUANTIZE, require_no_codebooks, split_pruning_error
from smelt.compress.quantize.gptq import column_updates, gptq_quantize
from smelt.compress.quantize.plan_layers import GridFinder, round_on_grid, scheme_grid
from smelt.compress.quantize.qat import find_master_weights, write_master_weights
from smelt.compress.quantize.sequential import grid_finder
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.models.checkpoint import save_model
from smelt.models.edits import (
    Edit,
    is_masked,
    kept_indices,
    mark_masked,
    module_names,
    replace_layer,
    replace_module,
)
from smelt.models.families.registry import blocks_of
from smelt.models.layers import LowRankCorrectedLinear, ScaledLinear, with_low_rank_correction
from smelt.models.streamed_model import StreamedModel
from smelt.quantization.groupwise import split_into_groups
from smelt.quantization.layers import (
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedMatrix,
    SplitLinear,
    copy_embed_scale,
    empty_quantized,
    is_quantized,
)
from smelt.quantization.scheme import QuantParams, UnpackedWeights
from smelt.stage import Context, QuantizedInput, StoredDtype

# Rounds weights, float [N, k], of a layer with `InputStatistics`; returns the dequantized values.
RoundWeights: TypeAlias = Callable[[Tensor, InputStatistics], Tensor]
_WEIGHT_ONLY_METHODS = ("rtn", "hqq")  # methods whose result can be repeated from the float weights
_QUANTIZE_OPS = ("quantize", "adapter", "scale")


class _RequantizedCodes(NamedTuple):
    """Quantized weights of a layer, their float source [n, k], and whether some have a new grid."""

    codes: UnpackedWeights
    floats: Tensor
    changed_grid: bool


@dataclass
class _DequantizedLayer:
    """A dequantized layer.

    name: of the float layer. quantized: the quantized layer. old_weight: the effective float weight, float32
    [N, K]. source_weight: the source when it is quantized again, float32 [N, K], without factors and
    correction.
    factors: input scales, float32 [K]. pair: the low-rank correction. cache: weights that were quantized
    before, with their results.
    """

    name: str
    quantized: QuantizedLinear | QuantizedEmbedding
    old_weight: Tensor
    source_weight: Tensor
    factors: Tensor | None = None
    pair: tuple[Tensor, Tensor] | None = None
    cache: list[tuple[Tensor, _RequantizedCodes]] = field(default_factory=list)

    @property
    def matrix(self) -> QuantizedMatrix:
        return self.quantized.matrix


class Requantizer:
    """The state to quantize a dequantized model again.

    Args:
        settings: settings of the original `quantize`; None if unknown.
        grids_stay: whether scales are kept where weights change; not if inputs are removed.
        stage: the name of the stage that changes the model, for messages.
    """

    def __init__(self, settings: QuantizeSettings | None, grids_stay: bool, stage: str) -> None:
        self._stage = stage
        self._find_grid: GridFinder = scheme_grid if settings is None else grid_finder(settings)
        self._gptq_order = settings.act_order if settings and settings.compensates_rounding else None
        self._grids_stay = grids_stay
        self._layers: list[_DequantizedLayer] = []
        self._others: dict[int, Tensor] | None = None
        self._floats: dict[int, Tensor] = {}
        self._channels: Tensor | None = None
        self._same = self._count = 0
        self._again: list[str] = []

    @property
    def quantized_input(self) -> QuantizedInput:
        """A description of the dequantized layers."""
        schemes = tuple(dict.fromkeys(layer.matrix.scheme.name for layer in self._layers))
        return QuantizedInput(schemes, has_corrections=any(layer.pair is not None for layer in self._layers))

    def record_kept_channels(self, keep: list[int]) -> None:
        """Record that only the channels `keep` of the hidden states are left."""
        self._channels = torch.tensor(keep)

    def rounder_of(self, model: nn.Module, name: str) -> RoundWeights | None:
        """Return the function that rounds weights of the layer `name`; None if it was not quantized."""
        layer = next((layer for layer in self._layers if layer.name == name), None)
        if layer is None:
            return None

        def rounded(weight: Tensor, seen: InputStatistics) -> Tensor:
            float_weight = weight.detach().float()
            module = model.get_submodule(name)
            requantized = self._quantize_weight(layer, float_weight, module, seen)
            values = self._effective_weight(layer, requantized.codes, *self._kept_indices(layer, module))
            layer.cache.append((values, requantized))
            return values

        return rounded

    @torch.no_grad()
    def requantize(self, model: nn.Module, edits: list[Edit], ctx: Context) -> list[Edit]:
        """Quantize the dequantized layers of `model` again, in place; return the edits of the result.

        `ctx.details["codes_kept"]` is the fraction of the remaining quantized weights with unchanged values,
        `ctx.details["requantized_layers"]` lists the layers with new scales.
        """
        edits = list(edits)
        quantized: dict[int, tuple[str, QuantizedMatrix]] = {}
        floats: dict[int, Tensor] = {}
        for layer in self._layers:
            edits += self._requantize_layer(model, layer, quantized, floats)
        if self._count:
            ctx.details["codes_kept"] = round(self._same / self._count, 4)
        if self._again:
            ctx.details["requantized_layers"] = self._again
        self._floats = floats
        return edits

    def write_master_weights(self, model: nn.Module, ctx: Context) -> None:
        """Store the master weights with the model in `ctx.out`, if they are known."""
        if self._others is None:
            return
        weights = self._others | self._floats
        by_name: dict[str, tuple[Tensor, QuantizedMatrix]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if is_quantized(module) and id(module.matrix) not in {id(m) for _, m in by_name.values()}:
                by_name[name] = (weights[id(module.matrix)], module.matrix)
        ctx.details["latent_bytes"] = write_master_weights(
            {n: weight for n, (weight, _) in by_name.items()}, ctx.out
        )

    def dequantize(self, model: nn.Module, everywhere: bool, base: Mapping[int, Tensor] | None) -> None:
        """Dequantize layers in place.

        Args:
            model: the quantized model.
            everywhere: whether to include all layers instead of only the linear layers of blocks.
            base: the original float weights by the identity of the matrix; None if unknown.
        """
        self._others = None if base is None else dict(base)
        block_layers = tuple(n for b in blocks_of(model) for part in b.parts for n in part.linear_layers)
        weights: dict[int, nn.Parameter] = {}
        starts = tuple(f"{name}." for name in block_layers)
        quantized_layers = [
            (module, names, [n for n in names if n in block_layers or n.startswith(starts)])
            for module, names in module_names(model).items()
        ]
        quantized_layers = [
            (m, n, w)
            for m, n, w in quantized_layers
            if (everywhere or w) and _is_complete_layer(model, m, n[0], self._stage)
        ]
        for module, names, block_names in quantized_layers:
            name = (block_names or names)[0]
            layer = _dequantize_layer(name, module, base)
            weight = weights.setdefault(id(layer.matrix), nn.Parameter(layer.old_weight.clone()))
            replacement = _float_layer(layer, weight).train(module.training)
            for alias in names:
                replace_module(model, alias, replacement)
            self._layers.append(layer)

    def edits_without_quantization(self, edits: list[Edit]) -> list[Edit]:
        """Return `edits` without those that quantized the dequantized layers."""
        names = {f"{layer.name}{end}" for layer in self._layers for end in ("", ".linear", ".matrix")}
        names |= {f"{layer.name}{end}" for layer in self._layers for end in (".coded", ".linear.coded")}
        first_index = next((i for i, edit in enumerate(edits) if edit["op"] in _QUANTIZE_OPS), len(edits))

        def is_quantization_edit(index: int, edit: Edit) -> bool:
            if edit["op"] in _QUANTIZE_OPS:
                return edit["module"] in names
            return edit["op"] == "share" and index > first_index and edit["with"] in names

        return [edit for index, edit in enumerate(edits) if not is_quantization_edit(index, edit)]

    def _requantize_layer(
        self,
        model: nn.Module,
        layer: _DequantizedLayer,
        done: dict[int, tuple[str, QuantizedMatrix]],
        floats: dict[int, Tensor],
    ) -> Iterator[Edit]:
        """Quantize one layer again; yield its edits."""
        float_layer: Any = model.get_submodule(layer.name)
        rows, columns = self._kept_indices(layer, float_layer)
        matrix = layer.matrix
        inner = f"{layer.name}.linear" if layer.factors is not None else layer.name
        edits: list[Edit] = []
        if layer.factors is not None:
            holder = ScaledLinear(float_layer)
            holder.factors.data = layer.factors[columns].clone()
            replace_layer(
                model,
                edits,
                layer.name,
                holder.train(float_layer.training),
                {"op": "scale", "module": layer.name},
            )
        quantized = empty_quantized(float_layer, matrix.scheme.name, matrix.options)
        if isinstance(quantized, QuantizedLinear) and quantized.bias is not None:
            quantized.bias.data = float_layer.bias.detach().clone()
        if is_masked(float_layer):
            mark_masked(quantized)
        options = dict(matrix.options)
        edit = {"op": "quantize", "module": inner, "scheme": matrix.scheme.name, **options}
        replace_layer(model, edits, inner, quantized.train(float_layer.training), edit)
        if id(matrix) in done:
            owner, shared = done[id(matrix)]
            quantized.matrix = shared
            edits.append({"op": "share", "module": f"{inner}.matrix", "with": f"{owner}.matrix"})
        else:
            codes, floats[id(quantized.matrix)] = self._layer_codes(layer, float_layer)
            quantized.matrix.set_weight_(codes)
            self._copy_ranges(matrix, quantized.matrix)
            done[id(matrix)] = (inner, quantized.matrix)
        if layer.pair is not None:
            assert isinstance(quantized, QuantizedLinear)
            up, down = layer.pair[0][rows], layer.pair[1][:, columns]
            edit = {"op": "adapter", "module": inner, "rank": len(down)}
            replace_layer(model, edits, inner, with_low_rank_correction(quantized, up, down), edit)
        return iter(edits)

    def _copy_ranges(self, old: QuantizedMatrix, new: QuantizedMatrix) -> None:
        """Copy the activation ranges, which apply to the whole matrix."""
        stored = old.scheme.stored_tensors(len(old.codes), old.width, old.options)
        for name in (name for name, tensor in stored.items() if tensor.calibrated):
            new.get_parameter(name).data = old.tensor(name).detach().clone()

    def _kept_indices(self, layer: _DequantizedLayer, module: Any) -> tuple[Tensor, Tensor]:
        """Return the kept rows and columns of a layer, int64, ascending."""
        by_dim = []
        size = module.weight.shape
        for dim, recorded in enumerate(kept_indices(module)):
            indices = torch.arange(layer.old_weight.shape[dim]) if recorded is None else recorded
            if len(indices) != size[dim] and self._channels is not None:
                indices = indices[self._channels]
            by_dim.append(indices)
        return by_dim[0], by_dim[1]

    def _layer_codes(self, layer: _DequantizedLayer, module: Any) -> tuple[UnpackedWeights, Tensor]:
        """Return the quantized weights of the changed layer `module`, and their float source; count them."""
        weight, (rows, columns) = module.weight.detach().float(), self._kept_indices(layer, module)
        previous = next((cached for values, cached in layer.cache if torch.equal(values, weight)), None)
        codes, floats, is_refit = previous or self._quantize_weight(layer, weight, module, None)
        self._again += [layer.name] if is_refit else []
        scheme, options, width = layer.matrix.scheme, layer.matrix.options, len(columns)
        old_weights = layer.matrix.unpack()
        values, old_values = (
            scheme.dequantize(quantized.q_weight, quantized.qparams, options).flatten(1)
            for quantized in (codes, old_weights)
        )
        unchanged = codes.q_weight.flatten(1)[:, :width] == old_weights.q_weight.flatten(1)[rows][:, columns]
        # the same integer with another scale is another value
        unchanged &= values[:, :width] == old_values[rows][:, columns]
        self._same += int(unchanged.sum())
        self._count += unchanged.numel()
        return codes, floats

    def _effective_weight(
        self, layer: _DequantizedLayer, codes: UnpackedWeights, rows: Tensor, columns: Tensor
    ) -> Tensor:
        """Return the effective weight of a layer, with correction and factors, float32 [n, k]."""
        scheme, options = layer.matrix.scheme, layer.matrix.options
        values = scheme.dequantize(codes.q_weight, codes.qparams, options).flatten(1)[:, : len(columns)]
        return _with_pair_and_factors(layer, values, rows, columns)

    def _quantize_weight(
        self, layer: _DequantizedLayer, weight: Tensor, module: nn.Module, seen: InputStatistics | None
    ) -> _RequantizedCodes:
        """Return the quantized weights for `weight`, float32 [n, k], of `module`."""
        rows, columns = self._kept_indices(layer, module)
        scheme, options = layer.matrix.scheme, layer.matrix.options
        old_weight = layer.old_weight[rows][:, columns]
        unchanged = weight == old_weight
        change = weight - old_weight
        if layer.factors is not None:
            change = change / layer.factors[columns].where(layer.factors[columns] != 0, 1.0)
        floats = layer.source_weight[rows][:, columns] + change
        zeros = weight == 0 if is_masked(module) else (weight == 0) & ~unchanged
        if layer.pair is None:
            floats = floats.masked_fill(zeros, 0.0)  # exactly
        old_codes, grid = layer.matrix.unpack()
        size = scheme.group_size(len(columns), options)
        origin, intact = _group_origins(columns, scheme.group_size(layer.matrix.width, options), size)
        unchanged_groups = split_into_groups((~unchanged).float(), size).sum(dim=(0, 2)) == 0
        if not self._grids_stay:
            intact &= unchanged_groups
        if scheme.is_per_tensor(options) and not bool(intact.all()):
            intact[:] = False  # one scale for all weights: keep it for all or for none
        old_grid = _cut_grid(grid, layer.old_weight.shape[0], old_codes.shape[1], rows, origin)
        codes = scheme.quantize(split_into_groups(floats, size), old_grid, options)
        old_in_groups = split_into_groups(old_codes.flatten(1)[rows][:, columns].int(), size).to(codes.dtype)
        valid = split_into_groups(torch.ones(1, len(columns)), size) > 0
        codes = old_in_groups.where(split_into_groups(unchanged.float(), size).bool() & valid, codes)
        if bool(intact.all()):
            return _RequantizedCodes(UnpackedWeights(codes, old_grid), floats, False)
        fresh = self._refit_codes(layer, floats, seen, zeros if is_masked(module) else None)
        if not bool(intact.any()):
            return _RequantizedCodes(fresh, floats, True)
        codes = codes.where(intact[None, :, None], fresh.q_weight)
        merged = UnpackedWeights(
            codes, {name: _merged(old_grid[name], fresh.qparams[name], intact) for name in old_grid}
        )
        return _RequantizedCodes(merged, floats, True)

    def _refit_codes(
        self, layer: _DequantizedLayer, floats: Tensor, seen: InputStatistics | None, held: Tensor | None
    ) -> UnpackedWeights:
        """Return the quantized weights on a grid that is fitted to `floats`."""
        scheme, options = layer.matrix.scheme, layer.matrix.options
        order = self._gptq_order
        if order and seen is not None and seen.tokens and layer.factors is None and not layer.pair:
            try:
                updates = column_updates(seen, order)
                return gptq_quantize(floats, updates, scheme, options, self._find_grid, held)
            except NotInvertibleError:  # keep the rounding to nearest
                pass
        return round_on_grid(self._find_grid, floats, scheme, options)


def _group_origins(columns: Tensor, old: int, new: int) -> tuple[Tensor, Tensor]:
    """Return the old group of the first column of each new group, int64 [G], and whether all come from it.

    columns: the kept columns, int64 [k]. old, new: group sizes. The second result is bool [G].
    """
    old_groups = columns // old
    padded = torch.cat([old_groups, old_groups[-1:].expand(-len(old_groups) % new)]).unflatten(0, (-1, new))
    return padded[:, 0], (padded == padded[:, :1]).all(dim=1)


def _cut_grid(
    grid: QuantParams, rows: int, groups: int, kept_rows: Tensor, origin: Tensor
) -> dict[str, Tensor]:
    """Return the grid of the rows `kept_rows` and the groups at `origin` of a grid of `rows` and `groups`."""
    result = {}
    for name, tensor in grid.items():
        selected = tensor[kept_rows] if tensor.shape[0] == rows else tensor
        if selected.dim() > 1 and selected.shape[1] == groups:
            selected = selected.index_select(1, origin)
        result[name] = selected.contiguous()
    return result


def _merged(old: Tensor, new: Tensor, unchanged: Tensor) -> Tensor:
    """Return `old` for the groups that are `unchanged`, bool [G], and `new` for all others."""
    shape = (1, len(unchanged), *[1] * (new.dim() - 2))
    return old.where(unchanged.view(shape), new.to(old.dtype))


def _with_pair_and_factors(layer: _DequantizedLayer, values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    if layer.pair is not None:
        values = values + layer.pair[0][rows] @ layer.pair[1][:, columns]
    return values if layer.factors is None else values * layer.factors[columns]


def _is_complete_layer(model: nn.Module, module: nn.Module, name: str, stage: str) -> bool:
    """Return whether `module` is a complete quantized layer, not a part of another one."""
    owner, _, attribute = name.rpartition(".")
    parent = model.get_submodule(owner) if owner else None
    if isinstance(module, SplitLinear):
        reason = split_pruning_error(QuantizedInput((), is_split=True), stage)
        raise InputError(f"{stage}: {reason}", code=AFTER_QUANTIZE)
    if attribute in ("coded", "linear") and isinstance(parent, LowRankCorrectedLinear | ScaledLinear):
        return False
    core = module.linear if isinstance(module, ScaledLinear) else module
    return is_quantized(core) or isinstance(core, LowRankCorrectedLinear)


@torch.no_grad()
def _dequantize_layer(name: str, module: Any, base: Mapping[int, Tensor] | None) -> _DequantizedLayer:
    core: Any = module.linear if isinstance(module, ScaledLinear) else module
    quantized = core.coded if isinstance(core, LowRankCorrectedLinear) else core
    values = quantized.matrix.dequantize()
    layer = _DequantizedLayer(name, quantized, values, values if base is None else base[id(quantized.matrix)])
    if isinstance(module, ScaledLinear):
        layer.factors = module.factors.detach().clone()
    if isinstance(core, LowRankCorrectedLinear):
        layer.pair = (core.adapter.up.weight.detach().clone(), core.adapter.down.weight.detach().clone())
    rows, columns = (torch.arange(size) for size in values.shape)
    layer.old_weight = _with_pair_and_factors(layer, values, rows, columns)
    return layer


def _float_layer(layer: _DequantizedLayer, weight: nn.Parameter) -> nn.Module:
    quantized = layer.quantized
    if isinstance(quantized, QuantizedEmbedding):
        table = nn.Embedding(weight.shape[0], weight.shape[1], quantized.padding_idx, device="meta")
        table.weight = weight
        copy_embed_scale(table, quantized)
        return table
    linear = nn.Linear(
        quantized.in_features, quantized.out_features, quantized.bias is not None, device="meta"
    )
    linear.weight = weight
    if quantized.bias is not None:
        linear.bias = nn.Parameter(quantized.bias.detach().clone())
    if is_masked(quantized):
        mark_masked(linear)
    return linear


def dequantize_model(
    model: Any,
    edits: list[Edit],
    src: Artifact,
    ctx: Context,
    stage: str,
    everywhere: bool = False,
    keep_grids: bool = False,
) -> tuple[list[Edit], Requantizer | None]:
    """Dequantize the `model` of `src` (float32, CPU); return its edits as a float model, and its requantizer.

    Args:
        model: a float or quantized model, with its `edits`.
        edits: see there.
        src: its artifact.
        ctx: the context of the stage.
        stage: the name of the stage.
        everywhere: whether to dequantize token embeddings and heads too, not only the linear layers of
        blocks.
        keep_grids: whether scales are kept where weights change.

    Returns:
        The edits, and the requantizer; the last is None for a float model.

    Raises:
        InputError: the model has quantized layers that cannot be quantized again.
    """
    if not any(edit.get("op") == "quantize" for edit in edits):
        return edits, None
    require_no_codebooks(edits, stage)
    settings = _find_quantize_settings(src, ctx.ancestors.values())
    aside = Requantizer(settings, keep_grids, stage)
    aside.dequantize(
        model,
        everywhere,
        find_master_weights(model, src, ctx, settings is None or settings.method in _WEIGHT_ONLY_METHODS),
    )
    return aside.edits_without_quantization(edits), aside


def _find_quantize_settings(src: Artifact, ancestors: Collection[Artifact]) -> QuantizeSettings | None:
    """Return the settings of the step that quantized `src`, from its manifest, without validation.

    They were validated then, and the validation rejects some combinations if all settings are explicit.
    """
    by_key = {artifact.key: artifact for artifact in ancestors}
    current: Artifact | None = src
    while current is not None and current.manifest.stage != "quantize":
        current = by_key.get(current.manifest.parent or "")
    return None if current is None else QuantizeSettings.model_construct(**dict(current.manifest.settings))


def save_requantized(
    model: Any,
    edits: list[Edit],
    src: Artifact,
    dtype: StoredDtype,
    ctx: Context,
    codes: Requantizer | None,
    streamed: StreamedModel | None = None,
) -> None:
    """Write a changed model to `ctx.out`; what `codes` dequantized is quantized again.

    Args:
        model: changed in place.
        edits: of the model, without those of `codes`.
        src: the artifact that the model was read from.
        dtype: of float weights.
        ctx: gets details and warnings.
        codes: of `dequantize_model`; None for a float model.
        streamed: the model, if its blocks were written one by one.
    """
    if codes is not None:
        edits = codes.requantize(model, edits, ctx)
    if streamed is not None:
        ctx.warnings.extend(streamed.finish(edits))
        return
    ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, dtype))
    if codes is not None:
        codes.write_master_weights(model, ctx)
