"""How many units of a layer stay where the same fraction stays in each."""

from __future__ import annotations

import math
from typing import Any

from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup
from smelt.compress.prune.settings import PruneSettings
from smelt.core.messages import Message, warning


def heads_kept(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` heads stay: the nearest number, at least one."""
    return max(1, _nearest(count * (settings.keep_heads or settings.keep)))


def neurons_kept(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` neurons stay: the nearest multiple of `round_to`, at least one multiple."""
    wanted = count * (settings.keep_ffn or settings.keep)
    return min(count, max(1, _nearest(wanted / settings.round_to)) * settings.round_to)


def _nearest(wanted: float) -> int:
    """Return the nearest whole number; of two that are equally near the larger one."""
    return math.floor(wanted + 0.5)


def not_as_asked(
    model: Any, attentions: list[AttentionGroup], blocks: list[FeedForwardGroup], settings: PruneSettings
) -> list[Message]:
    """Say where everything stays, or twice as much as `keep` asks for: so few units cannot be divided so."""
    keep = {"heads": settings.keep_heads or settings.keep, "ffn": settings.keep_ffn or settings.keep}
    sizes = {
        "heads": [(n := g.count(model), heads_kept(n, settings)) for g in attentions],
        "ffn": [(n := b.count(model), neurons_kept(n, settings)) for b in blocks],
    }
    found = []
    for kind, counts in sizes.items():
        whole = sorted({count for count, kept in counts if kept == count})
        word = {"heads": "heads", "ffn": "neurons"}[kind]
        step = 1 if kind == "heads" else settings.round_to
        least = [count for count, kept in counts if 2 * count * keep[kind] <= kept < count]
        if least:
            found.append(
                warning(
                    "minimum-kept",
                    f"keep {keep[kind]:g} of {' or '.join(map(str, sorted(set(least))))} {word} is fewer than"
                    f" {step}, the minimum of a layer, which is kept in {len(least)} of {len(counts)}"
                    " layers.",
                    setting="keep",
                )
            )
        if keep[kind] == 1 or not whole:
            continue
        few = " or ".join(map(str, whole))
        most = max(whole)
        less = f" keep_{kind}: {(most - step) / most:.3g} takes {step} of {most}." if most > step else ""
        found.append(
            warning(
                "nothing-to-remove",
                f"keep {keep[kind]:g} of {few} {word}, rounded to a multiple of {step}, keeps all of them:"
                f" nothing is removed in {sum(kept == count for count, kept in counts)} of {len(counts)}"
                f" layers.{less}",
                setting="keep",
            )
        )
    return found
