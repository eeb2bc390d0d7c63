"""A quantized model as floats, for stages that take weights or units away, and back into the same codes.

    model, edits, codes = load_changeable(src, ctx, "prune")
    ...                                     # change the float layers of `model`
    edits = codes.put_back(model, edits, ctx)

Float weights are what the codes stand for, so that what GPTQ, AWQ or a training put into the codes is there.
Afterwards each layer is of the same scheme and options again. A row that goes takes its codes and scales with
it. A column that goes takes its codes; a group of inputs that share a scale is formed anew where it is cut.
So of each group of the result:

- its weights all come from one group of before, and none has changed: codes and scales are those of before;
- its grid is to stay (zeros are put into it): weights that changed get the nearest code on it;
- else: the grid is fitted again as the step `quantize` did, and codes are decided by rounding to nearest, or
  by GPTQ where that step did and what the layer is fed was collected.

What is rounded again starts from the float weights behind the codes where they are known: kept by a training,
or those of the step before a `quantize` that rounded to nearest. What the stage changed is added to them.

Shapes: N = outputs, K = inputs, n and k = those that are left, g = inputs that share a scale, G = groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from smelt.compress.behind_codes import BEHIND_QUANTIZE, CodesBefore
from smelt.compress.calibration.inverse import NotInvertibleError
from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.float_model import places_left
from smelt.compress.quantize.coding import Fit, nearest_on, plain_fit
from smelt.compress.quantize.decided import fit_of
from smelt.compress.quantize.methods.gptq import gptq_codes
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.through_codes import float_weights
from smelt.compress.quantize.training.kept import write_latents
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.families.walk import blocks_of
from smelt.runtime.layers.adapted import AdaptedLinear, adapted
from smelt.runtime.layers.binary_inputs import BinaryInputs
from smelt.runtime.layers.matrix import Matrix
from smelt.runtime.layers.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    empty_quantized,
    is_quantized,
    keep_scale,
)
from smelt.runtime.layers.scaled import ScaledLinear
from smelt.runtime.layers.split import SplitLinear
from smelt.runtime.models.checkpoint import load_model
from smelt.runtime.models.structure import (
    Edit,
    keep_zeros,
    keeps_zeros,
    names_of,
    replace_layer,
    replace_module,
)
from smelt.runtime.schemes.parts.groups import groups_of
from smelt.runtime.schemes.scheme import Codes, Grid

# Rounds weights, float [N, k], of a layer that is fed `InputStatistics`; returns what their codes stand for.
Round: TypeAlias = Callable[[Tensor, InputStatistics], Tensor]
_AGAIN = ("rtn", "hqq")  # methods whose codes the float weights of before say as well
_OPS = ("quantize", "adapter", "scale")


class _Decided(NamedTuple):
    """Codes of a layer, the floats [n, k] that they come from, and whether some are on another grid now."""

    codes: Codes
    floats: Tensor
    again: bool


@dataclass
class _Layer:
    """A layer of codes that is floats now.

    name: of the float layer. coded: as it was. before: what the float layer multiplied by, float32 [N, K].
    base: what codes are decided from where they are decided again, float32 [N, K]: without factors and pair.
    factors: before its inputs, float32 [K]. pair: beside its codes. rounded: weights that codes were decided
    for already, with these.
    """

    name: str
    coded: QuantizedLinear | QuantizedEmbedding
    before: Tensor
    base: Tensor
    factors: Tensor | None = None
    pair: tuple[Tensor, Tensor] | None = None
    rounded: list[tuple[Tensor, _Decided]] = field(default_factory=list)

    @property
    def matrix(self) -> Matrix:
        return self.coded.matrix


class CodesAside:
    """What is needed to make a float model one of codes again.

    Args:
        settings: of the `quantize` that made the codes; None where nobody knows it.
        grids_stay: whether scales are those of before also where weights change; not where inputs go.
        stage: the word of what changes the model, for messages.
    """

    def __init__(self, settings: QuantizeSettings | None, grids_stay: bool, stage: str) -> None:
        self._stage = stage
        self._fit: Fit = plain_fit if settings is None else fit_of(settings)
        self._by_gptq = settings is not None and settings.makes_up
        self._grids_stay = grids_stay
        self._layers: list[_Layer] = []
        self._others: dict[int, Tensor] | None = None
        self._floats: dict[int, Tensor] = {}
        self._channels: Tensor | None = None
        self._same = self._count = 0
        self._again: list[str] = []

    @property
    def before(self) -> CodesBefore:
        """What the layers were that are floats now."""
        schemes = tuple(dict.fromkeys(layer.matrix.scheme.name for layer in self._layers))
        return CodesBefore(schemes, pairs=any(layer.pair is not None for layer in self._layers))

    def narrowed(self, keep: list[int]) -> None:
        """Note that axes as wide as the hidden states have the channels `keep` alone now."""
        self._channels = torch.tensor(keep)

    def rounding(self, model: nn.Module, name: str) -> Round | None:
        """Return what rounds weights for the layer called `name`; None where it has no codes."""
        layer = next((one for one in self._layers if one.name == name), None)
        if layer is None:
            return None

        def rounded(weight: Tensor, seen: InputStatistics) -> Tensor:
            new = weight.detach().float()
            module = model.get_submodule(name)
            decided = self._decide(layer, new, module, seen)
            values = self._composed(layer, decided.codes, *self._places(layer, module))
            layer.rounded.append((values, decided))
            return values

        return rounded

    @torch.no_grad()
    def put_back(self, model: nn.Module, edits: list[Edit], ctx: Context) -> list[Edit]:
        """Give the layers of `model` their codes back, in place; return the edits of the result.

        `ctx.details["codes_kept"]` says which fraction of the codes that are left stand for what they did,
        `ctx.details["requantized_layers"]` which layers got scales again.
        """
        edits = list(edits)
        done: dict[int, tuple[str, Matrix]] = {}
        floats: dict[int, Tensor] = {}
        for layer in self._layers:
            edits += self._one(model, layer, done, floats)
        if self._count:
            ctx.details["codes_kept"] = round(self._same / self._count, 4)
        if self._again:
            ctx.details["requantized_layers"] = self._again
        self._floats = floats
        return edits

    def write_floats(self, model: nn.Module, ctx: Context) -> None:
        """Keep the float weights behind the codes beside the model in `ctx.out`, where they are known."""
        if self._others is None:
            return
        known = self._others | self._floats
        found: dict[str, tuple[Tensor, Matrix]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if is_quantized(module) and id(module.matrix) not in {id(m) for _, m in found.values()}:
                found[name] = (known[id(module.matrix)], module.matrix)
        ctx.details["latent_bytes"] = write_latents({n: weight for n, (weight, _) in found.items()}, ctx.out)

    def take(self, model: nn.Module, everywhere: bool, base: Mapping[int, Tensor] | None) -> None:
        """Let layers of codes be floats, in place.

        Args:
            model: quantized.
            everywhere: or only in the products of blocks.
            base: by the identity of a matrix the float weights behind it; None where they are not known.
        """
        self._others = None if base is None else dict(base)
        inside = tuple(n for b in blocks_of(model) for part in b.parts for n in part.products)
        weights: dict[int, nn.Parameter] = {}
        starts = tuple(f"{name}." for name in inside)
        found = [
            (module, names, [n for n in names if n in inside or n.startswith(starts)])
            for module, names in names_of(model).items()
        ]
        found = [(m, n, w) for m, n, w in found if (everywhere or w) and _whole(model, m, n[0], self._stage)]
        for module, names, within in found:
            name = (within or names)[0]
            layer = _as_floats(name, module, base)
            weight = weights.setdefault(id(layer.matrix), nn.Parameter(layer.before.clone()))
            new = _float_layer(layer, weight).train(module.training)
            for other in names:
                replace_module(model, other, new)
            self._layers.append(layer)

    def edits_without(self, edits: list[Edit]) -> list[Edit]:
        """Return `edits` without those that made codes of the layers that are floats now."""
        names = {f"{layer.name}{end}" for layer in self._layers for end in ("", ".linear", ".matrix")}
        names |= {f"{layer.name}{end}" for layer in self._layers for end in (".coded", ".linear.coded")}
        first = next((i for i, edit in enumerate(edits) if edit["op"] in _OPS), len(edits))

        def made_codes(place: int, edit: Edit) -> bool:
            if edit["op"] in _OPS:
                return edit["module"] in names
            return edit["op"] == "share" and place > first and edit["with"] in names

        return [edit for place, edit in enumerate(edits) if not made_codes(place, edit)]

    def _one(
        self,
        model: nn.Module,
        layer: _Layer,
        done: dict[int, tuple[str, Matrix]],
        floats: dict[int, Tensor],
    ) -> Iterator[Edit]:
        """Put one layer back; yield the edits that make room for it."""
        old: Any = model.get_submodule(layer.name)
        rows, columns = self._places(layer, old)
        matrix = layer.matrix
        inner = f"{layer.name}.linear" if layer.factors is not None else layer.name
        edits: list[Edit] = []
        if layer.factors is not None:
            holder = ScaledLinear(old)
            holder.factors.data = layer.factors[columns].clone()
            replace_layer(
                model, edits, layer.name, holder.train(old.training), {"op": "scale", "module": layer.name}
            )
        new = empty_quantized(old, matrix.scheme.name, matrix.options)
        if isinstance(new, QuantizedLinear) and new.bias is not None:
            new.bias.data = old.bias.detach().clone()
        if keeps_zeros(old):
            keep_zeros(new)
        told = dict(matrix.options)
        edit = {"op": "quantize", "module": inner, "scheme": matrix.scheme.name, **told}
        replace_layer(model, edits, inner, new.train(old.training), edit)
        if id(matrix) in done:
            first, shared = done[id(matrix)]
            new.matrix = shared
            edits.append({"op": "share", "module": f"{inner}.matrix", "with": f"{first}.matrix"})
        else:
            codes, floats[id(new.matrix)] = self._codes(layer, old)
            new.matrix.set_(codes)
            self._measured(matrix, new.matrix)
            done[id(matrix)] = (inner, new.matrix)
        if layer.pair is not None:
            assert isinstance(new, QuantizedLinear)
            up, down = layer.pair[0][rows], layer.pair[1][:, columns]
            edit = {"op": "adapter", "module": inner, "rank": len(down)}
            replace_layer(model, edits, inner, adapted(new, up, down), edit)
        return iter(edits)

    def _measured(self, old: Matrix, new: Matrix) -> None:
        """Take over what was found on rows of data: it is of the matrix as a whole."""
        stored = old.scheme.storage(len(old.codes), old.width, old.options)
        for name in (name for name, one in stored.items() if one.measured):
            new.get_parameter(name).data = old.tensor(name).detach().clone()

    def _places(self, layer: _Layer, module: Any) -> tuple[Tensor, Tensor]:
        """Return which rows and columns of a layer are left, int64, rising."""
        found = []
        size = module.weight.shape
        for dim, places in enumerate(places_left(module)):
            whole = torch.arange(layer.before.shape[dim]) if places is None else places
            if len(whole) != size[dim] and self._channels is not None:
                whole = whole[self._channels]
            found.append(whole)
        return found[0], found[1]

    def _codes(self, layer: _Layer, module: Any) -> tuple[Codes, Tensor]:
        """Return the codes of a layer that is `module` now, and the floats behind them; count them."""
        weight, (rows, columns) = module.weight.detach().float(), self._places(layer, module)
        known = next((one for values, one in layer.rounded if torch.equal(values, weight)), None)
        codes, floats, again = known or self._decide(layer, weight, module, None)
        self._again += [layer.name] if again else []
        scheme, options, width = layer.matrix.scheme, layer.matrix.options, len(columns)
        was = layer.matrix.decided()
        values, before = (scheme.values(one.codes, one.grid, options).flatten(1) for one in (codes, was))
        same = codes.codes.flatten(1)[:, :width] == was.codes.flatten(1)[rows][:, columns]
        same &= values[:, :width] == before[rows][:, columns]  # the same code in another scale is another
        self._same += int(same.sum())
        self._count += same.numel()
        return codes, floats

    def _composed(self, layer: _Layer, codes: Codes, rows: Tensor, columns: Tensor) -> Tensor:
        """Return what a layer of `codes` multiplies by, with its pair and its factors, float32 [n, k]."""
        scheme, options = layer.matrix.scheme, layer.matrix.options
        values = scheme.values(codes.codes, codes.grid, options).flatten(1)[:, : len(columns)]
        return _with_pair_and_factors(layer, values, rows, columns)

    def _decide(
        self, layer: _Layer, weight: Tensor, module: nn.Module, seen: InputStatistics | None
    ) -> _Decided:
        """Return codes for `weight`, float32 [n, k], of `module`."""
        rows, columns = self._places(layer, module)
        scheme, options = layer.matrix.scheme, layer.matrix.options
        before = layer.before[rows][:, columns]
        same = weight == before
        moved = weight - before
        if layer.factors is not None:
            moved = moved / layer.factors[columns].where(layer.factors[columns] != 0, 1.0)
        floats = layer.base[rows][:, columns] + moved
        gone = weight == 0 if keeps_zeros(module) else (weight == 0) & ~same
        if layer.pair is None:
            floats = floats.masked_fill(gone, 0.0)  # exactly
        old, grid = layer.matrix.decided()
        size = scheme.group(len(columns), options)
        origin, whole = _origins(columns, scheme.group(layer.matrix.width, options), size)
        in_groups = groups_of((~same).float(), size).sum(dim=(0, 2)) == 0
        if not self._grids_stay:
            whole &= in_groups
        if scheme.whole(options) and not bool(whole.all()):
            whole[:] = False  # one scale for all weights: of all or of none
        taken = _cut_grid(grid, layer.before.shape[0], old.shape[1], rows, origin)
        codes = scheme.nearest(groups_of(floats, size), taken, options)
        kept = groups_of(old.flatten(1)[rows][:, columns].int(), size).to(codes.dtype)
        real = groups_of(torch.ones(1, len(columns)), size) > 0
        codes = kept.where(groups_of(same.float(), size).bool() & real, codes)
        if bool(whole.all()):
            return _Decided(Codes(codes, taken), floats, False)
        fresh = self._fresh(layer, floats, seen, gone if keeps_zeros(module) else None)
        if not bool(whole.any()):
            return _Decided(fresh, floats, True)
        codes = codes.where(whole[None, :, None], fresh.codes)
        merged = Codes(codes, {name: _merged(taken[name], fresh.grid[name], whole) for name in taken})
        return _Decided(merged, floats, True)

    def _fresh(
        self, layer: _Layer, floats: Tensor, seen: InputStatistics | None, held: Tensor | None
    ) -> Codes:
        """Return codes on a grid that is fitted to `floats`."""
        scheme, options = layer.matrix.scheme, layer.matrix.options
        if self._by_gptq and seen is not None and seen.tokens and layer.factors is None and not layer.pair:
            try:
                return gptq_codes(floats, seen, scheme, options, self._fit, held)
            except NotInvertibleError:  # what is rounded to nearest is no worse than before
                pass
        return nearest_on(self._fit, floats, scheme, options)


def _origins(columns: Tensor, old: int, new: int) -> tuple[Tensor, Tensor]:
    """Return for each group of `new` columns that of `old` ones which its first is from, and whether all are.

    columns: int64 [k], which are left. Returns: int64 [G], bool [G].
    """
    of = columns // old
    filled = torch.cat([of, of[-1:].expand(-len(of) % new)]).unflatten(0, (-1, new))
    return filled[:, 0], (filled == filled[:, :1]).all(dim=1)


def _cut_grid(grid: Grid, rows: int, groups: int, stay: Tensor, origin: Tensor) -> dict[str, Tensor]:
    """Return a grid of `rows` and `groups` for the rows `stay` and groups from those at `origin`."""
    found = {}
    for name, tensor in grid.items():
        part = tensor[stay] if tensor.shape[0] == rows else tensor
        if part.dim() > 1 and part.shape[1] == groups:
            part = part.index_select(1, origin)
        found[name] = part.contiguous()
    return found


def _merged(old: Tensor, new: Tensor, whole: Tensor) -> Tensor:
    """Return `old` of the groups that are `whole`, bool [G], and `new` of all others."""
    shape = (1, len(whole), *[1] * (new.dim() - 2))
    return old.where(whole.view(shape), new.to(old.dtype))


def _with_pair_and_factors(layer: _Layer, values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    if layer.pair is not None:
        values = values + layer.pair[0][rows] @ layer.pair[1][:, columns]
    return values if layer.factors is None else values * layer.factors[columns]


def _whole(model: nn.Module, module: nn.Module, name: str, stage: str) -> bool:
    """Say whether `module` is a layer of codes with all that belongs to it, not one inside of another."""
    owner, _, last = name.rpartition(".")
    inside = model.get_submodule(owner) if owner else None
    if isinstance(module, SplitLinear | BinaryInputs):
        split = isinstance(module, SplitLinear)
        why = CodesBefore((), split=split, one_bit=not split).units_held(stage)
        raise InputError(f"{stage}: {why}", code=BEHIND_QUANTIZE)
    if last in ("coded", "linear") and isinstance(inside, AdaptedLinear | ScaledLinear):
        return False
    core = module.linear if isinstance(module, ScaledLinear) else module
    return is_quantized(core) or isinstance(core, AdaptedLinear)


@torch.no_grad()
def _as_floats(name: str, module: Any, base: Mapping[int, Tensor] | None) -> _Layer:
    core: Any = module.linear if isinstance(module, ScaledLinear) else module
    coded = core.coded if isinstance(core, AdaptedLinear) else core
    values = coded.matrix.dequantize()
    layer = _Layer(name, coded, values, values if base is None else base[id(coded.matrix)])
    if isinstance(module, ScaledLinear):
        layer.factors = module.factors.detach().clone()
    if isinstance(core, AdaptedLinear):
        layer.pair = (core.adapter.up.weight.detach().clone(), core.adapter.down.weight.detach().clone())
    rows, columns = (torch.arange(size) for size in values.shape)
    layer.before = _with_pair_and_factors(layer, values, rows, columns)
    return layer


def _float_layer(layer: _Layer, weight: nn.Parameter) -> nn.Module:
    coded = layer.coded
    if isinstance(coded, QuantizedEmbedding):
        table = nn.Embedding(weight.shape[0], weight.shape[1], coded.padding_idx, device="meta")
        table.weight = weight
        keep_scale(table, coded)
        return table
    new = nn.Linear(coded.in_features, coded.out_features, coded.bias is not None, device="meta")
    new.weight = weight
    if coded.bias is not None:
        new.bias = nn.Parameter(coded.bias.detach().clone())
    if keeps_zeros(coded):
        keep_zeros(new)
    return new


def load_changeable(
    src: Artifact, ctx: Context, stage: str, everywhere: bool = False, grids_stay: bool = False
) -> tuple[Any, list[Edit], CodesAside | None]:
    """Return the model of `src` with float layers (float32, CPU, eval mode), its edits, and its codes.

    Args:
        src: a model of floats or of codes.
        ctx: the stage's.
        stage: its word.
        everywhere: whether word embeddings and heads are to be floats too, or only the products of blocks.
        grids_stay: whether scales stay where weights change.

    Returns:
        The codes are None where the model has none.

    Raises:
        InputError: the model has layers of codes that cannot be made again.
    """
    model, edits = load_model(src.path)
    if not any(edit.get("op") == "quantize" for edit in edits):
        return model, edits, None
    settings = _quantized_by(src, ctx.ancestors.values())
    aside = CodesAside(settings, grids_stay, stage)
    aside.take(
        model, everywhere, float_weights(model, src, ctx, settings is None or settings.method in _AGAIN)
    )
    return model, aside.edits_without(edits), aside


def _quantized_by(src: Artifact, ancestors: Collection[Artifact]) -> QuantizeSettings | None:
    """Return the settings of the step that made the codes of `src`, as its manifest has them: all of them.

    They were checked then, and some do not go with others once all are named.
    """
    by_key = {artifact.key: artifact for artifact in ancestors}
    current: Artifact | None = src
    while current is not None and current.manifest.stage != "quantize":
        current = by_key.get(current.manifest.parent or "")
    return None if current is None else QuantizeSettings.model_construct(**dict(current.manifest.settings))
