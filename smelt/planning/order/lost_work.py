"""Find results of steps that a later step invalidates, as declared by the stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from smelt.core.stage import Settings, Stage

# A step: its name, its stage and its settings.
StepSpec = tuple[str, type[Stage[Any]], Settings]


def results_of(step: StepSpec) -> frozenset[str]:
    """Return the results of a step that later steps may invalidate."""
    _, stage, settings = step
    says = getattr(stage, "provides", None)
    found: frozenset[str] = says(settings) if says else frozenset()
    return found


def lost_results(
    step: StepSpec, above: Sequence[StepSpec], below: Collection[StepSpec]
) -> list[tuple[str, str]]:
    """Return code and text for each result of earlier steps that `step` invalidates.

    A result that a later step creates again is not lost.

    Args:
        step: the step to check.
        above: its ancestors, nearest first.
        below: its descendants.
    """
    _, stage, settings = step
    says = getattr(stage, "invalidates", None)
    spoils: Mapping[str, str] = says(settings) if says else {}
    anew = {word for later in below for word in results_of(later)}
    found = []
    for word, text in spoils.items():
        maker = next((earlier for earlier in above if word in results_of(earlier)), None)
        if maker is not None and word not in anew:
            found.append((f"{word}-lost", text.format(step=maker[0]) + "."))
    return found
