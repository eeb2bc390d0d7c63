"""Engines are built for the longest output that the recipe's scoring asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from smelt.core.data import TEXT_TO_TEXT
from smelt.plan.plan import Step

if TYPE_CHECKING:
    from smelt.recipe.errors import Mistakes
    from smelt.recipe.recipe import Recipe
    from smelt.recipe.yaml_file import Where


def fit_engines(
    steps: Sequence[Step], recipe: Recipe, places: dict[str, Where], mistakes: Mistakes
) -> tuple[Step, ...]:
    """Return `steps`, each `tensorrt` among them with a `max_new_tokens` that the scoring can live with.

    Where the step does not say it, it takes that of `score: {generation: ...}`; where neither does, the
    stage takes the model's own. A smaller one is a mistake: scoring would stop at a longer text.
    """
    wanted = recipe.score.generation.max_new_tokens
    if recipe.task not in TEXT_TO_TEXT or wanted is None:
        return tuple(steps)
    for step in steps:
        given = getattr(step.settings, "max_new_tokens", None) if step.stage == "tensorrt" else None
        if given is not None and given < wanted:
            mistakes.add(
                (*places[step.name], "max_new_tokens"),
                f"{given} is less than the {wanted} of score: {{generation: {{max_new_tokens}}}}; an engine"
                f" refuses what is longer than it was built for. Give at least {wanted} here.",
            )
    return tuple(_asked(step, wanted) if step.stage == "tensorrt" else step for step in steps)


def _asked(step: Step, wanted: int) -> Step:
    if getattr(step.settings, "max_new_tokens", None) is not None:
        return step
    return replace(step, settings=step.settings.model_copy(update={"max_new_tokens": wanted}))
