"""Set the maximum output length of TensorRT engines from the recipe's scoring settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from smelt.core.data import TEXT_TO_TEXT_TASKS
from smelt.export.tensorrt.provider_settings import ProviderSettings
from smelt.planning.plan import PlanStep
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS

if TYPE_CHECKING:
    from smelt.recipe.mistakes import Mistakes
    from smelt.recipe.recipe import ParsedRecipe
    from smelt.recipe.yaml_file import KeyPath


def set_engine_lengths(
    steps: Sequence[PlanStep], recipe: ParsedRecipe, setting_paths: dict[str, KeyPath], mistakes: Mistakes
) -> tuple[PlanStep, ...]:
    """Return `steps` with `max_new_tokens` of engines set to that of `score: {generation: ...}`.

    Applies to `tensorrt`, and to `engine` of an `onnx` for TensorRT's providers, if they do not set it. If
    neither is set, the stage uses the model's own value. A value below that of the scoring is a mistake:
    scoring would fail on longer outputs.
    """
    wanted = recipe.score.generation.max_new_tokens
    if recipe.task not in TEXT_TO_TEXT_TASKS or wanted is None:
        return tuple(steps)
    for step in steps:
        given = _engine_max_new_tokens(step)
        if given is not None and given < wanted:
            inner = ("max_new_tokens",) if step.stage == "tensorrt" else ("engine", "max_new_tokens")
            mistakes.add(
                (*setting_paths[step.name], *inner),
                f"{given} is less than score: {{generation: {{max_new_tokens: {wanted}}}}}. An engine cannot"
                f" generate more tokens than it was built for. Set at least {wanted} here.",
                code="engine-too-short",
            )
    return tuple(_with_max_new_tokens(step, wanted) for step in steps)


def _engine_max_new_tokens(step: PlanStep) -> int | None:
    """Return `max_new_tokens` of a step's engines; None if not set."""
    said = step.settings if step.stage == "tensorrt" else getattr(step.settings, "engine", None)
    found: int | None = getattr(said, "max_new_tokens", None)
    return found


def _with_max_new_tokens(step: PlanStep, wanted: int) -> PlanStep:
    if _engine_max_new_tokens(step) is not None:
        return step
    if step.stage == "tensorrt":
        update: dict[str, object] = {"max_new_tokens": wanted}
    elif getattr(step.settings, "target", None) in PROVIDERS:
        engine = getattr(step.settings, "engine", None) or ProviderSettings()
        update = {"engine": engine.model_copy(update={"max_new_tokens": wanted})}
    else:
        return step
    return replace(step, settings=step.settings.model_copy(update=update))
