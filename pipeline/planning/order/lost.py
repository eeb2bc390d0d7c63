"""Orders that run and throw work away: what a step leaves that a later one loses, as the stages say it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from smelt.core.stage import Settings, Stage

# A step: its name, its stage and its settings.
Done = tuple[str, type[Stage[Any]], Settings]


def left_by(step: Done) -> frozenset[str]:
    """Return what a step leaves that later ones may lose."""
    _, stage, settings = step
    says = getattr(stage, "leaves", None)
    found: frozenset[str] = says(settings) if says else frozenset()
    return found


def lost_by(step: Done, above: Sequence[Done], below: Collection[Done]) -> list[tuple[str, str]]:
    """Return code and text of each work of steps above that is lost in `step`.

    What a step below makes anew is not lost.

    Args:
        step: the one that is looked at.
        above: the steps that it goes on from, the nearest first.
        below: all steps that go on from it.
    """
    _, stage, settings = step
    says = getattr(stage, "spoils", None)
    spoils: Mapping[str, str] = says(settings) if says else {}
    anew = {word for later in below for word in left_by(later)}
    found = []
    for word, text in spoils.items():
        maker = next((earlier for earlier in above if word in left_by(earlier)), None)
        if maker is not None and word not in anew:
            found.append((f"{word}-lost", text.format(step=maker[0]) + "."))
    return found
