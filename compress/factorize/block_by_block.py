"""Factorize a large model from file to file, one block at a time.

Each block is calibrated and run with its original weights, and factorized when it is not run any more: so
the result equals that of the whole model. Memory holds one block, its inputs, and second moments of the
inputs; linear layers with the same input (queries, keys and values; up and gate) share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from smelt.calibration.run_blocks import run_blocks, visit_blocks
from smelt.calibration.samples import load_calibration_samples
from smelt.calibration.sequential import RunningBlock
from smelt.calibration.statistics import InputStatistics, warn_of_few_tokens
from smelt.compress.factorize.ranks import choose_layer_rank
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.svd import (
    LayerMetrics,
    low_rank_layer,
    require_finite_inputs,
    token_counts,
)
from smelt.core.artifact import Artifact
from smelt.models.edits import replace_layer
from smelt.models.families.registry import Block, blocks_of
from smelt.models.streamed_model import StreamedModel
from smelt.stage import Context


def can_factorize_blockwise(settings: FactorizeSettings) -> bool:
    """Return whether the factors of each layer depend on that layer and its inputs only."""
    return not settings.of_embeddings and settings.parameter_budget is None and settings.method != "fwsvd"


def are_all_in_blocks(model: Any, names: Sequence[str]) -> bool:
    """Return whether all of these layers are in blocks."""
    prefixes = tuple(f"{block.module_path}." for block in blocks_of(model))
    return all(name.startswith(prefixes) for name in names)


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
        streamed: the model with its blocks in a file.
        names: of layers in its blocks.
        limits: see `rank_limits`.
        src: the step's input; the samples are those of `ctx`.
        settings: without a parameter budget.
        ctx: its details receive ranks and errors.

    Returns:
        The chosen rank of each layer, and the layers that no sample reaches.

    Raises:
        InputError: there are no samples, or the inputs of a layer are not finite.
    """
    state = _BlockwiseState(streamed, frozenset(names), limits, settings)
    if settings.needs_calibration:
        samples = load_calibration_samples(
            streamed.model,
            src,
            settings.calibration_samples,
            ctx,
            "factorize",
            padded=True,
            held_back=settings.method == "whitened-svd",
        )
        ctx.details["calibration"] = samples.details
        for step in run_blocks(streamed.model, samples, ctx, stage="factorize", offloaded=streamed):
            state.collect_statistics(step)
            require_finite_inputs(state.inputs, samples)
            step.run()
            state.factorize_block(step.block)
        warn_of_few_tokens(state.token_counts, samples, ctx)
    else:
        for block in visit_blocks(streamed.model, ctx, streamed):
            state.factorize_block(block)
    ctx.details.update(ranks=state.factorized, relative_error=state.errors)
    return state.ranks, state.uncalibrated


def _first_layer_by_input(block: Block) -> dict[str, str]:
    """Return, by linear layer, the first one of the block with the same input tensor."""
    first_layers: dict[str, str] = {}
    for attention in block.attentions:
        layers = (
            (attention.key, attention.value)
            if attention.cross
            else (attention.query, attention.key, attention.value)
        )
        first_layers |= dict.fromkeys(layers, layers[0])
    input_layers = [layer for part in block.feed_forwards for layer in part.input_layers]
    return first_layers | dict.fromkeys(input_layers, next(iter(input_layers), ""))


@dataclass
class _BlockwiseState:
    """Results so far.

    inputs: input statistics of the layers of the current block. ranks: of all layers. pairs: of factorized
    layers. errors: their relative errors. token_counts: see `svd.token_counts`.
    """

    streamed: StreamedModel
    names: frozenset[str]
    limits: Mapping[str, float]
    settings: FactorizeSettings
    inputs: Mapping[str, InputStatistics] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    factorized: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    uncalibrated: list[str] = field(default_factory=list)
    token_counts: list[tuple[int, int]] = field(default_factory=list)

    def _layers(self, block: Block) -> dict[str, nn.Linear]:
        modules = {f"{block.module_path}.{name}": module for name, module in block.module.named_modules()}
        return {name: module for name, module in modules.items() if name in self.names}

    def collect_statistics(self, step: RunningBlock) -> None:
        """Collect input statistics of the layers of a block; layers with the same input share them."""
        first_layers, layers = _first_layer_by_input(step.block), self._layers(step.block)
        keys = {name: first_layers.get(name, name) for name in layers}
        observed = {key: self.streamed.model.get_submodule(key) for key in dict.fromkeys(keys.values())}
        modules = {key: [module] for key, module in observed.items()}
        with step.collect(modules, second=self.settings.method != "asvd") as statistics:
            self.inputs = {name: statistics[key] for name, key in keys.items()}
        self.token_counts += token_counts(self.inputs)

    def factorize_block(self, block: Block) -> None:
        """Factorize the layers of `block`, which is not run any more."""
        for name, layer in self._layers(block).items():
            metrics = LayerMetrics(self.settings, inputs={name: self.inputs[name]} if self.inputs else {})
            if metrics.uncalibrated:
                self.uncalibrated.append(name)
                continue
            rank = self.ranks[name] = choose_layer_rank(name, layer, metrics, self.settings)
            if rank < self.limits[name]:
                self._factorize_layer(name, layer, rank, metrics)
        self.inputs = {}

    def _factorize_layer(self, name: str, layer: nn.Linear, rank: int, metrics: LayerMetrics) -> None:
        decomposition = metrics.decompose(name, layer)
        metric, judged = metrics.metric_of(name, layer), metrics.judged_metric_of(name, layer)
        pair, error = low_rank_layer(layer, rank, metric, decomposition, judged)
        edit = {"op": "low_rank", "module": name, "rank": rank}
        replace_layer(self.streamed.model, self.streamed.edits, name, pair, edit)
        self.factorized[name], self.errors[name] = rank, round(error, 4)
        layer.to("meta")  # frees the weights even if the layer is still referenced
