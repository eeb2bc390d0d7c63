"""Engines are built for the longest output that the recipe's scoring asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from smelt.core.data import TEXT_TO_TEXT
from smelt.export.tensorrt.provider_settings import ProviderSettings
from smelt.planning.plan import Step
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS

if TYPE_CHECKING:
    from smelt.recipe.errors import Mistakes
    from smelt.recipe.recipe import Recipe
    from smelt.recipe.yaml_file import Where


def fit_engines(
    steps: Sequence[Step], recipe: Recipe, places: dict[str, Where], mistakes: Mistakes
) -> tuple[Step, ...]:
    """Return `steps`; those with engines have a `max_new_tokens` that the scoring can live with.

    Where `tensorrt`, or `engine` of an `onnx` for TensorRT's providers, does not say it, it takes that of
    `score: {generation: ...}`; where neither does, the stage takes the model's own. A smaller one is a
    mistake: scoring would stop at a longer text.
    """
    wanted = recipe.score.generation.max_new_tokens
    if recipe.task not in TEXT_TO_TEXT or wanted is None:
        return tuple(steps)
    for step in steps:
        given = _given(step)
        if given is not None and given < wanted:
            inner = ("max_new_tokens",) if step.stage == "tensorrt" else ("engine", "max_new_tokens")
            mistakes.add(
                (*places[step.name], *inner),
                f"{given} is less than the {wanted} of score: {{generation: {{max_new_tokens}}}}; an engine"
                f" refuses what is longer than it was built for. Give at least {wanted} here.",
                code="engine-too-short",
            )
    return tuple(_asked(step, wanted) for step in steps)


def _given(step: Step) -> int | None:
    """Return the longest output that a step says its engines are for."""
    said = step.settings if step.stage == "tensorrt" else getattr(step.settings, "engine", None)
    found: int | None = getattr(said, "max_new_tokens", None)
    return found


def _asked(step: Step, wanted: int) -> Step:
    if _given(step) is not None:
        return step
    if step.stage == "tensorrt":
        update: dict[str, object] = {"max_new_tokens": wanted}
    elif getattr(step.settings, "target", None) in PROVIDERS:
        engine = getattr(step.settings, "engine", None) or ProviderSettings()
        update = {"engine": engine.model_copy(update={"max_new_tokens": wanted})}
    else:
        return step
    return replace(step, settings=step.settings.model_copy(update=update))
