"""Evaluate the gates of a recipe on a step, and the number of samples that a decision needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smelt.core.text import with_count
from smelt.evaluate.metrics import WINDOW_METRICS
from smelt.pipeline.recipe.recipe import SPEED_METRICS

if TYPE_CHECKING:
    from smelt.pipeline.plan.plan import PlannedGate

StepRecord = Mapping[str, Any]


@dataclass(frozen=True)
class GateStatistics:
    """Per-example statistics of a step and of the baseline, by metric; empty if not available."""

    own: Mapping[str, Any]
    baseline: Mapping[str, Any]


def judge_gate(gate: PlannedGate, step: StepRecord, statistics: GateStatistics) -> dict[str, Any] | None:
    """Return the result of `gate` on `step`, as in `gates` of report.json; None for a skipped step.

    With `confidence`, the worse end of the interval is compared with the limit instead of the value.
    `passed` is None if the step exists but it or the baseline cannot be scored on this machine, or if its
    latency measurement was disturbed; any other missing value fails. `reason` explains both, and `cause` is
    its code. `undecided`
    marks a value within the limit whose 95 % interval crosses it; `confidence` decides such a case.
    """
    if step["status"] == "skipped":
        return None
    value = _gated_value(gate, step, statistics)
    found = {"metric": gate.metric, "kind": gate.kind, "limit": gate.limit, "value": value}
    found |= {"confidence": gate.confidence, "bound": None, "n_needed": None, "passed": None}
    found |= {"undecided": False, "cause": None, "reason": None}
    if value is None:
        passed, cause, reason = _explain_missing_value(gate, step)
        return found | {"passed": passed, "cause": cause, "reason": reason}
    if gate.metric == "speedup" and (row := smallest_batch_row(step)) and not row.get("stable", True):
        return found | {"cause": row["cause"], "reason": f"measurement disturbed: {row['reason']}"}
    if gate.confidence is not None and (
        lacking := _missing_interval_reason(gate, step, statistics, gate.confidence)
    ):
        # without an interval, a value beyond the limit still fails
        if not _is_within_limit(gate, value):
            return found | {"passed": False}
        return found | {"cause": lacking[0], "reason": lacking[1]}
    bound = None if gate.confidence is None else _gated_bound(gate, step, statistics, gate.confidence)
    passed = _is_within_limit(gate, value if bound is None else bound)
    undecided = passed and gate.confidence is None and not _is_interval_within_limit(gate, step)
    return found | {
        "bound": bound,
        "n_needed": examples_needed(gate, step, statistics),
        "passed": passed,
        "undecided": undecided,
    }


def _explain_missing_value(gate: PlannedGate, step: StepRecord) -> tuple[bool | None, str, str]:
    """Return whether a gate without a value passes (None: not judged), and the reason's code and text."""
    done = step["status"] in ("done", "cached")
    if done and gate.kind == "max_drop" and gate.metric in step["quality"]:
        return None, "baseline-not-scored", "the baseline was not scored"
    if step["reason"]:
        return None if done else False, step["cause"], step["reason"]
    row = smallest_batch_row(step)
    if done and gate.metric == "cpu_speedup" and row is not None and row["speedup"] is not None:
        return None, "gpu-work-not-counted", "CPU time does not include work on the GPU"
    if step["error"]:
        return False, step["error"]["code"], step["error"]["message"]
    return False, "not-measured", "not measured"


def _is_interval_within_limit(gate: PlannedGate, step: StepRecord) -> bool:
    """Return whether the whole 95 % interval is within the limit; True without an interval."""
    if gate.metric == "size_bytes":
        return True
    if gate.metric in SPEED_METRICS:
        ends = (smallest_batch_row(step) or {}).get(f"{gate.metric}_ci95")
        return not ends or _is_within_limit(gate, min(ends))
    if gate.kind != "max_drop":
        ends = step["quality"][gate.metric]["ci95"]
        return not ends or all(_is_within_limit(gate, end) for end in ends)
    ends = (step["against_baseline"].get(gate.metric) or {}).get("ci95")
    sign = -1 if step["quality"][gate.metric]["higher_is_better"] else 1
    return not ends or all(_is_within_limit(gate, sign * end) for end in ends)


def _is_within_limit(gate: PlannedGate, value: float) -> bool:
    return value <= gate.limit if gate.kind in ("max_drop", "max") else value >= gate.limit


def smallest_batch_row(step: StepRecord) -> dict[str, Any] | None:
    """Return the step's latency at its smallest batch size; None if not measured."""
    return min(step["latency"], key=lambda row: row["batch_size"], default=None)


def examples_needed(gate: PlannedGate, step: StepRecord, statistics: GateStatistics) -> int | None:
    """Return the number of examples needed to detect a drop as large as the limit; None if there are enough.

    There are too few if the limit is inside the interval of the difference, so that the result may be chance,
    and the interval's half width exceeds the limit, so that no drop cannot be distinguished from a drop of
    the limit. The width decreases with the square root of n, or with n if very few examples differ. A limit
    of 0 cannot be detected with any n and returns None.
    """
    from smelt.evaluate.significance import Statistics, changed_examples, min_examples

    difference = step["against_baseline"].get(gate.metric)
    if gate.kind != "max_drop" or difference is None or gate.limit <= 0:
        return None
    if difference["ci95"] is None:
        return None  # too few examples to estimate the number
    low, high = difference["ci95"]
    half = float(high - low) / 2
    score = step["quality"][gate.metric]
    at_limit = -gate.limit if score["higher_is_better"] else gate.limit
    if half <= gate.limit or not low <= at_limit <= high:
        return None
    n: int = score["n"]
    sides = [each[gate.metric] for each in (statistics.own, statistics.baseline) if gate.metric in each]
    pair = [Statistics.model_validate(side) for side in sides]
    few = len(pair) == 2 and changed_examples(*pair) < min_examples(gate.metric, 0.95)
    return math.ceil(n * (half / gate.limit) ** (1 if few else 2))


def _missing_interval_reason(
    gate: PlannedGate, step: StepRecord, statistics: GateStatistics, confidence: float
) -> tuple[str, str] | None:
    """Return the code and text of why there is no interval for `gate`; None if there is one."""
    from smelt.evaluate.significance import Statistics, difference_interval, metric_interval, min_examples

    if gate.metric not in statistics.own:
        return None
    sides = (statistics.own, statistics.baseline) if gate.kind == "max_drop" else (statistics.own,)
    n = min(len(side[gate.metric]["rows"]) for side in sides if gate.metric in side)
    least = min_examples(gate.metric, confidence)
    counted = with_count(n, "window" if gate.metric in WINDOW_METRICS else "example")
    verb = "is" if n == 1 else "are"
    if n < least:
        text = f"{counted} {verb} too few for confidence {confidence:g}; use {least} or more"
        return "too-few-examples", text
    own = Statistics.model_validate(statistics.own[gate.metric])
    if gate.kind != "max_drop":
        text = f"no interval, as all of {counted} have one value"
        return None if metric_interval(own, confidence) else ("equal-scores", text)
    other = statistics.baseline.get(gate.metric) if step["against_baseline"].get(gate.metric) else None
    if other is None or difference_interval(own, Statistics.model_validate(other), confidence):
        return None  # without a difference it is the baseline itself
    text = (
        f"too few of {counted} differ from the baseline's for confidence {confidence:g}; use {least} or more"
    )
    return "too-few-differences", text


def _gated_value(gate: PlannedGate, step: StepRecord, statistics: GateStatistics) -> float | None:
    if gate.metric == "size_bytes":
        return step["size_bytes"]  # type: ignore[no-any-return]
    if gate.metric in SPEED_METRICS:
        row = smallest_batch_row(step)
        return row[gate.metric] if row else None
    score = step["quality"].get(gate.metric)
    if gate.kind == "max_drop":
        difference = step["against_baseline"].get(gate.metric)
        if difference is None or score is None:
            # the baseline itself has no drop; without a baseline the drop is unknown
            return None if score is None or gate.metric not in statistics.baseline else 0.0
        # a drop of quality is an increase of the value if lower is better
        change = float(difference["difference"])
        return 0.0 - change if score["higher_is_better"] else change  # not -change, which may be -0.0
    return score["value"] if score else None


def _gated_bound(
    gate: PlannedGate, step: StepRecord, statistics: GateStatistics, confidence: float
) -> float | None:
    """Return the worse end of the gate's interval; None if there is no interval."""
    from smelt.evaluate.significance import Statistics, difference_interval, metric_interval

    if gate.metric in SPEED_METRICS:
        return _speedup_lower_bound(gate.metric, step, confidence)
    own = Statistics.model_validate(statistics.own[gate.metric])
    if gate.kind != "max_drop":
        ends = metric_interval(own, confidence)
        return ends and ends[gate.kind == "max"]
    if not step["against_baseline"].get(gate.metric):
        return None  # the baseline itself
    other = Statistics.model_validate(statistics.baseline[gate.metric])
    ends = difference_interval(own, other, confidence)
    return ends and (0.0 - ends[0] if step["quality"][gate.metric]["higher_is_better"] else ends[1])


def _speedup_lower_bound(metric: str, step: StepRecord, confidence: float) -> float | None:
    """Return the lower end of the speed-up's interval; None for the baseline."""
    from smelt.evaluate.latency.summary import mean_speedup

    row = smallest_batch_row(step)
    ratios = [r[metric] for r in row["rounds"] if r["counted"] and r[metric]] if row else []
    return mean_speedup(ratios, confidence)[1][0] if len(ratios) > 1 else None
