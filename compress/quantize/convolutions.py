"""`quantize` of a network of convolutions: what is rounded beside the layers themselves.

A convolution rounds what it reads. So that a runtime keeps codes from one to the next, what blocks add up and
what a max pool reads is rounded too (`runtime/layers/quantized_conv.py`). Batch norms are folded before, for
the codes are those of the folded kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn

from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.quantize.observed import Seen, seen_by
from smelt.compress.quantize.planned import Planned
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.stage import Context
from smelt.families.registry import family_of
from smelt.runtime.layers.low_rank_conv import ends_of
from smelt.runtime.layers.quantized_conv import Rounded
from smelt.runtime.models.structure import Edit, replace_module


@dataclass(frozen=True)
class Place:
    """Where states are rounded: before the module `name`.

    behind: the convolution that must be quantized for it to gain anything. reader: the convolution that reads
    the same states, whose range is taken; None where the place has its own.
    """

    name: str
    behind: str
    reader: str | None = None


def places_of(model: Any) -> list[Place]:
    """Return where a network of convolutions rounds states; its batch norms were folded."""
    family = family_of(model)
    if family is None or family.normed is None or family.chain is None:
        return []
    convolution, norm = family.normed
    found: list[Place] = []
    for name, module in model.named_modules():
        owner, _, last = name.rpartition(".")
        if last != family.chain:
            continue
        links = [f"{name}.{number}" for number, _ in module.named_children()]
        first, _ = ends_of(model, f"{links[0]}.{convolution}")
        _, end = ends_of(model, f"{links[-1]}.{convolution}")
        beside = f"{owner}.{family.beside}"
        if isinstance(model.get_submodule(beside), nn.Identity):
            found.append(Place(beside, first, reader=first))
        else:
            found.append(Place(f"{beside}.{norm}", ends_of(model, f"{beside}.{convolution}")[1]))
        found.append(Place(f"{links[-1]}.{norm}", end))
    return found + list(_pools(model))


def _pools(model: Any) -> list[Place]:
    """Return the max pools between two convolutions: what one hands on are values that it reads."""
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.MaxPool2d | nn.Conv2d)]
    return [
        Place(name, reader, reader)
        for (name, module), (reader, after) in pairwise(modules)
        if isinstance(module, nn.MaxPool2d) and isinstance(after, nn.Conv2d)
    ]


def observe_convolutions(
    model: Any,
    layers: Sequence[Planned],
    ranges: Mapping[int, float],
    rows: CalibrationRows,
    settings: QuantizeSettings,
    ctx: Context,
) -> tuple[list[Planned], dict[int, float], dict[str, Seen]]:
    """Look at what convolutions read, and at what is rounded beside them.

    Returns:
        The layers, those unsigned that read nothing negative; `ranges` with theirs; and by name what the
        places between them are fed.
    """
    convolutions = {layer.name: layer for layer in layers if isinstance(layer.module, nn.Conv2d)}
    if not convolutions:
        return list(layers), dict(ranges), {}
    places = [place for place in places_of(model) if place.behind in convolutions]
    own = {p.name: [model.get_submodule(p.name)] for p in places if p.reader not in convolutions}
    read = {name: [layer.module] for name, layer in convolutions.items()}
    seen = seen_by(model, read | own, {name: name for name in read | own}, rows, settings, ctx)
    signed = {name: found.signed for name, found in seen.items()}
    new = [replace(one, signed=signed.get(one.name, True)) for one in layers]
    found = {convolutions[name].weight: seen[name].largest for name in read if name in seen}
    between = {p.name: seen[p.reader if p.reader in convolutions else p.name] for p in places}
    return new, dict(ranges) | found, between


def round_between(model: Any, seen: Mapping[str, Seen]) -> list[Edit]:
    """Let `model` round states before the modules that `seen` names; return the edits that say so."""
    edits: list[Edit] = []
    for name, found in seen.items():
        new = Rounded(model.get_submodule(name), found.signed)
        new.set_range_(found.largest)
        replace_module(model, name, new.eval())
        edits.append({"op": "round", "module": name, "signed": found.signed})
    return edits
