"""Choose the steps of a run, its gates and the split that they are judged on, and check the named steps."""

from __future__ import annotations

from collections.abc import Iterator

from smelt.core.messages import error_message, warning
from smelt.evaluate.metrics.registry import AGREEMENT_METRIC
from smelt.pipeline.plan.check_context import CheckContext, skip_if_invalid
from smelt.pipeline.plan.plan import PlannedGate
from smelt.pipeline.plan.warnings import MIN_JUDGING_ROWS
from smelt.pipeline.recipe.recipe import SPEED_METRICS, JudgedOn
from smelt.pipeline.recipe.stages import MODEL_STEP
from smelt.pipeline.recipe.validation_errors import Finding


def select_steps(context: CheckContext) -> tuple[Finding, ...]:
    """Select the step `until` and all steps that it needs; all steps without it."""
    until, names = context.until, list(context.drafts)
    if until == MODEL_STEP:
        names = []
    elif until is not None and until in context.drafts:
        required = {until}
        for name, draft in reversed(context.drafts.items()):  # dependencies come before a step
            if name in required:
                required |= {draft.parent or MODEL_STEP, *draft.references.values()}
        names = [name for name in context.drafts if name in required]
    elif until is not None and not context.may_exist(until):
        text = context.unknown_step_text(until)
        context.errors.add_for_option(text, code="unknown-step", option="--until")
    context.included_names = names
    return ()


def plan_gates(context: CheckContext) -> Iterator[Finding]:
    """Find the steps of each gate: those of `at`, or the last scored step of each branch.

    With `--until`, a gate whose steps are all excluded is not evaluated: its limit was written for another
    step than the last one of the shortened run.
    """
    gates: list[PlannedGate] = []
    included = (MODEL_STEP, *context.included_names)
    for metric, gate in context.recipe.gates.items():
        step_names = (gate.at,) if isinstance(gate.at, str) else gate.at
        if context.is_invalid(f"gates.{metric}.at"):
            step_names = None
        for name in step_names or ():
            if not context.may_exist(name):
                text = context.unknown_step_text(name)
                yield ("gates", metric, "at"), error_message("unknown-step", text)
        if metric in SPEED_METRICS and context.recipe.score.latency is None:
            text = f"The gate on {metric} is not evaluated: latency is not measured (score.latency: false)."
            yield (), warning("gate-not-judged", text)
            continue
        names = step_names or context.leaf_names
        steps = tuple(name for name in names if name in included)
        excluded = [name for name in names if name in context.step_names and name not in included]
        if excluded and (step_names or not steps):
            text = f"The gate on {metric} is not evaluated at {', '.join(excluded)}: excluded by --until."
            yield (), warning("gate-not-judged", text)
        limits = {"max_drop": gate.max_drop, "min": gate.min, "max": gate.max}
        if context.recipe.baseline not in included:
            limits.pop("max_drop")  # no baseline to compare with; check_baseline warns about it
            if metric == AGREEMENT_METRIC and context.recipe.traits.modality != "arrays":
                limits = {}
        set_limits = [(kind, limit) for kind, limit in limits.items() if limit is not None and steps]
        gates += [PlannedGate(metric, kind, limit, steps, gate.confidence) for kind, limit in set_limits]
    context.gates = tuple(gates)


@skip_if_invalid("score.latency.steps")
def check_latency_steps(context: CheckContext) -> Iterator[Finding]:
    """Check that the names in `score.latency.steps` are steps."""
    latency = context.recipe.score.latency
    for name in latency.named_steps() if latency else ():
        if not context.may_exist(name):
            text = context.unknown_step_text(name)
            yield ("score", "latency", "steps"), error_message("unknown-step", text)


@skip_if_invalid("baseline")
def check_baseline(context: CheckContext) -> Iterator[Finding]:
    """Check that the baseline is a step of the run and can be scored."""
    name = context.recipe.baseline
    if name == MODEL_STEP:
        return
    if name in context.included_names:
        if reason := context.drafts[name].unscored:
            text = f"No step is compared with the baseline '{name}': {reason}"
            yield (), warning("no-comparison", text)
    elif name in context.step_names:
        text = f"The baseline '{name}' is excluded by --until, so no step is compared with it."
        yield (), warning("no-comparison", text)
    elif not context.may_exist(name):
        yield ("baseline",), error_message("unknown-step", context.unknown_step_text(name))


def choose_judging_split(context: CheckContext) -> JudgedOn:
    """Return the split on which gates and the recommendation are evaluated.

    Choosing the best of several branches on test overestimates its score. So the choice is made on validation
    and the chosen step is scored on test. The default is test if validation has too few samples, or for
    sentence similarity, whose validation samples need no scores. Files that were not read are large.
    """
    recipe, files = context.recipe, context.recipe.data.split_files()
    if recipe.judged_on is not None:
        return recipe.judged_on
    if "validation" not in recipe.data.split_sources() or recipe.traits.output == "embedding":
        return "test"
    validation = context.splits.get("validation", range(MIN_JUDGING_ROWS))
    is_small = recipe.traits.samples != "running-text" and len(validation) < MIN_JUDGING_ROWS
    is_test = files.get("validation") is not None and files.get("validation") == files.get("test")
    return "test" if is_small or is_test or len(context.leaf_names) < 2 else "validation"
