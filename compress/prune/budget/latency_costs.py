"""Latency costs of a model: a table of timings of each kind of part, by its number of units.

An input sequence is processed once; a generating model also generates `sequence_length` tokens one at a time.
The table holds linear layers, attentions and activations of the blocks, and the linear layers of the head.
Norms, sums and lookups are left out, because pruning does not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from smelt.compress.prune.budget.costs import UnitCosts, resolve_sequence_length
from smelt.compress.prune.budget.part_timing import TimedAttention, TimedPart, time_parts
from smelt.compress.prune.budget.shapes import (
    LinearShape,
    UnitGroup,
    blocks_using_groups,
    group_shapes,
    linear_shape,
)
from smelt.compress.prune.unit_groups import AttentionGroup
from smelt.core.stage import Context
from smelt.families.model_blocks import Block, output_modules

# Number of sizes that are timed of each kind of part; others are interpolated.
TIMING_POINTS = 8
# Parts, and how often each runs per sample.
TimedParts = list[tuple[TimedPart, int]]


def latency_costs(
    model: Any,
    groups: Sequence[UnitGroup],
    sequence_length: int | None,
    runtime: str,
    multiples: dict[str, int],
    ctx: Context,
) -> UnitCosts:
    """Return costs in milliseconds per sample.

    Args:
        model: float, on the CPU.
        groups: the groups of its units.
        sequence_length: tokens; None for 128, limited by the model's positions.
        runtime: runtime of the timings: ort-cpu, ort-cpu-int8, torch.
        multiples: by group, the kept units are a multiple of this.
        ctx: threads (default one) and progress.
    """
    tokens, uses = resolve_sequence_length(model, sequence_length), blocks_using_groups(model, groups)
    clock = _PartTimer(runtime, ctx.threads or 1)
    of: dict[str, Tensor] = {}
    table: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for at, group in enumerate(groups, start=1):
        counts = _unit_counts(group.count(model), multiples[group.name])
        found = clock.ms([_timed_parts(model, group, n, uses[group.name], tokens) for n in counts])
        rising = np.asarray(isotonic_regression(found).x)
        kind = tuple((n, round(float(ms), 4)) for n, ms in zip(counts, rising, strict=True))
        table.setdefault(kind, []).append(group.name)
        of[group.name] = _interpolate(counts, rising, group.count(model))
        ctx.progress(at, len(groups), f"timings of {group.name}")
    fixed = clock.ms([_head_parts(model, tokens)])[0]
    whole = fixed + sum(float(cost[-1]) for cost in of.values())
    timings = [{"of": names, "ms": {str(n): ms for n, ms in kind}} for kind, names in table.items()]
    said = {"sequence_length": tokens, "measure_on": runtime, "threads": clock.threads, "timings": timings}
    return UnitCosts("milliseconds", whole, fixed, of, said)


class _PartTimer:
    """Times parts, each once."""

    def __init__(self, on: str, threads: int) -> None:
        self.on, self.threads = on, threads
        self._known: dict[TimedPart, float] = {}

    def ms(self, sums: Sequence[TimedParts]) -> list[float]:
        """Return the total milliseconds of each of `sums`: its parts, each times its count."""
        new = [p for p in dict.fromkeys(part for parts in sums for part, _ in parts) if p not in self._known]
        self._known |= dict(zip(new, time_parts(new, self.on, self.threads), strict=True))
        return [1000 * sum(self._known[part] * times for part, times in parts) for parts in sums]


def _unit_counts(count: int, step: int) -> list[int]:
    """Return the numbers of units to time: multiples of `step`, and all units."""
    wanted = np.linspace(step, count, TIMING_POINTS) if count > step else np.array([count])
    return sorted({min(count, max(step, round(n / step) * step)) for n in wanted} | {count})


def _interpolate(counts: list[int], found: Any, units: int) -> Tensor:
    """Return the time of 0, 1, ... units, float64 [units + 1]; below the first timed size its time."""
    return torch.from_numpy(np.interp(np.arange(units + 1), counts, found))


def _timed_parts(
    model: Any, group: UnitGroup, units: int, uses: list[tuple[Block, int]], tokens: int
) -> TimedParts:
    found: TimedParts = []
    make: Callable[[Block], TimedParts]
    if isinstance(group, AttentionGroup):
        make = partial(_attention_parts, model, group, units, tokens)
    else:
        make = partial(_feed_forward_parts, model, group, units, tokens)
    for block, places in uses:
        found += [(part, times * places) for part, times in make(block)]
    return found


def _attention_parts(model: Any, group: AttentionGroup, units: int, tokens: int, block: Block) -> TimedParts:
    """Return the parts of an attention; a cross-attention computes keys and values once per sample."""
    sizes, attention = group_shapes(model, group, units), group.structure
    module = model.get_submodule(group.name)
    width = int(getattr(module, attention.head_dim_attribute))
    queries = sizes.inner_width // (units * width)
    seen = min(tokens, block.window or tokens)
    first = tuple(product for _, product in sizes.input_layers)
    if not block.stack.causal:
        return [
            (TimedPart(tokens, first, sizes.output_layer, TimedAttention(units, queries, width, tokens)), 1)
        ]
    if not attention.cross:  # on average half of the tokens are cached
        cached = TimedAttention(units, queries, width, max(1, min(seen, tokens // 2)), cached=True)
        return [(TimedPart(1, first, sizes.output_layer, cached), tokens)]
    by_name = dict(sizes.input_layers)
    made = tuple(by_name[name] for name in (attention.key, attention.value))
    look = TimedAttention(units, queries, width, tokens, cached=True)
    return [
        (TimedPart(1, (by_name[attention.query],), sizes.output_layer, look), tokens),
        (TimedPart(tokens, made), 1),
    ]


def _feed_forward_parts(model: Any, group: Any, units: int, tokens: int, block: Block) -> TimedParts:
    sizes, parts = group_shapes(model, group, units), group.structure
    word = str(getattr(model.config, parts.activation_key, "relu"))
    kind = next((k for k, words in _ACTIVATION_ALIASES.items() if any(w in word for w in words)), "relu")
    first = tuple(product for _, product in sizes.input_layers)
    once, times = (1, tokens) if block.stack.causal else (tokens, 1)
    return [
        (TimedPart(once, first, sizes.output_layer, activation=kind, gated=parts.gate is not None), times)
    ]


# Activation functions, by the timed function that takes about as long.
_ACTIVATION_ALIASES = {"gelu": ("gelu",), "silu": ("silu", "swish", "sigmoid", "tanh")}


def _head_parts(model: Any, tokens: int) -> TimedParts:
    """Return the linear layers of the head: one row per generated token, or one per sample."""
    times = tokens if model.can_generate() else 1
    products: list[LinearShape] = []
    for name in output_modules(model):
        if isinstance(model.get_submodule(name), torch.nn.Linear):
            products.append(linear_shape(model, name))
    return [(TimedPart(1, (product,)), times) for product in products]
