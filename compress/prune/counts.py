"""How many units of a layer stay where the same fraction stays in each."""

from __future__ import annotations

import math
from typing import Any

from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup
from smelt.compress.prune.settings import PruneSettings
from smelt.core.messages import Message, warning


def heads_kept(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` heads stay: the nearest number, at least one."""
    return max(1, _nearest(count * settings.ratio("heads")))


def neurons_kept(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` neurons are kept: the nearest multiple of `multiple_of`, at least one."""
    wanted = count * settings.ratio("ffn")
    return min(count, max(1, _nearest(wanted / settings.multiple_of)) * settings.multiple_of)


def _nearest(wanted: float) -> int:
    """Return the nearest whole number; of two that are equally near the larger one."""
    return math.floor(wanted + 0.5)


def not_as_asked(
    model: Any, attentions: list[AttentionGroup], blocks: list[FeedForwardGroup], settings: PruneSettings
) -> list[Message]:
    """Return warnings about layers that keep all units, or twice as many as keep_ratio asks for."""
    sizes = {
        "heads": [(n := g.count(model), heads_kept(n, settings)) for g in attentions],
        "ffn": [(n := b.count(model), neurons_kept(n, settings)) for b in blocks],
    }
    found = []
    for kind, counts in sizes.items():
        if kind not in settings.targets:
            continue
        ratio = settings.ratio(kind)
        whole = sorted({count for count, kept in counts if kept == count})
        word = {"heads": "heads", "ffn": "neurons"}[kind]
        step = 1 if kind == "heads" else settings.multiple_of
        least = [count for count, kept in counts if 2 * count * ratio <= kept < count]
        if least:
            found.append(
                warning(
                    "minimum-kept",
                    f"keep_ratio {ratio:g} of {' or '.join(map(str, sorted(set(least))))} {word} is fewer"
                    f" than"
                    f" {step}, the minimum of a layer, which is kept in {len(least)} of {len(counts)}"
                    " layers.",
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
