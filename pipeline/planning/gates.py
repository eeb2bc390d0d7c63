"""What a plan stops at and is judged by: the steps of `--until`, the gates and their rows, the baseline."""

from __future__ import annotations

from collections.abc import Mapping

from smelt.core.data import SIMILARITY, Split
from smelt.core.messages import warning
from smelt.planning.order.checks import Checker
from smelt.planning.plan import PlannedGate
from smelt.planning.warnings import FEWEST_ROWS
from smelt.recipe.errors import touches
from smelt.recipe.problem import AGREEMENT
from smelt.recipe.recipe import SPEEDS, JudgedOn
from smelt.recipe.stages import ROOT


def cut(checker: Checker, until: str | None) -> list[str]:
    """Return the names of the steps that `until` needs and itself (all for None), in order."""
    if until is None or until == ROOT:
        return [] if until else list(checker.drafts)
    if until not in checker.drafts:
        if not checker.may_be(until):
            checker.mistakes.say(checker.no_step(until), code="unknown-step", option="--until")
        return list(checker.drafts)
    wanted = {until}
    for name, draft in reversed(checker.drafts.items()):  # what a step stands on comes before it
        if name in wanted:
            wanted |= {draft.parent or ROOT, *draft.references.values()}
    return [name for name in checker.drafts if name in wanted]


def gates(checker: Checker, kept: list[str]) -> tuple[PlannedGate, ...]:
    """Give every gate its steps: those of `at`, else the last of each branch that is scored here.

    With `--until` a gate whose steps are all left out is not judged: the last step that is done then
    is not the one that the limit was written for.
    """
    out: list[PlannedGate] = []
    last = _leaves(checker)
    for metric, gate in checker.recipe.gates.items():
        at = (gate.at,) if isinstance(gate.at, str) else gate.at
        if touches(checker.bad, f"gates.{metric}.at"):
            at = None
        for name in at or ():
            if not checker.may_be(name):
                checker.mistakes.add(("gates", metric, "at"), checker.no_step(name), code="unknown-step")
        if metric in SPEEDS and checker.recipe.score.latency is None:
            checker.warnings.append(
                warning("gate-not-judged", f"The gate on {metric} is not judged: latency is switched off.")
            )
            continue
        steps = tuple(name for name in at or last if name in (ROOT, *kept))
        left = [name for name in at or last if name in checker.names and name not in (ROOT, *kept)]
        if left and (at or not steps):
            checker.warnings.append(
                warning(
                    "gate-not-judged",
                    f"The gate on {metric} is not judged at {', '.join(left)}, which --until leaves out.",
                )
            )
        limits = {"max_drop": gate.max_drop, "min": gate.min, "max": gate.max}
        if checker.recipe.baseline not in (ROOT, *kept):
            limits.pop("max_drop")  # there is nothing to drop from; a warning says that it is left out
            if metric == AGREEMENT and checker.recipe.task == SIMILARITY:  # nor anything to agree with
                limits = {}
        given = [(kind, limit) for kind, limit in limits.items() if limit is not None and steps]
        out += [PlannedGate(metric, kind, limit, steps, gate.confidence) for kind, limit in given]
    return tuple(out)


def timed(checker: Checker) -> None:
    """Check that what `score.latency.steps` names are steps."""
    latency = checker.recipe.score.latency
    if not latency or touches(checker.bad, "score.latency.steps"):
        return
    for name in latency.named():
        if not checker.may_be(name):
            checker.mistakes.add(("score", "latency", "steps"), checker.no_step(name), code="unknown-step")


def judged_on(checker: Checker, splits: Mapping[str, Split]) -> JudgedOn:
    """Return the rows that gates and recommendation are judged on.

    Where several branches compete, the one that looks best on test looks better there than it is: the choice
    is made on validation, and what was chosen is scored on test. Not by default where validation has too few
    rows to choose by, nor of similarities, whose validation rows need no scores.

    Args:
        checker: of the recipe.
        splits: the rows that were read already; files that were not are large.
    """
    recipe, files = checker.recipe, checker.recipe.data.files()
    if recipe.judged_on is not None:
        return recipe.judged_on
    if "validation" not in recipe.data.splits() or recipe.task == SIMILARITY:
        return "test"
    few = (
        recipe.task != "language-modeling" and len(splits.get("validation", range(FEWEST_ROWS))) < FEWEST_ROWS
    )
    same = files.get("validation") is not None and files.get("validation") == files.get("test")
    return "test" if few or same or len(_leaves(checker)) < 2 else "validation"


def _leaves(checker: Checker) -> tuple[str, ...]:
    running = [d for d in checker.drafts.values() if not d.unavailable and not d.unscored]
    parents = {d.parent for d in running}
    return tuple(d.name for d in running if d.name not in parents) or (ROOT,)


def baseline(checker: Checker, kept: list[str]) -> None:
    """Check that the baseline is a step, and one that will be there and scored."""
    name = checker.recipe.baseline
    if touches(checker.bad, "baseline") or name == ROOT:
        return
    if name in kept:
        if reason := checker.drafts[name].unscored:
            checker.warnings.append(
                warning("no-comparison", f"Nothing is compared with the baseline '{name}': {reason}")
            )
        return
    if name in checker.names:
        checker.warnings.append(
            warning("no-comparison", f"The baseline '{name}' is left out, so nothing is compared with it.")
        )
    elif not checker.may_be(name):
        checker.mistakes.add(("baseline",), checker.no_step(name), code="unknown-step")
