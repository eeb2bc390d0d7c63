"""A large model is factorized from file to file, one block at a time.

Each block is looked at and run as it was, and its pairs are made when it is not run any more: so they are
those of the whole model, looked at at once. In memory are one block, what it is fed, and second moments of
its inputs, of which products of one input (queries, keys and values; up and gate) have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from smelt.compress.calibration.blocks import DrivenBlock, drive
from smelt.compress.calibration.rows import calibration_rows
from smelt.compress.calibration.statistics import Collector, InputStatistics, width_of
from smelt.compress.factorize.metrics import Metrics, few_of, require_finite, warn_of_few
from smelt.compress.factorize.ranks import rank_alone
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.svd import thin_pair
from smelt.core.artifact import Artifact
from smelt.core.stage import Context
from smelt.families.walk import Block, blocks_of
from smelt.runtime.models.streamed import StreamedModel
from smelt.runtime.models.structure import replace_layer


def can_stream(settings: FactorizeSettings) -> bool:
    """Say whether each layer's pair follows from that layer and its inputs alone."""
    return settings.targets == "layers" and settings.parameter_budget is None and settings.method != "fwsvd"


def all_inside(model: Any, names: Sequence[str]) -> bool:
    """Say whether all of these layers are in blocks."""
    places = tuple(f"{block.place}." for block in blocks_of(model))
    return all(name.startswith(places) for name in names)


def factorize_blocks(
    streamed: StreamedModel,
    names: Sequence[str],
    limits: Mapping[str, float],
    src: Artifact,
    settings: FactorizeSettings,
    ctx: Context,
) -> tuple[dict[str, int], list[str]]:
    """Factorize the layers `names` of `streamed`; every block is written, the rest is not yet.

    Args:
        streamed: whose blocks lie in a file.
        names: of layers in its blocks.
        limits: see `limits_of`.
        src: what is read; its rows are those of `ctx`.
        settings: without a budget.
        ctx: its details get ranks and errors.

    Returns:
        The rank of each layer, that which is asked for, and the layers that no row reaches.

    Raises:
        InputError: there are no rows, or a layer is fed what is not finite.
    """
    work = _Work(streamed, frozenset(names), limits, settings)
    if settings.reads_rows:
        rows = calibration_rows(
            streamed.model, src, settings.calibration_samples, ctx, "factorize", padded=True
        )
        ctx.details["calibration"] = {"origin": rows.origin, "rows": rows.rows, "tokens": rows.tokens}
        for step in drive(
            streamed.model, rows, ctx, stage="factorize", enter=streamed.enter, leave=work.leave
        ):
            work.look(step)
            require_finite(work.inputs, rows)
        warn_of_few(work.few, rows, ctx)
    else:
        for done, block in enumerate(blocks := blocks_of(streamed.model), start=1):
            streamed.enter(block)
            work.leave(block)
            ctx.progress(done, len(blocks), block.place)
    ctx.details.update(ranks=work.pairs, relative_error=work.errors)
    return work.ranks, work.unseen


def _first_readers(block: Block) -> dict[str, str]:
    """Return by product the first one of the block that is fed the very same states."""
    found: dict[str, str] = {}
    for part in block.attentions:
        own = (part.key, part.value) if part.cross else (part.query, part.key, part.value)
        found |= dict.fromkeys(own, own[0])
    feed = block.feed_forward
    return found if feed is None else found | dict.fromkeys(feed.inputs, feed.inputs[0])


@dataclass
class _Work:
    """What was made so far.

    inputs: what the layers of the current block are fed. ranks: of all layers; pairs: of those that became
    one; errors: theirs, relative. few: see `few_of`.
    """

    streamed: StreamedModel
    names: frozenset[str]
    limits: Mapping[str, float]
    settings: FactorizeSettings
    inputs: Mapping[str, InputStatistics] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    pairs: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    few: dict[str, tuple[int, int]] = field(default_factory=dict)

    def _layers(self, block: Block) -> dict[str, nn.Linear]:
        found = {f"{block.place}.{name}": module for name, module in block.module.named_modules()}
        return {name: module for name, module in found.items() if name in self.names}

    def look(self, step: DrivenBlock) -> None:
        """Look at what the layers of a block are fed; those of one input share what was seen."""
        first, layers = _first_readers(step.block), self._layers(step.block)
        keys = {name: first.get(name, name) for name in layers}
        observed = {key: self.streamed.model.get_submodule(key) for key in dict.fromkeys(keys.values())}
        second = self.settings.method != "asvd"
        collector = Collector({key: width_of(module) for key, module in observed.items()}, second=second)
        step.observe({key: [module] for key, module in observed.items()}, collector.see)
        self.inputs = {name: collector.found[key] for name, key in keys.items()}
        self.few |= few_of(self.inputs)

    def leave(self, block: Block) -> None:
        """Put pairs into `block`, which is not run any more, write it and forget it."""
        for name, layer in self._layers(block).items():
            metrics = Metrics(self.settings, inputs={name: self.inputs[name]} if self.inputs else {})
            if metrics.unseen:
                self.unseen.append(name)
                continue
            rank = self.ranks[name] = rank_alone(name, layer, metrics, self.settings)
            if rank < self.limits[name]:
                self._pair(name, layer, rank, metrics)
        self.inputs = {}
        self.streamed.leave(block)

    def _pair(self, name: str, layer: nn.Linear, rank: int, metrics: Metrics) -> None:
        known = metrics.decomposed(name, layer)
        pair, error = thin_pair(layer, rank, metrics.of(name, layer), known)
        edit = {"op": "low_rank", "module": name, "rank": rank}
        replace_layer(self.streamed.model, self.streamed.edits, name, pair, edit)
        self.pairs[name], self.errors[name] = rank, round(error, 4)
        layer.to("meta")  # whoever still holds the layer holds no weights
