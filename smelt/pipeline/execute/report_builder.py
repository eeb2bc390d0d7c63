"""Build report.json during a run, with the verdicts of its gates.

A gate of a recipe is evaluated on a step, with the number of samples that a decision needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact
from smelt.core.errors import SmeltError
from smelt.core.messages import Message, messages_to_json, warning, with_count
from smelt.data.splits import Split
from smelt.evaluate.environment import describe_environment, float_dtype
from smelt.evaluate.metrics.registry import WINDOW_METRICS
from smelt.evaluate.report.schema import validate_report
from smelt.evaluate.report.verdict import UNFINISHED, decide, pareto_front, shortlisted
from smelt.evaluate.report.view import score_texts
from smelt.evaluate.significance import (
    Statistics,
    changed_examples,
    compare_steps,
    difference_interval,
    holm,
    metric_interval,
    min_examples,
)
from smelt.pipeline.inspect.machine import is_deployable
from smelt.pipeline.recipe.recipe import EXACT_QUANTITIES, SPEED_METRICS

if TYPE_CHECKING:
    from smelt.pipeline.plan.plan import Plan, PlannedGate, PlanStep


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
    result = {"metric": gate.metric, "kind": gate.kind, "limit": gate.limit, "value": value}
    result |= {"confidence": gate.confidence, "bound": None, "n_needed": None, "passed": None}
    result |= {"undecided": False, "cause": None, "reason": None}
    if value is None:
        passed, cause, reason = _explain_missing_value(gate, step)
        return result | {"passed": passed, "cause": cause, "reason": reason}
    if gate.metric == "speedup" and (row := smallest_batch_row(step)) and not row.get("stable", True):
        return result | {"cause": row["cause"], "reason": f"measurement disturbed: {row['reason']}"}
    if gate.confidence is not None and (
        lacking := _missing_interval_reason(gate, step, statistics, gate.confidence)
    ):
        # without an interval, a value beyond the limit still fails
        if not _is_within_limit(gate, value):
            return result | {"passed": False}
        return result | {"cause": lacking[0], "reason": lacking[1]}
    bound = None if gate.confidence is None else _gated_bound(gate, step, statistics, gate.confidence)
    passed = _is_within_limit(gate, value if bound is None else bound)
    undecided = passed and gate.confidence is None and not _is_interval_within_limit(gate, step)
    return result | {
        "bound": bound,
        "n_needed": examples_needed(gate, step, statistics),
        "passed": passed,
        "undecided": undecided,
    }


def _explain_missing_value(gate: PlannedGate, step: StepRecord) -> tuple[bool | None, str, str]:
    """Return whether a gate without a value passes (None: not judged), and the reason's code and text."""
    done = step["status"] in ("done", "cached")
    if done and gate.kind == "max_degradation" and gate.metric in step["quality"]:
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
    if gate.metric in EXACT_QUANTITIES:
        return True
    if gate.metric in SPEED_METRICS:
        interval = (smallest_batch_row(step) or {}).get(f"{gate.metric}_ci95")
        return not interval or _is_within_limit(gate, min(interval))
    if gate.kind != "max_degradation":
        interval = step["quality"][gate.metric]["ci95"]
        return not interval or all(_is_within_limit(gate, end) for end in interval)
    interval = (step["against_baseline"].get(gate.metric) or {}).get("ci95")
    sign = -1 if step["quality"][gate.metric]["higher_is_better"] else 1
    return not interval or all(_is_within_limit(gate, sign * end) for end in interval)


def _is_within_limit(gate: PlannedGate, value: float) -> bool:
    return value <= gate.limit if gate.kind in ("max_degradation", "max") else value >= gate.limit


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
    difference = step["against_baseline"].get(gate.metric)
    if gate.kind != "max_degradation" or difference is None or gate.limit <= 0:
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
    if gate.metric not in statistics.own:
        return None
    sides = (statistics.own, statistics.baseline) if gate.kind == "max_degradation" else (statistics.own,)
    n = min(len(side[gate.metric]["rows"]) for side in sides if gate.metric in side)
    minimum = min_examples(gate.metric, confidence)
    amount = with_count(n, "window" if gate.metric in WINDOW_METRICS else "example")
    verb = "is" if n == 1 else "are"
    if n < minimum:
        text = f"{amount} {verb} too few for confidence {confidence:g}; use {minimum} or more"
        return "too-few-examples", text
    step_values = Statistics.model_validate(statistics.own[gate.metric])
    if gate.kind != "max_degradation":
        text = f"no interval, as all of {amount} have one value"
        return None if metric_interval(step_values, confidence) else ("equal-scores", text)
    baseline_values = (
        statistics.baseline.get(gate.metric) if step["against_baseline"].get(gate.metric) else None
    )
    if baseline_values is None or difference_interval(
        step_values, Statistics.model_validate(baseline_values), confidence
    ):
        return None  # without a difference it is the baseline itself
    text = (
        f"too few of {amount} differ from the baseline's for confidence {confidence:g}; use {minimum} or more"
    )
    return "too-few-differences", text


def _gated_value(gate: PlannedGate, step: StepRecord, statistics: GateStatistics) -> float | None:
    if gate.metric in EXACT_QUANTITIES:
        return step[gate.metric]  # type: ignore[no-any-return]
    if gate.metric in SPEED_METRICS:
        latency_row = smallest_batch_row(step)
        return latency_row[gate.metric] if latency_row else None
    score = step["quality"].get(gate.metric)
    if gate.kind == "max_degradation":
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
    if gate.metric in SPEED_METRICS:
        return _speedup_lower_bound(gate.metric, step, confidence)
    step_values = Statistics.model_validate(statistics.own[gate.metric])
    if gate.kind != "max_degradation":
        interval = metric_interval(step_values, confidence)
        return interval and interval[gate.kind == "max"]
    if not step["against_baseline"].get(gate.metric):
        return None  # the baseline itself
    baseline_values = Statistics.model_validate(statistics.baseline[gate.metric])
    interval = difference_interval(step_values, baseline_values, confidence)
    return interval and (
        0.0 - interval[0] if step["quality"][gate.metric]["higher_is_better"] else interval[1]
    )


def _speedup_lower_bound(metric: str, step: StepRecord, confidence: float) -> float | None:
    """Return the lower end of the speed-up's interval; None for the baseline."""
    from smelt.evaluate.latency.summary import mean_speedup

    latency_row = smallest_batch_row(step)
    ratios = [r[metric] for r in latency_row["rounds"] if r["counted"] and r[metric]] if latency_row else []
    return mean_speedup(ratios, confidence)[1][0] if len(ratios) > 1 else None


CANNOT_RUN_HERE = "cannot-run-here"
_EMPTY_STEP_FIELDS: dict[str, Any] = {
    "cause": None,
    "reason": None,
    "error": None,
    "format": None,
    "target": None,
    "runner": None,
    "device": None,
    "artifact": None,
    "deployable": None,
    "key": None,
    "parameters": None,
    "operations": None,
    "size_bytes": None,
    "float_dtype": None,
    "seconds": None,
    "peak_memory_bytes": None,
    "gpu_memory_bytes": None,
}


# The agreement of a step's outputs with the baseline's, from the scores of both.
CompareOutputs = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any] | None]


class ReportBuilder:
    """Builds the report of one run; `snapshot()` is valid at any time."""

    def __init__(
        self, plan: Plan, data: Mapping[str, Split], limit: int | None, compare_outputs: CompareOutputs
    ) -> None:

        self.plan, self._split, self._compare = plan, data[plan.judged_on], compare_outputs
        self._scores: dict[str, Mapping[str, Any]] = {}
        self.status = "passed"
        self.finished = False
        self._start_time = time.monotonic()
        self.statistics: dict[str, dict[str, Any]] = {}
        self.test_statistics: dict[str, dict[str, Any]] = {}
        sample_counts = {name: len(split) for name, split in data.items()}
        self.data: dict[str, Any] = {
            "schema": 3,
            "recipe": {"name": plan.path.stem, **plan.recipe_dict(), "rows": sample_counts, "limit": limit},
            "environment": describe_environment(),
            "status": self.status,
            "baseline": None,
            "judged_on": plan.judged_on,
            "started": time.strftime("%Y-%m-%dT%H:%M"),
            "seconds": None,
            "warnings": messages_to_json(plan.warnings),
            "steps": [_empty_step("model", "model", None, {})]
            + [_empty_step(s.name, s.stage, s.parent, s.settings.to_report()) for s in plan.steps],
            "pareto_front": [],
            "verdict": None,
        }
        self._steps = {step["name"]: step for step in self.data["steps"]}
        self._set_baseline()

    def _set_baseline(self) -> None:
        """Set the baseline if it is in the report; `--until` may exclude it."""
        if self.plan.recipe.baseline in self._steps:
            self.data["baseline"] = self.plan.recipe.baseline

    def add_warning(self, warning: Message) -> bool:
        """Add a warning about the whole run; return whether it is new."""
        (entry,) = messages_to_json([warning])
        is_new = entry not in self.data["warnings"]
        self.data["warnings"] += [entry] if is_new else []
        return is_new

    def add_step(self, name: str, artifact: Artifact, score: Mapping[str, Any], cached: bool) -> None:
        """Add the scores of a finished step."""
        step, device = self._steps[name], score.get("device")
        step.update(
            _artifact_fields(name, artifact, cached),
            runner=score["runner"].split()[0],
            device=device,
            deployable=is_deployable(artifact, device),
            warnings=[*messages_to_json(artifact.manifest.warnings), *score["warnings"]],
            quality=dict(score["quality"]),
            classes=score.get("classes"),
            outputs=score.get("outputs"),
        )
        self.statistics[name], self._scores[name] = score["statistics"], score
        step["against_parent"] = _paired_differences(self.statistics, name, step["parent"])
        step["against_baseline"] = _paired_differences(self.statistics, name, self.data["baseline"])
        self._compare_with_baseline(name)
        if name == self.data["baseline"]:  # steps scored before the baseline are compared now
            for scored_name in self.statistics:
                self._steps[scored_name]["against_baseline"] = _paired_differences(
                    self.statistics, scored_name, name
                )
                self._compare_with_baseline(scored_name)

    def _compare_with_baseline(self, name: str) -> None:
        """Set the agreement, confusions and examples of a step."""
        from smelt.evaluate.report.examples import compare_examples

        score = self._scores[name]
        base = None if name == self.data["baseline"] else self._scores.get(self.data["baseline"])
        self._steps[name].update(
            compare_examples(score, base, self._split, self.plan.recipe.score.examples),
            agreement=None if base is None else self._compare(score, base),
        )

    def add_test_scores(self, name: str, score: Mapping[str, Any]) -> None:
        """Add the test scores of a step that was chosen on validation; call it for the baseline first."""
        self.test_statistics[name] = score["statistics"]
        differences = _paired_differences(self.test_statistics, name, self.data["baseline"])
        self._steps[name]["test"] = {
            "quality": dict(score["quality"]),
            "against_baseline": differences,
            "gates": [],
        }
        self._steps[name]["warnings"] += [
            message | {"message": f"on test: {message['message']}"} for message in score["warnings"]
        ]

    def add_test_failure(self, name: str, failure: SmeltError) -> None:
        """Record that a step could not be scored on test."""
        self._set_status("error")
        self._steps[name]["error"] = messages_to_json([failure.as_message().with_prefix("on test: ")])[0]

    def judge_test_gates(self) -> None:
        """Evaluate the gates on test scores, which a step must meet too."""
        baseline_statistics = self.test_statistics.get(self.data["baseline"], {})
        for name, step_statistics in self.test_statistics.items():
            step = self._steps[name]
            gates = [gate for gate in self.plan.gates_of(name) if gate.metric in step_statistics]
            verdicts = [
                judge_gate(gate, step | step["test"], GateStatistics(step_statistics, baseline_statistics))
                for gate in gates
            ]
            step["test"]["gates"] = verdicts
            if self.status == "passed" and any(verdict["passed"] is False for verdict in verdicts if verdict):
                self._set_status("gate-failed")

    def update_scores(self, name: str, artifact: Artifact, score: Mapping[str, Any]) -> None:
        """Replace the scores of a finished step after they were completed."""
        self.add_step(name, artifact, score, self._steps[name]["status"] == "cached")

    def add_previous_step(
        self, step: PlanStep, artifact: Artifact, score: Mapping[str, Any] | None, reason: str | None
    ) -> None:
        """Add a step that this run excludes, with artifact and stored score of an earlier run.

        reason: why it cannot be scored on this machine, or None.
        """
        entry = _empty_step(step.name, step.stage, step.parent, step.settings.to_report())
        self._steps[step.name] = entry
        self._set_baseline()
        if score is None:
            unscored = "not scored with these settings by the earlier run"
            cause = (CANNOT_RUN_HERE, reason) if reason else ("not-scored-before", unscored)
            self.add_unscored_step(step.name, artifact, cause, True)
        else:
            self.add_step(step.name, artifact, score, True)
        entry["from_previous_run"] = True
        order = ["model", *(name for name in self.plan.step_order if name in self._steps)]
        self.data["steps"] = [self._steps[name] for name in order]

    def add_unscored_step(self, name: str, artifact: Artifact, why: tuple[str, str], cached: bool) -> None:
        """Add a finished step without scores. why: code and text of the reason."""
        self._steps[name].update(_artifact_fields(name, artifact, cached), cause=why[0], reason=why[1])

    def add_skipped_step(self, name: str, reason: str) -> None:
        """Record an optional step that could not run here."""
        self._steps[name].update(status="skipped", cause=CANNOT_RUN_HERE, reason=reason)

    def add_unreached_step(self, name: str, reason: str) -> None:
        """Record a step whose parent is missing."""
        is_parent_skipped = self._steps[self._steps[name]["parent"]]["status"] == "skipped"
        status = "skipped" if is_parent_skipped else "not-reached"
        self._steps[name].update(status=status, cause="missing-source", reason=reason)

    def add_failure(self, failure: SmeltError, name: str | None = None) -> None:
        """Record an error of the step `name`, or else of the first step not reached."""
        self._set_status("error")
        first_unreached = next((s["name"] for s in self.data["steps"] if s["status"] == "not-reached"), None)
        name = name or first_unreached or self.data["steps"][-1]["name"]
        self._steps[name].update(status="error", error=messages_to_json([failure.as_message()])[0])

    def mark_interrupted(self) -> None:
        """Record that the user stopped the run."""
        self._set_status("interrupted")

    def add_latency(self, measured: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the results of `LatencyScores.measure`."""
        for name, value in measured.items():
            memory = {key: value[key] for key in ("peak_memory_bytes", "gpu_memory_bytes")}
            self._steps[name].update(latency=value["rows"], **memory)
            if value["error"]:
                self._set_status("error")
                error = value["error"]
                self._steps[name]["error"] = error | {"message": f"latency: {error['message']}"}

    def add_folds(self, fold_scores: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the scores of cross-validation, by step and metric."""
        for name, scores in fold_scores.items():
            self._steps[name]["folds"] = dict(scores)

    def add_operations(self, counts: Mapping[str, int]) -> None:
        """Add the operations of torch steps, by name; any other step has those of its parent."""
        for step in self.data["steps"]:
            if step["status"] in ("done", "cached"):
                parent = self._steps.get(step["parent"])
                inherited = parent["operations"] if parent and step["format"] != "torch" else None
                step["operations"] = counts.get(step["name"], inherited)

    def add_layer_sqnr(self, name: str, layer_sqnr: Mapping[str, Any]) -> None:
        """Add the comparison of a step's layers with the baseline's."""
        self._steps[name]["layer_sqnr"] = dict(layer_sqnr)

    def can_compare_tokens(self, name: str) -> bool:
        """Return whether a step is the baseline, or has texts that were compared with the baseline's."""
        return name == self.data["baseline"] or "chrf" in (self._steps[name]["agreement"] or {})

    def add_token_divergence(self, name: str, divergence: Mapping[str, Any]) -> None:
        """Add the comparison of a step's next-token distributions with the baseline's to its agreement."""
        self._steps[name]["agreement"] = {**self._steps[name]["agreement"], **divergence}

    def mark_finished(self) -> None:
        """Mark the report as complete."""
        self.finished = True

    def judge_gates(self) -> None:
        """Evaluate the gates and compute the Pareto front."""
        for step in self.data["steps"]:
            gates = self.plan.gates_of(step["name"])
            step["gates"] = [
                g for gate in gates if (g := judge_gate(gate, step, self._gate_statistics(step))) is not None
            ]
        if self.status == "passed" and any(self._fails_gate(step) for step in self.data["steps"]):
            self._set_status("gate-failed")
        self._warn_dtype_differences()
        self.data["pareto_front"] = pareto_front(self.data["steps"], self.data["baseline"])

    def _warn_dtype_differences(self) -> None:
        """Add a warning about steps whose unquantized weights have another dtype than the baseline's."""
        base = self._steps.get(self.data["baseline"], {}).get("float_dtype")
        steps_by_dtype: dict[str, list[str]] = {}
        for step in self.data["steps"]:
            if base and step["float_dtype"] not in (None, base):
                steps_by_dtype.setdefault(step["float_dtype"], []).append(step["name"])
        for dtype, names in steps_by_dtype.items():
            self.add_warning(
                warning(
                    "sizes-differ-in-dtype",
                    f"Sizes are not directly comparable: unquantized weights are {base} in"
                    f" '{self.data['baseline']}' and {dtype} in {', '.join(names)}.",
                )
            )

    def _gate_statistics(self, step: Mapping[str, Any]) -> GateStatistics:
        """Return the statistics for intervals of the step's scores."""
        statistics = self.statistics
        return GateStatistics(statistics.get(step["name"], {}), statistics.get(self.data["baseline"], {}))

    def _fails_gate(self, step: Mapping[str, Any]) -> bool:
        """Return whether `step` fails a gate; a gate without result counts if the step is not optional."""
        optional = {s.name for s in self.plan.steps if s.optional}
        verdicts = [gate["passed"] for gate in step["gates"]]
        return False in verdicts or (None in verdicts and step["name"] not in optional)

    def score_texts(self, name: str, on_test: bool = False) -> list[str]:
        """Return the first metric of a step, and its difference from the baseline with the interval."""
        step = next(step for step in validate_report(self.data).steps if step.name == name)
        scored = step.test if on_test else step
        return score_texts(scored) if scored else []

    def is_deployable(self, name: str) -> bool:
        """Return whether the artifact of a finished step is deployable."""
        return self._steps[name]["deployable"] is True

    def add_latency_failure(self, failure: SmeltError) -> None:
        """Record on the baseline that latency could not be measured."""
        self._set_status("error")
        self._steps[self.data["baseline"]]["error"] = messages_to_json([failure.as_message()])[0]

    def snapshot(self) -> dict[str, Any]:
        """Return the current report; the status of an unfinished run is `interrupted`.

        So the report of a killed run has the right status.
        """
        _correct_p_values(step["against_baseline"] for step in self.data["steps"])
        _correct_p_values(step["test"]["against_baseline"] for step in self.data["steps"] if step.get("test"))
        verdict = decide(validate_report({**self.data, "verdict": None})) if self.finished else UNFINISHED
        self.data["verdict"] = verdict.model_dump(mode="json")
        self.data["seconds"] = round(time.monotonic() - self._start_time, 1)
        is_running = self.status == "passed" and not self.finished
        return {**self.data, "status": "interrupted"} if is_running else self.data

    def shortlisted_steps(self) -> list[str]:
        """Return the steps to score on test after they were chosen on validation; the baseline is first."""
        return shortlisted(validate_report(self.data))

    def _set_status(self, status: str) -> None:
        self.status = self.data["status"] = status


def _paired_differences(statistics: Mapping[str, Any], name: str, other: str | None) -> dict[str, Any]:
    """Return the paired differences between the steps `name` and `other` by metric; empty without `other`."""
    if other is None or other == name or other not in statistics:
        return {}
    step_statistics, other_statistics = statistics[name], statistics[other]
    return {
        metric: dict(
            compare_steps(
                Statistics.model_validate(step_statistics[metric]),
                Statistics.model_validate(other_statistics[metric]),
            )
        )
        for metric in step_statistics
        if metric in other_statistics
    }


def _correct_p_values(comparisons: Iterable[dict[str, Any] | None]) -> None:
    """Set `p_value_holm` of all paired differences, one family: every step that was scored, every metric."""
    differences = [difference for by_metric in comparisons for difference in (by_metric or {}).values()]
    for difference, corrected in zip(
        differences, holm([entry["p_value"] for entry in differences]), strict=True
    ):
        difference["p_value_holm"] = corrected


def _empty_step(name: str, stage: str, parent: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "stage": stage,
        "parent": parent,
        "status": "not-reached",
        "from_previous_run": False,
        **_EMPTY_STEP_FIELDS,
        "settings": settings,
        "warnings": [],
        "quality": {},
        "latency": [],
        "against_baseline": {},
        "against_parent": {},
        "gates": [],
        "test": None,
        "agreement": None,
        "folds": {},
        "layer_sqnr": None,
        "confusion": None,
        "examples": None,
        "classes": None,
        "outputs": None,
        "details": {},
    }


def _artifact_fields(name: str, artifact: Artifact, cached: bool) -> dict[str, Any]:
    """Return the report's fields of an artifact that do not depend on scores."""
    manifest = artifact.manifest
    return {
        "status": "cached" if cached else "done",
        "format": artifact.format,
        "target": manifest.details.get("target"),
        "artifact": f"artifacts/{name}",
        "deployable": is_deployable(artifact, None),
        "key": artifact.key,
        "parameters": manifest.details.get("parameters"),
        "size_bytes": artifact.size_bytes,
        "float_dtype": float_dtype(artifact),
        "seconds": manifest.seconds,
        "warnings": messages_to_json(manifest.warnings),
        "details": {k: v for k, v in manifest.details.items() if k not in ("parameters", "target")},
    }
