"""AWQ: input channels that are large on rows get finer steps, by scales that the model absorbs.

Lin et al. 2023, AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration,
arXiv:2306.00978, and its published code (llm-awq). Rounding W s and multiplying with X / s errs less than
rounding W, where s is large for the channels that matter. How scales are found is in channel_scales.py, where
they go in scale_places.py. The model is looked at once, as it is in float, and changed afterwards: what it
computes stays the same until codes are decided.

With `clip`, ranges are cut off where that errs less on what the scaled products are fed; not of queries and
keys, whose products with each other the error of either says little of (auto_clip.py leaves them out too).

Shapes: K = inputs of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.calibration.statistics import InputStatistics, collected, few_tokens
from smelt.compress.quantize.methods.channel_scales import Found, Product, clipped, searched_scales
from smelt.compress.quantize.methods.scale_places import Place, places_of
from smelt.compress.quantize.planned import Planned
from smelt.compress.quantize.smooth import TypeOf
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.families.walk import attentions_of
from smelt.runtime.models.structure import Edit
from smelt.runtime.schemes.registry import find
from smelt.runtime.schemes.scheme import Codes


class Scaled(NamedTuple):
    """What AWQ leaves: the layers, some under new names; edits of the model; codes by `Planned.weight`."""

    layers: list[Planned]
    edits: list[Edit]
    codes: dict[int, Codes]


def awq(
    model: Any, layers: Sequence[Planned], rows: CalibrationRows, clip: bool, kind: TypeOf, ctx: Context
) -> Scaled:
    """Scale the products among `layers` and what feeds them.

    Args:
        model: float32, in eval mode, on the CPU; changed in place, and computes what it did.
        layers: of it, as planned.
        rows: what it reads.
        clip: whether ranges are cut off too; else no codes are decided.
        kind: says what a tensor is stored in, by its names.
        ctx: gets the details and warnings.

    Raises:
        InputError: what a product is fed is not finite.
    """
    places, left = places_of(model, layers)
    names = [place.coded[0].name for place in places]
    firsts = {name: [place.coded[0].module] for name, place in zip(names, places, strict=True)}
    uncut = _scored(model) if clip else set()
    edits: list[Edit] = []
    codes: dict[int, Codes] = {}
    found: dict[str, Found] = {}
    unreached: list[str] = []
    with collected(model, rows, firsts, ctx) as seen:
        _require_finite([layer.name for layer in layers], seen, rows)
        # all are found before any is put: a product's rows are others once what it feeds has its scales
        for name, place in zip(names, places, strict=True):
            if seen[name].tokens:
                found[name] = _found(place, seen[name])
            else:
                unreached += [layer.name for layer in place.coded]
        scales = {
            name: place.put(model, found[name].scales, kind, edits)
            for name, place in zip(names, places, strict=True)
            if name in found and found[name].alpha > 0
        }
        for name, place in zip(names, places, strict=True):
            if clip and name in found:
                cut = [one for one in place.coded if one.name.removesuffix(".linear") not in uncut]
                codes |= _cut(cut, _moment(seen[name]), scales.get(name))
    _tell(places, names, found, ctx)
    ctx.details["awq_without_scales"] = left  # output layers, and matrices that others have too
    fed = [
        (seen[name].tokens, int(place.coded[0].module.in_features))
        for name, place in zip(names, places, strict=True)
    ]
    _warn(fed, unreached, rows, ctx)
    renamed = {layer.module: layer for place in places for layer in place.coded}
    return Scaled([renamed.get(one.module, one) for one in layers], edits, codes)


def _require_finite(order: list[str], seen: dict[str, InputStatistics], rows: CalibrationRows) -> None:
    """Refuse inputs that are not finite, and name the first of them in the model's order."""
    for name in sorted(seen, key=order.index):
        if not bool(seen[name].squares.isfinite().all()):
            raise InputError(
                f"quantize: {name}: on rows of {rows.origin} its inputs are not finite. The training"
                " before it has probably diverged.",
                code="non-finite-activations",
            )


def _found(place: Place, seen: InputStatistics) -> Found:
    magnitudes = place.shared((seen.magnitudes / seen.tokens).float())
    return searched_scales([_product(layer) for layer in place.coded], magnitudes, _moment(seen))


def _product(layer: Planned) -> Product:
    return Product(layer.module.weight.detach().float(), find(layer.scheme), layer.options)


def _moment(seen: InputStatistics) -> Tensor:
    assert seen.second is not None
    return seen.second.float()


def _cut(layers: Sequence[Planned], moment: Tensor, scales: Tensor | None) -> dict[int, Codes]:
    """Return the codes of products of one input, with the ends of ranges cut off."""
    if scales is not None:
        moment = moment / scales / scales[:, None]
    return {layer.weight: clipped(_product(layer), moment) for layer in layers}


def _scored(model: Any) -> set[str]:
    """Return the products that make queries and keys, and the halves of those that are low-rank pairs."""
    whole = [name for attention in attentions_of(model) for name in (attention.query, attention.key)]
    return {f"{name}{half}" for name in whole for half in ("", ".down", ".up")}


def _tell(places: Sequence[Place], names: Sequence[str], found: dict[str, Found], ctx: Context) -> None:
    """Say in the details which alpha each input got, what is left of the error, and where scales went."""
    ctx.details["awq_error"] = {name: float(f"{one.left:.3g}") for name, one in found.items()}
    ctx.details["awq_alpha"] = {name: one.alpha for name, one in found.items()}
    went: dict[str, int] = {"norm": 0, "product": 0, "factor": 0}
    for name, place in zip(names, places, strict=True):
        if name in found and found[name].alpha > 0:
            went[place.kind] += 1
    ctx.details["awq_scales_in"] = went


def _warn(fed: list[tuple[int, int]], unreached: list[str], rows: CalibrationRows, ctx: Context) -> None:
    if unreached:
        ctx.warn(
            "uncalibrated-layers",
            f"No calibration sample reaches {', '.join(unreached)}; their weights are rounded to nearest.",
        )
    if few := few_tokens(fed, rows):
        ctx.warn(
            "few-calibration-tokens",
            f"{few}; results may overfit. Increase rows, or add data: {{calibration: FILE}}.",
        )
