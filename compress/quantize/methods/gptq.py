"""GPTQ: each column's rounding is made up for by the columns that are not rounded yet.

Frantar et al. 2023, GPTQ, arXiv:2210.17323, and its published code (gptq.py, fasterquant): with H = 2 X X^T
of what the layer is fed and U the upper Cholesky factor of the inverse of the damped H, the columns are
rounded from left to right; the error of column j, divided by U_jj, is taken off the columns to its right
along U's row, at once inside a block of 128, and afterwards from the rest. The grid of each group is that of
the whole weights (`static_groups`), in their own order (no act-order, which would leave the graph with an
index of groups). The blocks of a model are gone through one by one, each on what the quantized ones before
it give.

Shapes: N = outputs, K = inputs, G = groups, g = inputs of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smelt.compress.calibration.blocks import Observe, drive
from smelt.compress.calibration.inverse import DAMP, NotInvertibleError, inverse_factor
from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.calibration.statistics import Collector, InputStatistics, collected, few_tokens, width_of
from smelt.compress.quantize.coding import Fit
from smelt.compress.quantize.low_rank import Joint, joint, metric_of, values_of, with_pairs
from smelt.compress.quantize.planned import Planned
from smelt.compress.quantize.settings import LowRankCorrection
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.models.structure import keeps_zeros
from smelt.runtime.schemes.parts.groups import groups_of
from smelt.runtime.schemes.registry import decided_by_row, find
from smelt.runtime.schemes.scheme import Codes, Options, Scheme

_COLUMNS = 128  # whose errors reach the rest at once
_AT_ONCE = 2**24  # weights of a layer; a block's have fewer, a vocabulary's more


def gptq_codes(
    weight: Tensor,
    found: InputStatistics,
    scheme: Scheme,
    options: Options,
    fit: Fit,
    held: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Codes:
    """Return codes for `weight`, float32 [N, K].

    Args:
        weight: left as it is.
        found: what the layer is fed, with second moments.
        scheme: whose grid and rounding are taken, column by column.
        options: of it.
        fit: finds the grid of groups.
        held: bool [N, K], which weights are zero and stay so: what other columns would add to them is made up
            for further right, as SparseGPT does where it quantizes too (arXiv:2301.00774, section 3.3).
        inverse: U of `found` (see `inverse_factor`), float [K, K], where it is known.

    Raises:
        ValueError: the second moment cannot be inverted.
    """
    size = scheme.group(weight.shape[1], options)
    assert found.second is not None
    factor = (inverse_factor(found)[0] if inverse is None else inverse).to(weight)
    left = weight.clone()
    left[:, found.second.diagonal() == 0] = 0.0  # never fed anything
    # Grids come after that, as in the published code; but not where they are means of magnitudes (binary,
    # ternary), which zeros would make too small, nor where they are fitted to all weights (kmeans4), which
    # gains by it only where a fifth of the inputs and more is never fed.
    ranged = scheme.ranges and not scheme.trained
    grid = fit(groups_of(left if ranged else weight, size), weight.shape[1], scheme, options)
    codes = scheme.nearest(groups_of(left, size), grid, options)
    for start in range(0, left.shape[1], _COLUMNS):
        end = min(start + _COLUMNS, left.shape[1])
        errors = torch.empty_like(left[:, start:end])
        for j in range(start, end):
            part = {name: _of_group(tensor, j // size) for name, tensor in grid.items()}
            column = left[:, j] if held is None else left[:, j].masked_fill(held[:, j], 0.0)
            chosen = scheme.nearest(column.contiguous()[:, None, None], part, options)
            codes[:, j // size, j % size] = chosen[:, 0, 0]
            value = scheme.values(chosen, part, options)[:, 0, 0]
            errors[:, j - start] = (left[:, j] - value) / factor[j, j]
            left[:, j:end] -= torch.outer(errors[:, j - start], factor[j, j:end])
        left[:, end:] -= errors @ factor[start:end, end:]
    return Codes(codes, grid)


def _of_group(tensor: Tensor, group: int) -> Tensor:
    """Return a grid's tensor of one group; one that has a single group, or none, serves all columns."""
    return tensor[:, group : group + 1] if tensor.dim() > 1 and tensor.shape[1] > 1 else tensor


def gptq(
    model: Any,
    layers: Sequence[Planned],
    rows: CalibrationRows,
    fit: Fit,
    ctx: Context,
    low_rank: LowRankCorrection | None = None,
) -> tuple[dict[int, Codes], dict[int, Joint]]:
    """Decide the codes of the products among `layers`, and give `model` the values that they stand for.

    A matrix that is embedding and head is left out: what a product makes up for elsewhere is missing where
    rows are looked up.

    Args:
        model: float32, in eval mode, on the CPU; its weights change.
        layers: of it, as planned.
        rows: what it reads.
        fit: finds grids.
        ctx: gets the details of each layer and warnings.
        low_rank: of the pairs beside the codes; what a layer stands for is then the sum of both.

    Returns:
        Codes by `Planned.weight`, and those that have a pair with it.

    Raises:
        InputError: what a layer is fed is not finite, or cannot be inverted however damped.
    """
    tables = {layer.weight for layer in layers if not layer.product}
    work = GptqWork(rows, fit, ctx)
    if low_rank is not None:
        work.beside = {layer.weight: low_rank for layer in with_pairs(model, layers)}
    wanted = {id(layer.module): layer for layer in layers if layer.product and layer.weight not in tables}
    for step in drive(model, rows, ctx, stage="quantize"):
        work.look([wanted.pop(id(m)) for m in step.module.modules() if id(m) in wanted], step.observe)
    if rest := work.new(list(wanted.values())):  # heads, poolers: behind the blocks
        with collected(model, rows, {layer.name: [layer.module] for layer in rest}, ctx) as found:
            work.decide(rest, found)
    work.tell()
    return work.codes, work.pairs


class GptqWork:
    """What was decided so far.

    codes: by `Planned.weight`; pairs: of those that have one.
    """

    def __init__(self, rows: CalibrationRows, fit: Fit, ctx: Context) -> None:
        self.rows, self.fit, self.ctx = rows, fit, ctx
        self.codes: dict[int, Codes] = {}
        self.beside: dict[int, LowRankCorrection] = {}
        self.pairs: dict[int, Joint] = {}
        self.left: dict[str, float] = {}
        self.unfed: dict[str, int] = {}
        self.damped: dict[str, float] = {}
        self.unreached: list[str] = []
        self.fed: list[tuple[int, int]] = []

    def new(self, layers: Sequence[Planned]) -> list[Planned]:
        """Return of each weight that is not decided yet the first layer."""
        return list(
            {layer.weight: layer for layer in reversed(layers) if layer.weight not in self.codes}.values()
        )

    def look(self, layers: Sequence[Planned], observe: Observe) -> None:
        """Decide the codes of `layers` on what `observe` shows that they are fed."""
        layers = self.new(layers)
        if not layers:
            return
        device = layers[0].module.weight.device.type  # where the model computes while it is driven
        collector = Collector({layer.name: width_of(layer.module) for layer in layers}, device=device)
        observe({layer.name: [layer.module] for layer in layers}, collector.see)
        self.decide(layers, {name: collector.found.pop(name).to("cpu") for name in list(collector.found)})

    @torch.no_grad()
    def decide(self, layers: Sequence[Planned], found: dict[str, InputStatistics]) -> None:
        """Decide the codes of `layers`, and put their values into the weights; `found` is used up."""
        for layer in layers:
            seen = found.pop(layer.name)
            if not seen.tokens:
                self.unreached.append(layer.name)
                continue
            if not bool(seen.squares.isfinite().all()):
                raise InputError(
                    f"quantize: {layer.name}: its inputs are not finite. The training before it"
                    " has probably diverged.",
                    code="non-finite-activations",
                )
            self._decide(layer, seen)

    def _decide(self, layer: Planned, seen: InputStatistics) -> None:
        """Decide the codes of one layer; all of its rows share what its inputs are made up for by."""
        weight, inverse = layer.module.weight, self._inverse(layer, seen)
        parts = [self._part(layer, rows, seen, inverse) for rows in weight.split(self._rows_at_once(layer))]
        error, plain = sum(part[1] for part in parts), sum(part[2] for part in parts)
        self.left[layer.name] = error / plain if plain > 0 else 1.0
        if unfed := int((seen.squares == 0).sum()):
            self.unfed[layer.name] = unfed
        self.codes[layer.weight] = _joined([part[0] for part in parts])
        self.fed.append((seen.tokens, weight.shape[1]))

    def _rows_at_once(self, layer: Planned) -> int:
        """Return how many rows of a layer are decided at once: all, but of a vocabulary's, which are many."""
        count, width = (int(size) for size in layer.module.weight.shape)
        apart = decided_by_row(find(layer.scheme), width, layer.options)
        return max(1, _AT_ONCE // width) if apart and layer.weight not in self.beside else count

    def _inverse(self, layer: Planned, seen: InputStatistics) -> Tensor:
        """Return U of what a layer is fed, float32 [K, K]."""
        try:
            factor, damp = inverse_factor(seen)
        except NotInvertibleError as error:
            raise InputError(
                f"quantize: {layer.name}: {error}. Take method: rtn, or other rows.",
                code="not-invertible",
                setting="method",
            ) from error
        if damp > DAMP:
            self.damped[layer.name] = damp
        return factor.float()

    def _part(
        self, layer: Planned, rows: Tensor, seen: InputStatistics, inverse: Tensor
    ) -> tuple[Codes, float, float]:
        """Decide the codes of some rows of a layer, and let these be what the codes stand for.

        Returns:
            Codes, and the squared errors of the outputs that they and rounding to nearest have.
        """
        scheme, weight = find(layer.scheme), rows.detach().float().cpu()
        held = weight == 0 if keeps_zeros(layer.module) else None
        codes, pair = self._chosen(layer, weight, seen, held, inverse)
        groups, grid = groups_of(weight, codes.codes.shape[2]), codes.grid
        if bool((seen.squares == 0).any()):  # whose weights are in nearest's grid
            grid = self.fit(groups, weight.shape[1], scheme, layer.options)
        nearest = scheme.nearest(groups, grid, layer.options)
        plain = values_of(Codes(nearest, grid), scheme, layer.options, weight)
        most = _error(plain.sub_(weight), seen)
        values = values_of(codes, scheme, layer.options, weight)
        if pair is not None:
            values, self.pairs[layer.weight] = values + pair.product, pair
        error = _error(values - weight, seen)
        rows.copy_(values)
        return codes, error, most

    def _chosen(
        self, layer: Planned, weight: Tensor, seen: InputStatistics, held: Tensor | None, inverse: Tensor
    ) -> tuple[Codes, Joint | None]:
        """Return codes for `weight`, and a pair where the layer gets one."""
        scheme = find(layer.scheme)

        def decide(left: Tensor) -> Codes:
            kept = held if left is weight else None
            return gptq_codes(left, seen, scheme, layer.options, self.fit, kept, inverse)

        if layer.weight not in self.beside:
            return decide(weight), None
        low_rank = self.beside[layer.weight]
        metric = metric_of(low_rank, seen)
        values = partial(values_of, scheme=scheme, options=layer.options, weight=weight)
        pair = joint(weight, decide, values, low_rank, metric)
        return pair.codes, pair

    def tell(self) -> None:
        """Say in the details and warnings what was done."""
        self.ctx.details["gptq_error"] = {name: float(f"{value:.3g}") for name, value in self.left.items()}
        if self.unfed:
            self.ctx.details["dead_inputs"] = self.unfed
        if self.damped:
            most = max(self.damped, key=lambda name: self.damped[name])
            self.ctx.warn(
                "more-damping",
                f"gptq: the Hessians of {len(self.damped)} layers could only be inverted with more damping"
                f" (at most {self.damped[most]:g} of the mean diagonal, {most}). More calibration samples"
                " help.",
            )
        if self.unreached:
            self.ctx.warn(
                "uncalibrated-layers",
                f"No calibration sample reaches {', '.join(self.unreached)}; their weights are rounded to"
                " nearest.",
            )
        if few := few_tokens(self.fed, self.rows):
            self.ctx.warn(
                "few-calibration-tokens",
                f"{few}; results may overfit. Increase rows, or add data: {{calibration: FILE}}.",
            )


def _joined(parts: Sequence[Codes]) -> Codes:
    """Return the codes of all rows, of those of some."""
    if len(parts) == 1:
        return parts[0]
    grid = {name: torch.cat([part.grid[name] for part in parts]) for name in parts[0].grid}
    return Codes(torch.cat([part.codes for part in parts]), grid)


def _error(off: Tensor, found: InputStatistics) -> float:
    """Return the squared error of the outputs that weights have which are off by `off`, float32 [N, K]."""
    assert found.second is not None
    return float(((off @ found.second.float()) * off).sum())
