"""Make layers sparse by a method, on the statistics of their inputs.

Shapes: N = outputs, K = inputs.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Generator, nn

from smelt.calibration.samples import CalibrationSamples, ObserveInputs
from smelt.calibration.statistics import (
    InputStatistics,
    StatisticsCollector,
    input_width,
    warn_of_few_tokens,
)
from smelt.compress.sparsify.methods.registry import SparsityMethod
from smelt.compress.sparsify.pattern import SparsityInput, SparsityPattern
from smelt.core.errors import InputError
from smelt.models.edits import is_masked, mark_masked
from smelt.models.families.registry import Block
from smelt.models.layers import component_layers
from smelt.stage import Context


def linear_layer_names(block: Block, targets: Collection[str]) -> list[str]:
    """Return the names of the linear layers in the selected parts of `block`, of any module type."""
    names = [n for part in block.attentions for n in part.linear_layers] if "attention" in targets else []
    feed_forwards = block.feed_forwards if "ffn" in targets else ()
    return names + [layer for part in feed_forwards for layer in part.linear_layers]


def linear_layers(model: nn.Module, block: Block, targets: Collection[str]) -> dict[str, nn.Linear]:
    """Return the linear layers in the selected parts of `block` by name; of a composed one its parts."""
    layers: dict[str, nn.Linear] = {}
    for name in linear_layer_names(block, targets):
        parts = component_layers(model.get_submodule(name), name)
        layers |= {layer_name: layer for layer_name, layer in parts.items() if isinstance(layer, nn.Linear)}
    return layers


class Sparsifier:
    """Makes layers sparse and counts zeros.

    Args:
        model: the model with the layers.
        method: chooses the zeros.
        pattern: number and positions of zeros.
        draw: generator of random numbers.
    """

    def __init__(
        self, model: nn.Module, method: SparsityMethod, pattern: SparsityPattern, draw: Generator
    ) -> None:
        self._model, self._method, self._pattern, self._draw = model, method, pattern, draw
        self._function = method.load()
        self._seen: set[nn.Module] = set()
        self._zeros: dict[str, float] = {}
        self._counts = [0, 0]  # zeros, weights
        self._odd: list[str] = []
        self._unreached: list[str] = []
        self._fed: list[tuple[int, int]] = []

    @torch.no_grad()
    def sparsify(self, layers: dict[str, nn.Linear], observe: ObserveInputs | None) -> None:
        """Make `layers` sparse in place, except those done before; `observe` provides their inputs."""
        new_layers = {name: m for name, m in layers.items() if m not in self._seen}
        self._seen.update(new_layers.values())
        self._odd += [name for name, m in new_layers.items() if not self._pattern.fits(m.in_features)]
        fitting = {name: m for name, m in new_layers.items() if self._pattern.fits(m.in_features)}
        statistics = self._collect_statistics(fitting, observe)
        for name, layer in fitting.items():
            layer_statistics = statistics.pop(name, None)  # frees its second moment
            if layer_statistics is not None and not layer_statistics.tokens:
                self._unreached.append(name)
                continue
            if layer_statistics is not None:
                self._fed.append((layer_statistics.tokens, layer.in_features))
            weight = layer.weight.detach().float().cpu()
            zeros = weight == 0 if is_masked(layer) else None  # it is already sparse
            sparse = self._function(SparsityInput(weight, layer_statistics, zeros), self._pattern, self._draw)
            layer.weight.copy_(sparse)
            mark_masked(layer)
            num_zeros = int((layer.weight == 0).sum())
            self._counts = [self._counts[0] + num_zeros, self._counts[1] + weight.numel()]
            self._zeros[name] = round(num_zeros / weight.numel(), 4)

    def _collect_statistics(
        self, layers: dict[str, nn.Linear], observe: ObserveInputs | None
    ) -> dict[str, InputStatistics]:
        if observe is None or not layers:
            return {}
        widths = {name: input_width(layer) for name, layer in layers.items()}
        device = next(iter(layers.values())).weight.device.type
        collector = StatisticsCollector(widths, second=self._method.needs == "moments", device=device)
        observe({name: [layer] for name, layer in layers.items()}, collector.update)
        for name, statistics in collector.statistics.items():
            if not bool(statistics.squares.isfinite().all()):
                raise InputError(
                    f"sparsify: {name}: the layer's inputs are not finite. The training before this"
                    " step has probably diverged; lower its learning_rate.",
                    code="non-finite-activations",
                )
        return {name: statistics.to("cpu") for name, statistics in collector.statistics.items()}

    def report(self, samples: CalibrationSamples | None, ctx: Context) -> None:
        """Report results in the details and warnings of `ctx`.

        Raises:
            InputError: no layer could be made sparse.
        """
        if not self._zeros:
            reason = (
                f"their input sizes are not multiples of {self._pattern.group}"
                if self._odd
                else "none is a linear layer"
            )
            raise InputError(
                f"sparsify: no layer of the blocks can be made sparse: {reason}. Remove the stage.",
                code="no-layer-selected",
            )
        share = self._counts[0] / self._counts[1]
        ctx.details["sparsity"] = round(share, 4)
        ctx.details["zeros"] = self._counts[0]
        ctx.details["sparsity_by_layer"] = self._zeros
        ctx.warn(
            "zeros-not-faster",
            f"{share:.1%} of the weights of {len(self._zeros)} layers are zero. They are still stored"
            " and multiplied, so the model is neither smaller nor faster.",
        )
        if self._odd:
            ctx.warn(
                "pattern-does-not-fit",
                f"{len(self._odd)} layers are unchanged, because their input sizes are not multiples"
                f" of {self._pattern.group}: {', '.join(self._odd[:3])}.",
            )
        if self._unreached:
            ctx.warn(
                "uncalibrated-layers",
                f"No calibration sample reaches {', '.join(self._unreached)}; these layers are"
                " unchanged. Add calibration samples that use them.",
            )
        if samples is not None and self._method.needs == "moments":
            warn_of_few_tokens(self._fed, samples, ctx)
