"""Resolve `--until`, gates, their split, the baseline, and the output length of engines in a plan.

TensorRT engines get the maximum output length of the recipe's scoring settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from smelt.core.messages import warning
from smelt.data.splits import CUSTOM_TASK, SENTENCE_SIMILARITY, TEXT_TO_TEXT_TASKS, Split
from smelt.evaluate.metrics import AGREEMENT_METRIC
from smelt.export.settings import ProviderSettings
from smelt.pipeline.plan.plan import PlannedGate, PlanStep
from smelt.pipeline.plan.plan_checker import PlanChecker
from smelt.pipeline.plan.warnings import MIN_JUDGING_ROWS
from smelt.pipeline.recipe.mistakes import has_mistake
from smelt.pipeline.recipe.recipe import SPEED_METRICS, JudgedOn
from smelt.pipeline.recipe.stages import MODEL_STEP

if TYPE_CHECKING:
    from smelt.pipeline.recipe.mistakes import Mistakes
    from smelt.pipeline.recipe.recipe import ParsedRecipe
    from smelt.pipeline.recipe.yaml_file import KeyPath


def steps_until(checker: PlanChecker, until: str | None) -> list[str]:
    """Return the names of the step `until` and all steps that it needs, in order; all steps for None."""
    if until is None or until == MODEL_STEP:
        return [] if until else list(checker.drafts)
    if until not in checker.drafts:
        if not checker.may_exist(until):
            checker.mistakes.add_for_option(
                checker.unknown_step_text(until), code="unknown-step", option="--until"
            )
        return list(checker.drafts)
    wanted = {until}
    for name, draft in reversed(checker.drafts.items()):  # dependencies come before a step
        if name in wanted:
            wanted |= {draft.parent or MODEL_STEP, *draft.references.values()}
    return [name for name in checker.drafts if name in wanted]


def plan_gates(checker: PlanChecker, included: list[str]) -> tuple[PlannedGate, ...]:
    """Return the gates with the steps to check: those of `at`, or the last scored step of each branch.

    With `--until`, a gate whose steps are all excluded is not evaluated: its limit was written for another
    step than the last one of the shortened run.
    """
    out: list[PlannedGate] = []
    last = _leaf_steps(checker)
    for metric, gate in checker.recipe.gates.items():
        at = (gate.at,) if isinstance(gate.at, str) else gate.at
        if has_mistake(checker.invalid_paths, f"gates.{metric}.at"):
            at = None
        for name in at or ():
            if not checker.may_exist(name):
                checker.mistakes.add(
                    ("gates", metric, "at"), checker.unknown_step_text(name), code="unknown-step"
                )
        if metric in SPEED_METRICS and checker.recipe.score.latency is None:
            checker.warnings.append(
                warning(
                    "gate-not-judged",
                    f"The gate on {metric} is not evaluated: latency is not measured (score.latency: false).",
                )
            )
            continue
        steps = tuple(name for name in at or last if name in (MODEL_STEP, *included))
        left = [
            name for name in at or last if name in checker.step_names and name not in (MODEL_STEP, *included)
        ]
        if left and (at or not steps):
            checker.warnings.append(
                warning(
                    "gate-not-judged",
                    f"The gate on {metric} is not evaluated at {', '.join(left)}: excluded by --until.",
                )
            )
        limits = {"max_drop": gate.max_drop, "min": gate.min, "max": gate.max}
        if checker.recipe.baseline not in (MODEL_STEP, *included):
            limits.pop("max_drop")  # no baseline to compare with; check_baseline warns about it
            if metric == AGREEMENT_METRIC and checker.recipe.task != CUSTOM_TASK:
                limits = {}
        given = [(kind, limit) for kind, limit in limits.items() if limit is not None and steps]
        out += [PlannedGate(metric, kind, limit, steps, gate.confidence) for kind, limit in given]
    return tuple(out)


def check_latency_steps(checker: PlanChecker) -> None:
    """Check that the names in `score.latency.steps` are steps."""
    latency = checker.recipe.score.latency
    if not latency or has_mistake(checker.invalid_paths, "score.latency.steps"):
        return
    for name in latency.named_steps():
        if not checker.may_exist(name):
            checker.mistakes.add(
                ("score", "latency", "steps"), checker.unknown_step_text(name), code="unknown-step"
            )


def choose_judging_split(checker: PlanChecker, splits: Mapping[str, Split]) -> JudgedOn:
    """Return the split on which gates and the recommendation are evaluated.

    Choosing the best of several branches on test overestimates its score. So the choice is made on validation
    and the chosen step is scored on test. The default is test if validation has too few samples, or for
    sentence similarity, whose validation samples need no scores.

    Args:
        checker: the checker of the recipe.
        splits: the splits that were read; files that were not are large.
    """
    recipe, files = checker.recipe, checker.recipe.data.split_files()
    if recipe.judged_on is not None:
        return recipe.judged_on
    if "validation" not in recipe.data.split_sources() or recipe.task == SENTENCE_SIMILARITY:
        return "test"
    few = (
        recipe.task != "language-modeling"
        and len(splits.get("validation", range(MIN_JUDGING_ROWS))) < MIN_JUDGING_ROWS
    )
    same = files.get("validation") is not None and files.get("validation") == files.get("test")
    return "test" if few or same or len(_leaf_steps(checker)) < 2 else "validation"


def _leaf_steps(checker: PlanChecker) -> tuple[str, ...]:
    running = [d for d in checker.drafts.values() if not d.unavailable and not d.unscored]
    parents = {d.parent for d in running}
    return tuple(d.name for d in running if d.name not in parents) or (MODEL_STEP,)


def check_baseline(checker: PlanChecker, included: list[str]) -> None:
    """Check that the baseline is a step of the run and can be scored."""
    name = checker.recipe.baseline
    if has_mistake(checker.invalid_paths, "baseline") or name == MODEL_STEP:
        return
    if name in included:
        if reason := checker.drafts[name].unscored:
            checker.warnings.append(
                warning("no-comparison", f"No step is compared with the baseline '{name}': {reason}")
            )
        return
    if name in checker.step_names:
        checker.warnings.append(
            warning(
                "no-comparison",
                f"The baseline '{name}' is excluded by --until, so no step is compared with it.",
            )
        )
    elif not checker.may_exist(name):
        checker.mistakes.add(("baseline",), checker.unknown_step_text(name), code="unknown-step")


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
    engine = step.settings if step.stage == "tensorrt" else getattr(step.settings, "engine", None)
    found: int | None = getattr(engine, "max_new_tokens", None)
    return found


def _with_max_new_tokens(step: PlanStep, wanted: int) -> PlanStep:
    if _engine_max_new_tokens(step) is not None:
        return step
    if step.stage == "tensorrt":
        update: dict[str, object] = {"max_new_tokens": wanted}
    elif getattr(step.settings, "target", None) == "ort-tensorrt":
        engine = getattr(step.settings, "engine", None) or ProviderSettings()
        update = {"engine": engine.model_copy(update={"max_new_tokens": wanted})}
    else:
        return step
    return replace(step, settings=step.settings.model_copy(update=update))
