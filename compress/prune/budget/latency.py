"""What a text costs in time: a table of timings of each kind of part, by how many of its units are left.

A text is read once and `sequence_length` tokens come out, one at a time, where the model writes; elsewhere it
is read once. The table holds products, attentions and activations of the blocks, and the products of the
head; what lies between them (norms, sums, lookups) is not in it, and no choice of units changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from smelt.compress.prune.budget.clock import Heads, Part, seconds_of
from smelt.compress.prune.budget.costs import Costs, text_length
from smelt.compress.prune.budget.sizes import Group, Product, product_of, sizes_of, uses_of
from smelt.compress.prune.groups import AttentionGroup
from smelt.core.stage import Context
from smelt.families.walk import Block, head_of

# How many sizes of a kind of part are timed; what lies between them is interpolated.
POINTS = 8
# Parts and how often a text has each.
Parts = list[tuple[Part, int]]


def latency_costs(
    model: Any, groups: Sequence[Group], length: int | None, on: str, steps: dict[str, int], ctx: Context
) -> Costs:
    """Return costs in milliseconds a text.

    Args:
        model: float, on the CPU.
        groups: of it.
        length: tokens; None for 128, or as many as the model has places for.
        on: where parts are timed: ort-cpu, ort-cpu-int8, torch.
        steps: by group, in multiples of how many units stay.
        ctx: threads (one unless said); its progress is told.
    """
    tokens, uses = text_length(model, length), uses_of(model, groups)
    clock = _Clock(on, ctx.threads or 1)
    of: dict[str, Tensor] = {}
    table: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for at, group in enumerate(groups, start=1):
        counts = _points(group.count(model), steps[group.name])
        found = clock.ms([_parts(model, group, n, uses[group.name], tokens) for n in counts])
        rising = np.asarray(isotonic_regression(found).x)
        kind = tuple((n, round(float(ms), 4)) for n, ms in zip(counts, rising, strict=True))
        table.setdefault(kind, []).append(group.name)
        of[group.name] = _between(counts, rising, group.count(model))
        ctx.progress(at, len(groups), f"timings of {group.name}")
    fixed = clock.ms([_head_parts(model, tokens)])[0]
    whole = fixed + sum(float(cost[-1]) for cost in of.values())
    timings = [{"of": names, "ms": {str(n): ms for n, ms in kind}} for kind, names in table.items()]
    said = {"sequence_length": tokens, "measure_on": on, "threads": clock.threads, "timings": timings}
    return Costs("milliseconds", whole, fixed, of, said)


class _Clock:
    """Times parts, each once."""

    def __init__(self, on: str, threads: int) -> None:
        self.on, self.threads = on, threads
        self._known: dict[Part, float] = {}

    def ms(self, sums: Sequence[Parts]) -> list[float]:
        """Return what each of `sums` takes, milliseconds: all of its parts, as often as it has them."""
        new = [p for p in dict.fromkeys(part for parts in sums for part, _ in parts) if p not in self._known]
        self._known |= dict(zip(new, seconds_of(new, self.on, self.threads), strict=True))
        return [1000 * sum(self._known[part] * times for part, times in parts) for parts in sums]


def _points(count: int, step: int) -> list[int]:
    """Return the numbers of units that are timed: multiples of `step`, and all."""
    wanted = np.linspace(step, count, POINTS) if count > step else np.array([count])
    return sorted({min(count, max(step, round(n / step) * step)) for n in wanted} | {count})


def _between(counts: list[int], found: Any, units: int) -> Tensor:
    """Return the time of 0, 1, ... units, float64 [units + 1]; below the first one that of the first."""
    return torch.from_numpy(np.interp(np.arange(units + 1), counts, found))


def _parts(model: Any, group: Group, units: int, uses: list[tuple[Block, int]], tokens: int) -> Parts:
    found: Parts = []
    make: Callable[[Block], Parts]
    if isinstance(group, AttentionGroup):
        make = partial(_attention, model, group, units, tokens)
    else:
        make = partial(_feed_forward, model, group, units, tokens)
    for block, places in uses:
        found += [(part, times * places) for part, times in make(block)]
    return found


def _attention(model: Any, group: AttentionGroup, units: int, tokens: int, block: Block) -> Parts:
    """Return the parts of an attention; a cross-attention's keys and values are made once a text."""
    sizes, attention = sizes_of(model, group, units), group.parts
    module = model.get_submodule(group.name)
    width = int(getattr(module, attention.width))
    queries = sizes.between // (units * width)
    seen = min(tokens, block.window or tokens)
    first = tuple(product for _, product in sizes.first)
    if not block.stack.causal:
        return [(Part(tokens, first, sizes.last, Heads(units, queries, width, tokens)), 1)]
    if not attention.cross:  # on average half of the text is there already
        cached = Heads(units, queries, width, max(1, min(seen, tokens // 2)), cached=True)
        return [(Part(1, first, sizes.last, cached), tokens)]
    by_name = dict(sizes.first)
    made = tuple(by_name[name] for name in (attention.key, attention.value))
    look = Heads(units, queries, width, tokens, cached=True)
    return [
        (Part(1, (by_name[attention.query],), sizes.last, look), tokens),
        (Part(tokens, made), 1),
    ]


def _feed_forward(model: Any, group: Any, units: int, tokens: int, block: Block) -> Parts:
    sizes, parts = sizes_of(model, group, units), group.parts
    word = str(getattr(model.config, parts.activation, "relu"))
    kind = next((k for k, words in _KINDS.items() if any(w in word for w in words)), "relu")
    first = tuple(product for _, product in sizes.first)
    once, times = (1, tokens) if block.stack.causal else (tokens, 1)
    return [(Part(once, first, sizes.last, activation=kind, gated=parts.gate is not None), times)]


# Functions that take about as long as each other.
_KINDS = {"gelu": ("gelu",), "silu": ("silu", "swish", "sigmoid", "tanh")}


def _head_parts(model: Any, tokens: int) -> Parts:
    """Return the products of the head: one row a token that comes out, or one a text."""
    times = tokens if model.can_generate() else 1
    products: list[Product] = []
    for name in head_of(model):
        if isinstance(model.get_submodule(name), torch.nn.Linear):
            products.append(product_of(model, name))
    return [(Part(1, (product,)), times) for product in products]
