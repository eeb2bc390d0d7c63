"""What is left of narrower hidden states takes over, by least squares on rows, what went with the channels.

Block by block, encoder first, the narrower model is run beside the whole one. What a product W x + b read of
the whole states x it reads of the narrow ones x', behind all that was fitted before it:

    minimise  sum |W x + b - W' x' - b'|^2 + e |W' - W_k|^2
    W' = W_k + (W M_xx' - W_k M_x'x') (M_x'x' + e I)^-1

M are second moments, around the means where there is a bias; k are the channels that stay; e is 1 % of the
mean of M_x'x''s diagonal. A norm whose result is the hidden states (post-norm, an opening or closing norm)
gets the scale and shift of each channel that bring it nearest to what the whole model's norm gave. A matrix
stays as it was cut where it is a table too (a tied head), where zeros of it are to stay, and where blocks
share it and it was fitted already.

Shapes: T = tokens, D = channels before, k = after, N = outputs of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from smelt.compress.calibration.blocks import DrivenBlock, drive
from smelt.compress.calibration.observe import observe
from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.prune.compensate import DAMP, bias_owner
from smelt.compress.prune.groups import columns_of
from smelt.core.stage import Context
from smelt.families.family import Attention, FeedForward
from smelt.families.norms import is_norm
from smelt.families.registry import family_of
from smelt.families.walk import Block, head_of
from smelt.runtime.models.structure import keeps_zeros


@dataclass(frozen=True)
class Norm:
    """A norm whose result is the hidden states."""

    name: str


@dataclass(frozen=True)
class Reader:
    """Products that read the same states. of_encoder: what an encoder gave."""

    names: tuple[str, ...]
    of_encoder: bool = False


Point: TypeAlias = Norm | Reader
# Tokens whose states are kept to fit a product on.
MOST_TOKENS = 32768


def refit_readers(
    whole: Any, cut: Any, keep: Tensor, rows: CalibrationRows, ctx: Context
) -> dict[str, float]:
    """Fit the products of `cut` that read its hidden states, and the norms that give them, to `whole`.

    Args:
        whole: the model before, float32, in eval mode, on the CPU; it is not changed.
        cut: the same with the channels `keep` alone; changed in place.
        keep: int64 [k], rising.
        rows: what both read.
        ctx: device, threads, progress.

    Returns:
        By product, the part of what the cut lost (of the squared error on these rows) that is still lost.
    """
    fit = _Fit(whole, cut, keep, rows, ctx)
    blocks = zip(drive(whole, rows, ctx, stage="prune"), drive(cut, rows, ctx, stage="prune"), strict=True)
    for before, after in blocks:
        fit.block(before, after)
    fit.end()
    return {name: round(value, 4) for name, value in fit.left.items()}


class _Fit:
    """What is fitted so far of a narrower model, beside the whole one."""

    def __init__(self, whole: Any, cut: Any, keep: Tensor, rows: CalibrationRows, ctx: Context) -> None:
        self.models, self.keep, self.rows, self.ctx = (whole, cut), keep, rows, ctx
        self.stride = max(1, -(-rows.tokens // MOST_TOKENS))
        self.left: dict[str, float] = {}
        self.done: set[nn.Module] = set()
        self.tables = {id(p) for m in cut.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        self.encoded: tuple[Tensor, Tensor] | None = None  # what keys and values of cross-attention read

    def block(self, before: DrivenBlock, after: DrivenBlock) -> None:
        """Fit one block, part by part; of the whole model it is run once."""
        points = _points(after.block)
        whole = self._seen(0, points, before)
        behind: Tensor | None = None  # what the last norm gives, which the next part reads as it is
        for point in points:
            if isinstance(point, Norm):
                made = self.norm(point, whole[point], after)
                behind = None if after.block.stack.stream.norms_first else made
            elif point.of_encoder:
                if self.encoded is None:
                    self.encoded = whole[point], self._seen(1, [point], after)[point]
                self.products(point, *self.encoded)
            else:
                wanted = whole[point]
                # of products that later blocks compute with too, all uses are looked at
                if behind is not None and len(behind) == len(wanted):
                    found = behind
                else:
                    found = self._seen(1, [point], after)[point]
                self.products(point, wanted, found)

    def end(self) -> None:
        """Fit what stands behind the last block: its norm, and the head."""
        model = self.models[1]
        family: Any = family_of(model)
        closing = family.stacks(model.config.to_dict())[-1].stream.closing
        if closing:
            point = Norm(closing)
            self.norm(point, self._seen(0, [point], None)[point], None)
        for name in head_of(model)[:1]:
            reader = Reader((name,))
            if not is_norm(model, name) and self._can_be_fitted(name):
                self.products(reader, *(self._seen(at, [reader], None)[reader] for at in (0, 1)))

    def norm(self, point: Norm, wanted: Tensor, run: DrivenBlock | None) -> Tensor | None:
        """Fit a norm; return what it gives now, None where nothing was looked at."""
        module: Any = self.models[1].get_submodule(point.name)
        if module in self.done or not is_norm(self.models[1], point.name):
            return None
        self.done.add(module)
        family: Any = family_of(self.models[1])
        found = self._seen(1, [point], run)[point]
        return fit_norm(module, wanted[:, self.keep], found, family.rms_norm.plus_one)

    def products(self, point: Reader, wanted: Tensor, found: Tensor) -> None:
        """Fit products that read `found` where those of the whole model read `wanted`."""
        for name in point.names:
            if self._can_be_fitted(name):
                old = columns_of(self.models[0], name).weight.detach()
                self.left[name] = refit_reader(self.models[1], name, old, wanted, found)
                self.done.add(self.models[1].get_submodule(name))

    def _can_be_fitted(self, name: str) -> bool:
        layer = columns_of(self.models[1], name)
        met = self.models[1].get_submodule(name) in self.done
        return not (met or keeps_zeros(layer) or id(layer.weight) in self.tables)

    def _seen(self, number: int, points: Sequence[Point], run: DrivenBlock | None) -> dict[Point, Tensor]:
        """Return what one model's readers are given, and norms give, at some points, float32 [T, width]."""
        model, found = self.models[number], {str(at): list[Tensor]() for at in range(len(points))}
        modules = [_module(model, point) for point in points]

        def see(key: str, x: Tensor) -> None:
            found[key].append(x[:: self.stride].float().cpu())

        layers = {str(at): [module] for at, module in enumerate(modules)}
        if run is not None:
            run.observe(layers, see)
        else:
            observe(model, self.rows, layers, see, self.ctx)
        seen: dict[Point, Tensor] = {}
        for at, point in enumerate(points):
            x = torch.cat(found[str(at)])
            # norms compute each token alone, so that what they give is found behind the run
            seen[point] = _applied(modules[at], x) if isinstance(point, Norm) else x
        return seen


def _module(model: Any, point: Point) -> nn.Module:
    if isinstance(point, Reader):
        return columns_of(model, point.names[0])
    found: nn.Module = model.get_submodule(point.name)
    return found


@torch.no_grad()
def _applied(norm: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = norm(x.to(next(norm.parameters()).device))
    return made.float().cpu()


def _points(block: Block) -> list[Point]:
    """Return what is fitted of a block, in the order in which it computes."""
    stack, found = block.stack, list[Point]()
    if block.number == 0 and stack.stream.opening:
        found.append(Norm(stack.stream.opening))
    parts: list[Attention | FeedForward] = [*stack.attentions, stack.feed_forward]
    for number, kind in enumerate(parts):
        part = kind.under(block.place)
        if part in block.parts:
            if isinstance(part, Attention) and part.cross:
                found += [Reader((part.query,)), Reader((part.key, part.value), of_encoder=True)]
            else:
                found.append(Reader(part.products[:-1]))
        if not stack.stream.norms_first:
            found.append(Norm(f"{block.place}.{stack.stream.norms[number]}"))
    return found


@torch.no_grad()
def fit_norm(module: Any, wanted: Tensor, found: Tensor, plus_one: bool = False) -> Tensor:
    """Scale, and shift where it has a bias, each channel of a norm so that `found` comes nearest to `wanted`.

    Args:
        module: changed in place.
        wanted: what it is to give, float32 [T, k].
        found: what it gives, of the same tokens.
        plus_one: it multiplies with 1 + weight.

    Returns:
        What it gives now, float32 [T, k].
    """
    bias = getattr(module, "bias", None)
    x, y = found.double(), wanted.double()
    zero = torch.zeros_like(x[0])
    mean_x, mean_y = (x.mean(dim=0), y.mean(dim=0)) if bias is not None else (zero, zero)
    x, y = x - mean_x, y - mean_y
    spread = x.square().mean(dim=0)
    ridge = DAMP * spread.mean()
    scale = ((x * y).mean(dim=0) + ridge) / (spread + ridge) if float(ridge) > 0 else torch.ones_like(spread)
    one = 1.0 if plus_one else 0.0
    module.weight.copy_((module.weight.double().cpu() + one) * scale - one)
    if bias is not None:
        module.bias.copy_(bias.double().cpu() * scale + mean_y - mean_x * scale)
    return (x * scale + mean_y).float()


@torch.no_grad()
def refit_reader(model: Any, name: str, old: Tensor, wanted: Tensor, found: Tensor) -> float:
    """Give the product `name`, which reads narrower states now, the weights that fit best.

    Args:
        model: the narrower one, changed in place.
        name: of a linear layer, or of a factorized one.
        old: the weight before the cut, float [N, D]; of a pair that of the half `down`.
        wanted: what it read before, float32 [T, D].
        found: what it reads now, of the same tokens, float32 [T, k].

    Returns:
        The part of the squared error of the plain cut that is left, 0 to 1; 1 where there was none.
    """
    layer, owner = columns_of(model, name), bias_owner(model.get_submodule(name))
    cut, old = layer.weight.detach().double().cpu(), old.double().cpu()
    x = found.double()
    off = (wanted.double() @ old.t()).sub_(x @ cut.t())  # what the plain cut is off by
    lost = float(off.square().sum())
    mean_x, mean_off = x.mean(dim=0), off.mean(dim=0)
    if owner.bias is not None:
        x, off = x.sub_(mean_x), off.sub_(mean_off)
    within = x.t() @ x
    within.diagonal().add_(DAMP * float(within.diagonal().mean()))
    if not float(within.diagonal().max()) > 0:
        return 1.0
    change = torch.linalg.solve(within, x.t() @ off).t()
    layer.weight.copy_(cut + change)
    if owner.bias is not None:
        shift = mean_off - change @ mean_x
        if owner is not layer:
            shift = owner.weight.double().cpu() @ shift
        owner.bias.add_(shift.to(owner.bias))
    left = float(off.sub_(x @ change.t()).square().sum())
    return min(1.0, left / lost) if lost > 0 else 1.0
