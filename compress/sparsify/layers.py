"""The linear layers of a block, made sparse one by one, each once."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Generator, nn

from smelt.compress.calibration.observe import Layers, See
from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.calibration.statistics import Collector, InputStatistics, few_tokens, width_of
from smelt.compress.sparsify.method import Method
from smelt.compress.sparsify.pattern import Pattern
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.families.walk import Block
from smelt.runtime.layers.shared import parts_of
from smelt.runtime.models.structure import keep_zeros, keeps_zeros

# Runs a block on all rows and shows what layers are fed.
Observe = Callable[[Layers, See], None]


def products_of(block: Block, what: Collection[str]) -> list[str]:
    """Return the names of the products of the chosen parts of `block`, whatever they are made of."""
    names = [n for part in block.attentions for n in part.products] if "attention" in what else []
    feed = block.feed_forward if "ffn" in what else None
    return names + list(feed.products if feed is not None else ())


def layers_of(model: nn.Module, block: Block, what: Collection[str]) -> dict[str, nn.Linear]:
    """Return the linear layers of the chosen parts of `block` by their names; of a divided one its parts."""
    found: dict[str, nn.Linear] = {}
    for name in products_of(block, what):
        parts = parts_of(model.get_submodule(name), name)
        found |= {part: layer for part, layer in parts.items() if isinstance(layer, nn.Linear)}
    return found


class Sparsifier:
    """Makes layers sparse and keeps count.

    Args:
        model: whose layers they are.
        method: what chooses the zeros.
        pattern: how many there are.
        draw: for what is drawn.
    """

    def __init__(self, model: nn.Module, method: Method, pattern: Pattern, draw: Generator) -> None:
        self._model, self._method, self._pattern, self._draw = model, method, pattern, draw
        self._seen: set[nn.Module] = set()
        self._zeros: dict[str, float] = {}
        self._counts = [0, 0]  # zeros, weights
        self._odd: list[str] = []
        self._unreached: list[str] = []
        self._fed: list[tuple[int, int]] = []

    @torch.no_grad()
    def sparsify(self, layers: dict[str, nn.Linear], observe: Observe | None) -> None:
        """Make those of `layers` sparse, in place, that are not yet; `observe` shows what they are fed."""
        new = {name: m for name, m in layers.items() if m not in self._seen}
        self._seen.update(new.values())
        self._odd += [name for name, m in new.items() if not self._pattern.fits(m.in_features)]
        fit = {name: m for name, m in new.items() if self._pattern.fits(m.in_features)}
        found = self._look(fit, observe)
        for name, layer in fit.items():
            seen = found.pop(name, None)  # its second moment goes with the layer
            if seen is not None and not seen.tokens:
                self._unreached.append(name)
                continue
            if seen is not None:
                self._fed.append((seen.tokens, layer.in_features))
            weight = layer.weight.detach().float().cpu()
            sparse = self._method(weight, seen, self._pattern, self._draw)
            if keeps_zeros(layer):  # it was made sparse before
                sparse = sparse.masked_fill(weight == 0, 0.0)
            layer.weight.copy_(sparse)
            keep_zeros(layer)
            zeros = int((layer.weight == 0).sum())
            self._counts = [self._counts[0] + zeros, self._counts[1] + weight.numel()]
            self._zeros[name] = round(zeros / weight.numel(), 4)

    def _look(self, layers: dict[str, nn.Linear], observe: Observe | None) -> dict[str, InputStatistics]:
        if observe is None or not layers:
            return {}
        widths = {name: width_of(layer) for name, layer in layers.items()}
        device = next(iter(layers.values())).weight.device.type
        collector = Collector(widths, second=self._method.looks == "moments", device=device)
        observe({name: [layer] for name, layer in layers.items()}, collector.see)
        for name, found in collector.found.items():
            if not bool(found.squares.isfinite().all()):
                raise InputError(
                    f"sparsify: {name}: its inputs are not finite. The training before it"
                    " has probably diverged.",
                    code="non-finite-activations",
                )
        return {name: found.to("cpu") for name, found in collector.found.items()}

    def tell(self, rows: CalibrationRows | None, ctx: Context) -> None:
        """Say in the details and warnings of `ctx` what was done.

        Raises:
            InputError: no layer could be made sparse.
        """
        if not self._zeros:
            why = (
                f"their inputs are no multiple of {self._pattern.group}" if self._odd else "none is a Linear"
            )
            raise InputError(
                f"sparsify: no layer of the blocks can be made sparse: {why}.", code="no-layer-selected"
            )
        share = self._counts[0] / self._counts[1]
        ctx.details["sparsity"] = round(share, 4)
        ctx.details["zeros"] = self._counts[0]
        ctx.details["sparsity_by_layer"] = self._zeros
        ctx.warn(
            "zeros-not-faster",
            f"{share:.1%} of the weights of {len(self._zeros)} layers are zero. They are stored and"
            " multiplied as before: no runtime is faster and no file is smaller.",
        )
        if self._odd:
            ctx.warn(
                "pattern-does-not-fit",
                f"{len(self._odd)} layers are unchanged, because their inputs are no multiple of"
                f" {self._pattern.group}: {', '.join(self._odd[:3])}.",
            )
        if self._unreached:
            ctx.warn(
                "uncalibrated-layers",
                f"No calibration sample reaches {', '.join(self._unreached)}; they are unchanged.",
            )
        if rows is not None and self._method.looks == "moments" and (few := few_tokens(self._fed, rows)):
            ctx.warn(
                "few-calibration-tokens",
                f"{few}; results may overfit. Increase rows, or add data: {{calibration: FILE}}.",
            )
