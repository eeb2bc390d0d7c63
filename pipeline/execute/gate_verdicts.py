"""Whether a step keeps the limits of a recipe, and whether n is large enough to see it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smelt.core.text import count
from smelt.evaluate.metrics import WINDOW_METRICS
from smelt.recipe.recipe import SPEEDS

if TYPE_CHECKING:
    from smelt.planning.plan import PlannedGate

Step = Mapping[str, Any]


@dataclass(frozen=True)
class Evidence:
    """The statistics per example, by metric, of a step and of the baseline; empty where there are none."""

    own: Mapping[str, Any]
    baseline: Mapping[str, Any]


def judge(gate: PlannedGate, step: Step, evidence: Evidence) -> dict[str, Any] | None:
    """Return the verdict of `gate` on `step`, as report.json's `gates` has it; None for a skipped step.

    With `confidence` the bound of the interval is judged instead of the value: a drop must be within the
    limit, and a speed-up above it, even at the worse end. `passed` is None where the step is there but it
    or the baseline that it is compared with cannot be scored on this machine, or its times were disturbed;
    any other missing value is a failure. Either way `reason` says why. `undecided` marks a value that keeps
    the limit while its 95 % interval reaches beyond it; `confidence` decides such a case.
    """
    if step["status"] == "skipped":
        return None
    value = _value_of(gate, step, evidence)
    found = {"metric": gate.metric, "kind": gate.kind, "limit": gate.limit, "value": value}
    found |= {"confidence": gate.confidence, "bound": None, "n_needed": None, "passed": None, "reason": None}
    found["undecided"] = False
    if value is None:
        done = step["status"] in ("done", "cached")
        if done and gate.kind == "max_drop" and gate.metric in step["quality"]:
            return found | {"reason": "the baseline was not scored, so there is nothing to drop from"}
        unscored = done and step["reason"] is not None
        row = smallest_batch(step)
        on_gpu = done and gate.metric == "cpu_speedup" and row is not None and row["speedup"] is not None
        missing = "processor time says nothing of a GPU's work" if on_gpu else "it was not measured"
        reason = step["reason"] or (step["error"] or {}).get("message") or missing
        return found | {"passed": None if unscored or on_gpu else False, "reason": reason}
    if gate.metric == "speedup" and (row := smallest_batch(step)) and not row.get("stable", True):
        return found | {"reason": f"no speed is claimed: {row['reason']}"}
    if gate.confidence is not None and (lacking := _lacking(gate, step, evidence, gate.confidence)):
        # no bound is better than a value that is beyond the limit itself
        return found | ({"reason": lacking} if _keeps(gate, value) else {"passed": False})
    bound = None if gate.confidence is None else _bound_of(gate, step, evidence, gate.confidence)
    passed = _keeps(gate, value if bound is None else bound)
    undecided = passed and gate.confidence is None and not _certain(gate, step)
    return found | {
        "bound": bound, "n_needed": needed(gate, step, evidence), "passed": passed, "undecided": undecided,
    }  # fmt: skip


def _certain(gate: PlannedGate, step: Step) -> bool:
    """Return whether the whole 95 % interval keeps the limit; without one the value counts."""
    if gate.metric == "size_bytes":
        return True
    if gate.metric in SPEEDS:
        ends = (smallest_batch(step) or {}).get(f"{gate.metric}_ci95")
        return not ends or _keeps(gate, min(ends))
    if gate.kind != "max_drop":
        ends = step["quality"][gate.metric]["ci95"]
        return not ends or all(_keeps(gate, end) for end in ends)
    ends = (step["against_baseline"].get(gate.metric) or {}).get("ci95")
    sign = -1 if step["quality"][gate.metric]["higher_is_better"] else 1
    return not ends or all(_keeps(gate, sign * end) for end in ends)


def _keeps(gate: PlannedGate, judged: float) -> bool:
    return judged <= gate.limit if gate.kind in ("max_drop", "max") else judged >= gate.limit


def smallest_batch(step: Step) -> dict[str, Any] | None:
    """Return the step's times at its smallest batch; None where it was not timed."""
    return min(step["latency"], key=lambda row: row["batch_size"], default=None)


def needed(gate: PlannedGate, step: Step, evidence: Evidence) -> int | None:
    """Return how many examples would show a drop as large as the limit; None where there are enough.

    There are too few where the limit lies in the interval of the difference, so that the verdict may be
    chance, and the interval reaches further than the limit on either side: a step that has lost nothing
    could then not be told from one that has lost the limit. The width of an interval falls with the root
    of n; with n itself where so few examples differ that it is made of how many more may. A limit of 0 is
    seen with no n, and nothing is said of it.
    """
    from smelt.evaluate.significance import Statistics, changed_examples, fewest

    difference = step["against_baseline"].get(gate.metric)
    if gate.kind != "max_drop" or difference is None or gate.limit <= 0:
        return None
    if difference["ci95"] is None:
        return None  # so few examples tell nothing of how many it takes
    low, high = difference["ci95"]
    half = float(high - low) / 2
    score = step["quality"][gate.metric]
    at_limit = -gate.limit if score["higher_is_better"] else gate.limit
    if half <= gate.limit or not low <= at_limit <= high:
        return None
    n: int = score["n"]
    sides = [each[gate.metric] for each in (evidence.own, evidence.baseline) if gate.metric in each]
    pair = [Statistics.model_validate(side) for side in sides]
    few = len(pair) == 2 and changed_examples(*pair) < fewest(gate.metric, 0.95)
    return math.ceil(n * (half / gate.limit) ** (1 if few else 2))


def _lacking(gate: PlannedGate, step: Step, evidence: Evidence, confidence: float) -> str:
    """Return why there is no interval of what `gate` judges: too few examples; nothing where there is one."""
    from smelt.evaluate.significance import Statistics, difference_interval, fewest, interval_of

    if gate.metric not in evidence.own:
        return ""
    sides = (evidence.own, evidence.baseline) if gate.kind == "max_drop" else (evidence.own,)
    n = min(len(side[gate.metric]["rows"]) for side in sides if gate.metric in side)
    least = fewest(gate.metric, confidence)
    told = count(n, "window" if gate.metric in WINDOW_METRICS else "example")
    verb = "is" if n == 1 else "are"
    if n < least:
        return f"{told} {verb} too few for confidence {confidence:g}; give {least} or more"
    own = Statistics.model_validate(evidence.own[gate.metric])
    if gate.kind != "max_drop":
        return "" if interval_of(own, confidence) else f"{told} of one value have no interval"
    if not step["against_baseline"].get(gate.metric):
        return ""  # the baseline itself
    other = Statistics.model_validate(evidence.baseline[gate.metric])
    if difference_interval(own, other, confidence):
        return ""
    return f"too few of {told} differ from the baseline's for confidence {confidence:g}; give {least} or more"


def _value_of(gate: PlannedGate, step: Step, evidence: Evidence) -> float | None:
    if gate.metric == "size_bytes":
        return step["size_bytes"]  # type: ignore[no-any-return]
    if gate.metric in SPEEDS:
        row = smallest_batch(step)
        return row[gate.metric] if row else None
    score = step["quality"].get(gate.metric)
    if gate.kind == "max_drop":
        difference = step["against_baseline"].get(gate.metric)
        if difference is None or score is None:
            # the baseline itself has lost nothing; of no baseline nothing is known
            return None if score is None or gate.metric not in evidence.baseline else 0.0
        # a drop of quality: where less is better, it is a rise of the number
        change = float(difference["difference"])
        return 0.0 - change if score["higher_is_better"] else change  # not -change, which may be -0.0
    return score["value"] if score else None


def _bound_of(gate: PlannedGate, step: Step, evidence: Evidence, confidence: float) -> float | None:
    """Return the worse end of the interval that the gate is on; None where the value has none."""
    from smelt.evaluate.significance import Statistics, difference_interval, interval_of

    if gate.metric in SPEEDS:
        return _slowest(gate.metric, step, confidence)
    own = Statistics.model_validate(evidence.own[gate.metric])
    if gate.kind != "max_drop":
        ends = interval_of(own, confidence)
        return ends and ends[gate.kind == "max"]
    if not step["against_baseline"].get(gate.metric):
        return None  # the baseline itself
    other = Statistics.model_validate(evidence.baseline[gate.metric])
    ends = difference_interval(own, other, confidence)
    return ends and (0.0 - ends[0] if step["quality"][gate.metric]["higher_is_better"] else ends[1])


def _slowest(metric: str, step: Step, confidence: float) -> float | None:
    """Return the lower end of the speed-up's interval; the baseline has none."""
    from smelt.evaluate.latency.rounds import speedup

    row = smallest_batch(step)
    ratios = [r[metric] for r in row["rounds"] if r["counted"] and r[metric]] if row else []
    return speedup(ratios, confidence)[1][0] if len(ratios) > 1 else None
