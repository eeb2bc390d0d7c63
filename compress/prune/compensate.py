"""Compensation: what remains of a product takes over, by least squares, what was lost with the cut inputs.

A product y = W x + b loses the inputs that a head or a neuron made. Of the weights W' for the kept inputs x_k
and the biases b' those are taken that come nearest to y on rows of data (He et al. 2017, Channel pruning,
arXiv:1707.06168, section 3.1: reconstruction with the kept channels; its ridge as in SparseGPT):

    minimise  sum |W x + b - W' x_k - b'|^2 + e |W' - W_k|^2
    W' = W_k + W_c M_ck (M_kk + e I)^-1          c: the inputs that go, M = X X^T
    b' = b + W m - W' m_k                         where there is a bias: M around the means m of the inputs

e is a small part of the mean of M_kk's diagonal; the larger it is, the nearer W' stays to the plain cut W_k,
which is what an input without variance keeps. Rows of W do not depend on each other, so of a factorized layer
the half that reads the inputs is refitted, and the product of both is the best there is. Where zeros of W
are to stay (sparsify), each row is fitted on its own places between them.

Shapes: N = outputs, K = inputs, k = kept ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from smelt.compress.calibration.blocks import DrivenBlock, drive, nothing
from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.calibration.statistics import InputStatistics, empty_statistics, few_tokens
from smelt.compress.prune.cut import cut_heads, cut_neurons
from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup, columns_of, path_of
from smelt.core.stage import Context
from smelt.families.walk import Block, blocks_of
from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.models.streamed import StreamedModel
from smelt.runtime.models.structure import Edit, keeps_zeros

if TYPE_CHECKING:
    from smelt.compress.quantize.requantize import CodesAside, Round

# Groups that lose units, with what says which of them stay, int64, rising.
Chosen: TypeAlias = Sequence[tuple[AttentionGroup | FeedForwardGroup, Callable[[], Tensor]]]
# The part of M's mean diagonal that is added to it.
DAMP = 0.01
# Of a refit between zeros: steps at most, and of the first residual what may be left.
_STEPS, _NEAR = 100, 1e-4


def cut_units(
    model: Any,
    edits: list[Edit],
    chosen: Chosen,
    rows: CalibrationRows | None,
    ctx: Context,
    streamed: StreamedModel | None = None,
    codes: CodesAside | None = None,
) -> dict[str, float]:
    """Take all other units out of the groups `chosen`; with `rows` refit what reads those that stay.

    Then the model is gone through block by block: a product is fitted on what it is fed behind all cuts
    before it, attentions before the feed-forward part.

    Args:
        model: float32, in eval mode, on the CPU; changed in place.
        edits: its structure, to which the cuts are appended.
        chosen: each group once.
        rows: what it is fitted on; None: nothing is.
        ctx: device, threads, progress; gets a warning where rows have fewer tokens than a product inputs.
        streamed: the model, where its blocks are read and written one by one.
        codes: what rounds a refitted product at once, where the model was quantized: what comes behind it is
            fitted on what its codes will give.

    Returns:
        What `refit` returns, by the name of the product, rounded.
    """
    enter, leave = (streamed.enter, streamed.leave) if streamed else (nothing, nothing)
    if rows is None:
        for block in blocks_of(model):
            enter(block)
            for group, stay in _of(block, chosen):
                _cut(model, edits, group, stay())
            leave(block)
        return {}
    left: dict[str, float] = {}
    fed: list[tuple[int, int]] = []
    for step in drive(model, rows, ctx, stage="prune", enter=enter, leave=leave):
        for group, stay in _of(step.block, chosen):
            name = group.parts.products[-1]
            found, whole = inputs_of(step, model, name), columns_of(model, name).weight.detach()
            kept = _cut(model, edits, group, stay())
            rounded = codes.rounding(model, path_of(model, name, "down")) if codes is not None else None
            left[name] = round(refit(model, name, whole, kept, found, rounded), 4)
            fed.append((found.tokens, len(kept)))
            del found, whole  # before the next ones are made
    if few := few_tokens(fed, rows):
        ctx.warn(
            "few-calibration-tokens",
            f"{few}, which are refitted; results may overfit. Increase rows, or add data:"
            f" {{calibration: FILE}}.",
        )
    return left


def _of(block: Block, chosen: Chosen) -> Chosen:
    """Return those of `chosen` that are parts of `block`, attentions first."""
    return [(group, stay) for group, stay in chosen if group.parts in block.parts]


def _cut(model: Any, edits: list[Edit], group: AttentionGroup | FeedForwardGroup, stay: Tensor) -> Tensor:
    """Cut one group; return the inputs of its last product that are left."""
    if isinstance(group, AttentionGroup):
        return cut_heads(model, edits, group, stay)
    return cut_neurons(model, edits, group, stay)


def inputs_of(step: DrivenBlock, model: nn.Module, name: str) -> InputStatistics:
    """Return the statistics of what the product `name` of the block is fed, as the block is now."""
    layer = columns_of(model, name)
    found = empty_statistics(layer.in_features, second=True, device=layer.weight.device.type)
    step.observe({name: [layer]}, lambda _, x: found.see(x))
    return found.to("cpu")


@torch.no_grad()
def refit(
    model: Any,
    name: str,
    whole: Tensor,
    kept: Tensor,
    found: InputStatistics,
    rounded: Round | None = None,
) -> float:
    """Give the product `name`, whose inputs `kept` are all that it has now, the weights that fit best.

    Args:
        model: changed in place.
        name: of a linear layer, or of a factorized one.
        whole: the weight that it had before the cut, float [N, K]; of a pair that of the half `down`.
        kept: the places of the inputs that stayed, int64 [k], rising.
        found: what it was fed before the cut, with its second moment [K, K].
        rounded: what weights become where the product is of codes. Rounding a refit may cost more than the
            refit gains (few bits); then the weights are those of the plain cut, and the bias alone is fitted.

    Returns:
        The part of what the cut lost (of the squared error on these rows) that is still lost, 0 to 1; 1 where
        nothing was fed to it.
    """
    layer, owner = columns_of(model, name), bias_owner(model.get_submodule(name))
    moment = found.second if owner.bias is None else found.centred()
    assert moment is not None
    gone = torch.ones(found.width, dtype=torch.bool)
    gone[kept] = False
    old = whole.detach().double().cpu()
    if keeps_zeros(layer):
        fitted = between_zeros(old, moment, kept, gone)
    else:
        fitted = least_squares(old, moment, kept, gone)
    lost = _error(old[:, gone], moment[gone][:, gone])

    def off(weight: Tensor) -> float:
        left = old.clone()
        left[:, kept] -= weight
        return _error(left, moment)

    if rounded is not None:
        seen = _of_inputs(found, kept)
        fitted = min((rounded(one, seen).double() for one in (old[:, kept], fitted)), key=off)
    left = off(fitted)
    layer.weight.copy_(fitted)
    if owner.bias is not None:
        mean = found.sums / max(1, found.tokens)
        shift = old @ mean - fitted @ mean[kept]
        if owner is not layer:
            shift = owner.weight.double().cpu() @ shift
        owner.bias.add_(shift.to(owner.bias))
    return min(1.0, left / lost) if lost > 0 else 1.0


def _of_inputs(found: InputStatistics, places: Tensor) -> InputStatistics:
    """Return the statistics of some inputs alone, int64 [k]."""
    assert found.second is not None
    return replace(
        found,
        sums=found.sums[places],
        squares=found.squares[places],
        magnitudes=found.magnitudes[places],
        lowest=found.lowest[places],
        highest=found.highest[places],
        second=found.second[places][:, places],
    )


def least_squares(weight: Tensor, moment: Tensor, kept: Tensor, gone: Tensor) -> Tensor:
    """Return W', float64 [N, k], from W [N, K], M [K, K], the places kept and a mask of those that go."""
    within, wanted = _equations(weight, moment, kept, gone)
    if not float(within.diagonal().max()) > 0:  # nothing was ever fed to it
        return weight[:, kept]
    solved: Tensor = torch.linalg.solve(within, wanted.t())
    return weight[:, kept] + solved.t()


def between_zeros(weight: Tensor, moment: Tensor, kept: Tensor, gone: Tensor) -> Tensor:
    """Return the same where each row of W [N, K] keeps its own zeros.

    Every row has other equations then: all are solved at once by conjugate gradients (Hestenes & Stiefel
    1952), scaled by the diagonal, on the places that are not zero. They begin at the plain cut and come
    nearer with each step, so that few steps are never worse than it.
    """
    within, wanted = _equations(weight, moment, kept, gone)
    diagonal = within.diagonal()
    if not float(diagonal.max()) > 0:
        return weight[:, kept]
    free = weight[:, kept] != 0
    change, off = torch.zeros_like(wanted), wanted * free
    scaled = off / diagonal
    along, size = scaled.clone(), (off * scaled).sum(dim=1, keepdim=True)
    enough = _NEAR**2 * size
    for _ in range(_STEPS):
        if bool((size <= enough).all()):
            break
        turned = (along @ within) * free
        step = size / (along * turned).sum(dim=1, keepdim=True).clamp(min=1e-300)
        change += step * along
        off -= step * turned
        scaled = off / diagonal
        before, size = size, (off * scaled).sum(dim=1, keepdim=True)
        along = scaled + size / before.clamp(min=1e-300) * along
    return weight[:, kept] + change


def _equations(weight: Tensor, moment: Tensor, kept: Tensor, gone: Tensor) -> tuple[Tensor, Tensor]:
    """Return M_kk + e I, float64 [k, k], and W_c M_ck [N, k]."""
    within = moment[kept][:, kept]
    within.diagonal().add_(DAMP * float(within.diagonal().mean()))
    return within, weight[:, gone] @ moment[gone][:, kept]


def _error(weight: Tensor, moment: Tensor) -> float:
    return max(0.0, float(((weight @ moment) * weight).sum()))


def bias_owner(module: nn.Module) -> nn.Linear:
    """Return the layer that adds the bias of a product: itself, or the half `up` of a pair."""
    found = module.up if isinstance(module, LowRankLinear) else module
    assert isinstance(found, nn.Linear)
    return found
