"""Number of units kept per layer when every layer keeps the same fraction."""

from __future__ import annotations

import math
from typing import Any

from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.unit_groups import AttentionGroup, FeedForwardGroup
from smelt.core.messages import Message, warning


def count_kept_heads(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` heads are kept: the nearest number, at least one."""
    return max(1, _round_half_up(count * settings.keep_ratio_of("heads")))


def count_kept_neurons(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` neurons are kept: the nearest multiple of `multiple_of`, at least one."""
    wanted = count * settings.keep_ratio_of("ffn")
    return min(count, max(1, _round_half_up(wanted / settings.multiple_of)) * settings.multiple_of)


def _round_half_up(wanted: float) -> int:
    """Return the nearest whole number; a half is rounded up."""
    return math.floor(wanted + 0.5)


def rounding_warnings(
    model: Any, attentions: list[AttentionGroup], blocks: list[FeedForwardGroup], settings: PruneSettings
) -> list[Message]:
    """Return warnings about layers that keep all units, or twice as many as keep_ratio asks for."""
    sizes = {
        "heads": [(n := g.count(model), count_kept_heads(n, settings)) for g in attentions],
        "ffn": [(n := b.count(model), count_kept_neurons(n, settings)) for b in blocks],
    }
    found = []
    for kind, counts in sizes.items():
        if kind not in settings.targets:
            continue
        ratio = settings.keep_ratio_of(kind)
        whole = sorted({count for count, kept in counts if kept == count})
        word = {"heads": "heads", "ffn": "neurons"}[kind]
        step = 1 if kind == "heads" else settings.multiple_of
        least = [count for count, kept in counts if 2 * count * ratio <= kept < count]
        if least:
            found.append(
                warning(
                    "minimum-kept",
                    f"keep_ratio {ratio:g} of {' or '.join(map(str, sorted(set(least))))} {word} is"
                    f" less than {step}, the minimum of a layer; the minimum is kept in"
                    f" {len(least)} of {len(counts)} layers.",
                    setting="keep_ratio",
                )
            )
        if ratio == 1 or not whole:
            continue
        few = " or ".join(map(str, whole))
        most = max(whole)
        less = (
            f" keep_ratio: {{{kind}: {(most - step) / most:.3g}}} removes {step} of {most}."
            if most > step
            else ""
        )
        found.append(
            warning(
                "nothing-to-remove",
                f"keep_ratio {ratio:g} of {few} {word}, rounded to a multiple of {step}, keeps all of them:"
                f" nothing is removed in {sum(kept == count for count, kept in counts)} of {len(counts)}"
                f" layers.{less}",
                setting="keep_ratio",
            )
        )
    return found
