"""Where scales of input channels go: into what feeds the products, or into a factor before them.

    a norm that only the products read                   its weight and bias are divided
    a product that only they read, with nothing between  its rows and bias are divided
    anything else                                        the input is multiplied (`ScaledLinear`)

In all three the columns of the products are multiplied, so that the float model computes the same. A matrix
that is looked up in too, or belongs to other layers, keeps its columns. The output layer, the largest
product of all, gets no factor of its own.

Shapes: K = inputs of the products.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.quantize.planned import Planned, output_layer
from smelt.compress.quantize.smooth import Group, TypeOf, divide, group_of
from smelt.families.feeds import Feed, product_feeds
from smelt.families.norms import norm_feeds
from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.layers.scaled import ScaledLinear
from smelt.runtime.models.structure import Edit, names_of, replace_layer


@dataclass
class Place:
    """Products of one input that become codes, and where its scales go.

    coded: these products. norm: with all of its readers, where it takes the scales. maker: the product that
    does, with the part of its rows that `feed` says. Without either, the input is multiplied.
    """

    coded: list[Planned]
    norm: Group | None = None
    maker: nn.Linear | None = None
    feed: Feed = field(default_factory=lambda: Feed(()))

    @property
    def kind(self) -> str:
        """What takes the scales: norm, product, factor."""
        return "norm" if self.norm else "product" if self.maker else "factor"

    def shared(self, magnitudes: Tensor) -> Tensor:
        """Return `magnitudes`, float [K], equal in channels that have to share a scale: their mean."""
        if self.feed.repeats == 1:
            return magnitudes
        heads = magnitudes.reshape(-1, self.feed.repeats, self.feed.width)
        return heads.mean(dim=1, keepdim=True).expand_as(heads).flatten()

    def put(self, model: Any, scales: Tensor, kind: TypeOf, edits: list[Edit]) -> Tensor:
        """Divide the input by `scales`, float32 [K], and multiply the columns; return the scales as they are.

        Args:
            model: changed in place; `coded` too, where names change.
            scales: as wanted; what the types of norms and factors round off goes into the columns.
            kind: says what a tensor is stored in, by its names.
            edits: of the model; a factor adds its own.
        """
        if self.norm is not None:
            names = names_of(model)[model.get_submodule(self.norm.norm)]
            return divide(model, self.norm, scales, kind([f"{name}.weight" for name in names]))
        if self.maker is not None:
            self._divide_rows(self.maker, scales)
        else:
            scales = self._multiply(model, scales, kind, edits)
        with torch.no_grad():
            for layer in self.coded:
                layer.module.weight.mul_(scales)
        return scales

    @torch.no_grad()
    def _divide_rows(self, maker: nn.Linear, scales: Tensor) -> None:
        heads = scales.reshape(-1, self.feed.repeats, self.feed.width) if self.feed.repeats > 1 else None
        by_row = scales if heads is None else heads[:, 0].flatten()
        rows = slice(self.feed.start, self.feed.stop)
        maker.weight[rows].div_(by_row[:, None])
        if maker.bias is not None:
            maker.bias[rows].div_(by_row)

    def _multiply(self, model: Any, scales: Tensor, kind: TypeOf, edits: list[Edit]) -> Tensor:
        kept = kind([f"{layer.name}.factors" for layer in self.coded])
        factors = (1 / scales).to(kept).float()
        factors = factors.where(factors.isfinite() & (factors > 0), torch.ones(()))
        for at, layer in enumerate(self.coded):
            new = ScaledLinear(layer.module).train(layer.module.training)
            new.factors = nn.Parameter(factors.clone(), requires_grad=layer.module.weight.requires_grad)
            replace_layer(model, edits, layer.name, new, {"op": "scale", "module": layer.name})
            self.coded[at] = replace(layer, name=f"{layer.name}.linear")
        return 1 / factors


def places_of(model: Any, layers: Sequence[Planned]) -> tuple[list[Place], list[str]]:
    """Return the inputs of the products among `layers`, each product in one, and the products in none."""
    finder = _Finder(model, layers)
    found = [*finder.of_norms(), *finder.of_products()]
    return found, [layer.name for layer in layers if layer.product and layer.module not in finder.placed]


class _Finder:
    """The products that are to become codes, and which of them have a place already."""

    def __init__(self, model: Any, layers: Sequence[Planned]) -> None:
        self.model, self.names, self.head = model, names_of(model), output_layer(model)
        self.owners: dict[int, set[nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self.owners.setdefault(id(parameter), set()).add(module)
        self.coded = {layer.module: layer for layer in layers if layer.product and self._own(layer.module)}
        self.placed: set[nn.Module] = set()

    def of_norms(self) -> Iterator[Place]:
        """Yield a place for each norm that only products read."""
        for feed in norm_feeds(self.model):
            group = group_of(self.model, feed) if feed.foldable else None
            coded = self._take(group.products) if group else []
            if coded:
                yield Place(coded, norm=group)

    def of_products(self) -> Iterator[Place]:
        """Yield a place for each other input, as far as it is read by products that become codes."""
        feeds = [*product_feeds(self.model), *self._pairs()]
        feeds += [Feed((layer.name,)) for layer in self.coded.values()]
        for feed in feeds:
            readers = [_first(self.model.get_submodule(name)) for name in feed.readers]
            maker = self._maker(feed, readers)
            coded = self._take([m for m in readers if maker is not None or m is not self.head])
            if coded:
                yield Place(coded, maker=maker, feed=feed if maker is not None else Feed(feed.readers))

    def _pairs(self) -> Iterator[Feed]:
        for module, names in self.names.items():
            if isinstance(module, LowRankLinear):
                yield Feed((f"{names[0]}.up",), f"{names[0]}.down")

    def _take(self, modules: Collection[nn.Module]) -> list[Planned]:
        found = [self.coded[m] for m in modules if m in self.coded and m not in self.placed]
        self.placed |= {layer.module for layer in found}
        return found

    def _own(self, module: nn.Module) -> bool:
        """Say whether the weight of `module` is no other module's too."""
        return all(self.owners[id(p)] == {module} for p in module.parameters(recurse=False))

    def _maker(self, feed: Feed, readers: Sequence[nn.Module]) -> nn.Linear | None:
        """Return what gives the input of `readers` wherever these stand, where no other layer has a part."""
        found = None if feed.maker is None else _last(self.model.get_submodule(feed.maker))
        if not isinstance(found, nn.Linear):
            return None
        all_of_them = (found, *readers)
        if not all(type(m) is nn.Linear and self._own(m) for m in all_of_them):
            return None
        blocks = {tuple(sorted(_blocks(self.names[m]))) for m in all_of_them}
        return found if len(blocks) == 1 else None


def _blocks(names: Sequence[str]) -> Iterator[str]:
    """Yield of each name what stands up to its last number: the block that it is in."""
    for name in names:
        words = name.split(".")
        last = max((at for at, word in enumerate(words) if word.isdigit()), default=-1)
        yield ".".join(words[: last + 1])


def _first(module: nn.Module) -> nn.Module:
    """Return what reads the input of a layer."""
    return module.down if isinstance(module, LowRankLinear) else module


def _last(module: nn.Module) -> nn.Module:
    """Return what gives the output of a layer."""
    return module.up if isinstance(module, LowRankLinear) else module
