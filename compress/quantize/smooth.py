"""SmoothQuant: outliers of activations move from what a norm gives into the weights that read it.

Xiao et al. 2023, SmoothQuant, arXiv:2211.10438, equation 4. For the products that read one norm, and each
channel j of what it gives (X, seen on rows of data; W, the products' weights, one below the other):

    s_j = max |X_j| ^ alpha / max |W_j| ^ (1 - alpha)

The norm's weight and bias are divided by s, the columns of the products multiplied by it, so that the float
model computes the same and nothing is added to its graph. That needs a norm whose readers are these products
and nothing else (`families/norms.py`): of post-norm blocks the sum reads it too. A channel without
activations or without weights is left alone, where the formula has no value.

Norms are written back in the type that they were stored in. What that rounds off goes into s, so that norm
and columns fit exactly.

Shapes: K = channels that a norm gives, N = outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.calibration.observe import observe
from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.quantize.planned import Planned
from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.core.stage import Context
from smelt.families.norms import NormFeed, norm_feeds
from smelt.families.registry import family_of
from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.layers.shared import SharedLinear
from smelt.runtime.models.structure import names_of
from smelt.runtime.schemes.registry import SCHEMES

# What a norm is stored in, by all of its weight's names.
TypeOf = Callable[[Sequence[str]], torch.dtype]
# norms that a warning names
_NAMED = 3


@dataclass(frozen=True)
class Group:
    """A norm, the layers that are handed what it gives, and the matrices [N, K] that multiply it."""

    norm: str
    readers: list[nn.Module]
    products: list[nn.Linear]


def smooth(
    model: Any, layers: Collection[Planned], rows: CalibrationRows, alpha: float, kind: TypeOf, ctx: Context
) -> None:
    """Smooth every group of `model` whose products become codes with one scale for their activations.

    `ctx.details["smoothed"]` says by norm how far its largest channel stood above the median one, before and
    after; `ctx.warnings` which norms were left as they are.

    Args:
        model: in eval mode; norms and products are changed in place.
        layers: of it, that will be quantized.
        rows: what the model reads.
        alpha: how much of the outliers goes into the weights, 0 to 1.
        kind: says what a norm's weight is stored in.
        ctx: its `progress` is told.

    Raises:
        InputError: activations are not finite.
    """
    rounded = {layer.module for layer in layers if layer.product and SCHEMES[layer.scheme].one_scale}
    feeds = [feed for feed in norm_feeds(model) if rounded & set(group_of(model, feed).products)]
    groups = [group_of(model, feed) for feed in feeds if feed.foldable]
    largest = _largest(model, rows, groups, ctx) if groups else {}
    names = names_of(model)
    details: dict[str, dict[str, float]] = {}
    for group in groups:
        if group.norm not in largest:
            continue
        seen = largest[group.norm]
        weights = torch.stack([p.weight.detach().abs().amax(dim=0) for p in group.products if p in rounded])
        norm = model.get_submodule(group.norm)
        wanted = scales(seen, weights.amax(dim=0), alpha)
        done = divide(model, group, wanted, kind([f"{name}.weight" for name in names[norm]]))
        details[group.norm] = {"outliers_before": _outliers(seen), "outliers_after": _outliers(seen / done)}
    ctx.details["smoothed"] = details
    ctx.warnings.extend(_left(feeds, details))


def scales(activations: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Return s, float32 [K], from the largest magnitudes of each channel; 1 where either is 0."""
    there = (activations > 0) & (weights > 0)
    return (activations**alpha / weights ** (1 - alpha)).where(there, torch.ones(()))


def follow(floats: Any, model: Any) -> None:
    """Smooth `floats`, in place, as the quantized `model` that was made of it is.

    What the norms were divided by is what their weights tell.
    """
    for feed in norm_feeds(floats):
        if feed.foldable:
            move(floats, group_of(floats, feed), model.get_submodule(feed.norm).weight.detach())


def group_of(model: Any, feed: NormFeed) -> Group:
    """Return the norm of `feed` with what reads it."""
    readers = list(dict.fromkeys(model.get_submodule(name) for name in feed.readers))
    products = [first for reader in readers for first in _firsts(reader)]
    return Group(feed.norm, readers, products)


def _firsts(reader: Any) -> list[Any]:
    """Return the products that multiply what `reader` is handed."""
    if isinstance(reader, SharedLinear):
        return [*_firsts(reader.shared), reader.difference.down]
    return [reader.down if isinstance(reader, LowRankLinear) else reader]


def one_of(model: Any) -> float:
    """Return what the model's norms add to their weight."""
    family = family_of(model)
    return 1.0 if family is not None and family.rms_norm.plus_one else 0.0


def _largest(model: Any, rows: CalibrationRows, groups: Sequence[Group], ctx: Context) -> dict[str, Tensor]:
    """Return the largest magnitude of each channel, float32 [K], by norm; nothing of what no row reaches.

    Raises:
        InputError: one is not finite.
    """
    found: dict[str, Tensor] = {}

    def see(norm: str, x: Tensor) -> None:
        if len(x):
            here = x.abs().amax(dim=0)
            found[norm] = torch.maximum(found[norm], here) if norm in found else here

    observe(model, rows, {group.norm: group.readers for group in groups}, see, ctx)
    for norm, largest in found.items():
        if not bool(largest.isfinite().all()):
            raise InputError(
                f"quantize: {norm}: on rows of {rows.origin} what it gives is not finite. The training before"
                " it has probably gone astray.",
                code="non-finite-activations",
            )
    return {norm: largest.clone() for norm, largest in found.items()}


@torch.no_grad()
def divide(model: Any, group: Group, scales: Tensor, kept: torch.dtype) -> Tensor:
    """Divide what the norm of `group` gives by `scales`, float32 [K], as near as its type `kept` allows.

    Returns:
        What it was divided by, and the columns of its readers multiplied with.
    """
    norm, one = model.get_submodule(group.norm), one_of(model)
    divided = (norm.weight + one) / scales - one
    return move(model, group, divided.to(kept).float())


@torch.no_grad()
def move(model: Any, group: Group, weight: Tensor) -> Tensor:
    """Give the norm `weight`, float32 [K], and its readers what it lost; return by what it was divided.

    Channels stay as they are whose weight is 0, or would be 0 or infinite.
    """
    norm, one = model.get_submodule(group.norm), one_of(model)
    exact = (norm.weight + one) / (weight + one)
    moved = exact.isfinite()
    done: Tensor = exact.where(moved, torch.ones(()))
    norm.weight.copy_(weight.where(moved, norm.weight))
    if getattr(norm, "bias", None) is not None:
        norm.bias.div_(done)
    for product in group.products:
        product.weight.mul_(done)
    return done


def _outliers(largest: Tensor) -> float:
    """Return how far the largest channel stands above the median one; 0 where that one has no values."""
    middle = float(largest.median())
    return round(float(largest.max()) / middle, 2) if middle else 0.0


def _left(feeds: Sequence[NormFeed], smoothed: Collection[str]) -> list[Message]:
    """Return what to say of the norms that were left as they are."""
    reasons: dict[str, list[str]] = {}
    for feed in feeds:
        if feed.norm not in smoothed:
            if feed.foldable:
                why = "no row reaches them"
            elif feed.only:
                why = "the weights of what reads them are those of other layers too"
            else:
                why = "something else reads what they give (in post-norm blocks the sum that follows)"
            reasons.setdefault(why, []).append(feed.norm)
    if not feeds:
        return [
            warning(
                "nothing-smoothed",
                "smoothquant_alpha: no norm is followed by a quantized linear layer; nothing is smoothed.",
                setting="smoothquant_alpha",
            )
        ]
    return [
        warning(
            "norms-not-smoothed",
            f"smoothquant_alpha: {len(norms)} of {len(feeds)} norms are unchanged, because {why}:"
            f" {_some(norms)}.",
            setting="smoothquant_alpha",
        )
        for why, norms in reasons.items()
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
