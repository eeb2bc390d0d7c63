"""The verdict of a report: the step to deploy, what it loses and gains, and how to ship it; or why none.

`decide` is the one place where a step is recommended. The result is the field `verdict` of report.json,
which the terminal, report.md and report.html show.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smelt.core.messages import Message, warning
from smelt.data.splits import CUSTOM_TASK, TEXT_TO_TEXT_TASKS
from smelt.evaluate.metrics import WINDOW_METRICS
from smelt.evaluate.report import view
from smelt.evaluate.report.schema import (
    LatencyReport,
    Quality,
    ReportData,
    ScoreDifference,
    ScoresOnTest,
    StepReport,
    Verdict,
    is_step_at_chance,
)
from smelt.evaluate.report.view import gate_text

# Smaller differences of processor time are not significant: other work that shares caches slows some more.
_MIN_CPU_DIFFERENCE = 0.10
# If an interval extends further below the baseline than this fraction of its score, more samples are needed.
_MAX_UNCERTAIN_DROP = 0.05
# With fewer samples, resampled intervals are unreliable.
_MIN_EXAMPLES = 20
# Metrics that are perfect for the baseline by definition, so that any change of outputs is worse; losses up
# to `_NEGLIGIBLE_POINTS` are accepted unless a gate decides.
_BASELINE_PERFECT_METRICS = ("agreement", "top1", "relative_error")
_NEGLIGIBLE_POINTS = 1.0

UNFINISHED = Verdict(
    reason="not-finished", text="No step is recommended: the run has not finished, its gates are not judged."
)
"""The verdict of a run in progress, or of one that was interrupted."""


@dataclass(frozen=True)
class _Pick:
    """A step with its times at the smallest batch size, None where it was not timed.

    by_cpu_time: whether its speed-up is by processor time. doubt: why no wall-clock speed is claimed.
    """

    step: StepReport
    times: LatencyReport | None
    by_cpu_time: bool = False
    doubt: str | None = None

    @property
    def speedup(self) -> float | None:
        """The speed-up that is claimed."""
        if self.times is None or (self.doubt and not self.by_cpu_time):
            return None
        return self.times.cpu_speedup if self.by_cpu_time else self.times.speedup

    @property
    def speedup_ci95(self) -> tuple[float, float] | None:
        """The interval of `speedup`."""
        if self.times is None or self.speedup is None:
            return None
        return self.times.cpu_speedup_ci95 if self.by_cpu_time else self.times.speedup_ci95

    @property
    def is_faster(self) -> bool:
        """Whether the step is faster than the baseline, beyond the interval."""
        return self.speedup is not None and min(self.speedup, *(self.speedup_ci95 or ())) > 1


def decide(report: ReportData) -> Verdict:
    """Return the verdict of a finished run: the step to deploy, or why none is recommended.

    Candidates are the deployable steps, other than the baseline, that were compared with it, are better than
    chance, fail no gate, and lose nothing significant by the first metric (p < 0.05, not corrected, so that
    the interval in the text shows the same). A loss is accepted where the step's gates on that metric pass,
    and up to 1 point of a metric that is perfect for the baseline by definition.

    Recommended is the fastest candidate by the paired speed-up at the smallest batch size. Where the times of
    a candidate that may be the fastest were disturbed, processor time decides. Where nothing was timed, or
    nothing is faster, it is the smallest, of graphs for ONNX Runtime if there are any.
    """
    metric = next(iter(view.metric_names(report)), None)
    steps = [
        step
        for step in report.steps
        if step.status in ("done", "cached")
        and step.artifact
        and step.name != report.baseline
        and step.deployable is not False
    ]
    if not steps:
        return _none("no-deployable-step", "no step can be deployed. Add a stage that exports, such as onnx.")
    compared = [step for step in steps if metric in step.quality and metric in step.against_baseline]
    if metric is None or not compared:
        return _none("not-scored", "the quality of no step was compared with the baseline's.")
    useful = [step for step in compared if not step.quality[metric].at_chance]
    if not useful:
        sign = 1 if compared[0].quality[metric].higher_is_better else -1
        best = max(compared, key=lambda step: sign * step.quality[metric].value)
        return _none("at-chance", _chance_text(best, metric))
    passing = [step for step in useful if all(gate.passed is not False for gate in step.gates)]
    if not passing:
        return _closest("gates-failed", "none passes all its gates.", useful, metric, report)
    kept = [step for step in passing if _accepts_loss(step, metric) or not _is_worse(step, metric)]
    if not kept:
        return _closest("significantly-worse", "all are significantly worse.", passing, metric, report)
    return _recommend(_choose(kept, report), metric, report)


def shortlisted(report: ReportData) -> list[str]:
    """Return the steps to score on test after they were chosen on validation; the baseline is first.

    They are the baseline, the Pareto-optimal steps and the step that the verdict names; where it names none,
    the smallest graph for ONNX Runtime that fails no gate.
    """
    found = decide(report)
    named = [report.baseline, *report.frontier, found.step, found.closest]
    if not (found.step or found.closest):
        able = [step for step in report.steps if step.artifact and _is_cpu_graph(step)]
        able = [step for step in able if all(gate.passed is not False for gate in step.gates)]
        named += [step.name for step in sorted(able, key=lambda step: step.size_bytes or 0)[:1]]
    scored = {step.name for step in report.steps if step.quality}
    return [name for name in dict.fromkeys(named) if name in scored]


def _none(reason: Any, text: str) -> Verdict:
    return Verdict(reason=reason, text=f"No step is recommended: {text}")


def _closest(reason: Any, text: str, steps: Sequence[StepReport], metric: str, report: ReportData) -> Verdict:
    """Return that no step is recommended, with the step of the best score."""
    sign = 1 if steps[0].quality[metric].higher_is_better else -1
    best = max(steps, key=lambda step: sign * step.quality[metric].value)
    failed = [f"{view.metric_label(gate.metric)} {gate.kind}" for gate in best.gates if gate.passed is False]
    named = f" {best.name} comes closest: {_score_text(best, best, metric, report)}"
    hint = (
        f"; it fails {' and '.join(failed)}."
        if failed
        else f". To accept such a loss, set a gate: gates: {{{metric}: {{max_drop: NUMBER}}}}."
    )
    return Verdict(
        reason=reason,
        text=f"No step is recommended: {text}{named}{hint}",
        closest=best.name,
        **_loss_fields(best, metric),
    )


def _is_worse(step: StepReport | ScoresOnTest, metric: str) -> bool:
    """Return whether a step loses significantly, by the p-value of this one comparison."""
    found, sign = step.against_baseline[metric], 1 if step.quality[metric].higher_is_better else -1
    if found.is_random or not round(found.difference, view.MAX_DIGITS):
        return False
    return view.is_significant_p_value(found.p_value) and sign * found.difference < 0


def _passes_gates(step: StepReport, metric: str) -> bool:
    verdicts = [gate.passed for gate in step.gates if gate.metric == metric]
    return bool(verdicts) and all(verdicts)


def _is_negligible_loss(step: StepReport | ScoresOnTest, metric: str) -> bool:
    """Return whether a step loses little agreement with the baseline, if that is the metric.

    `top1` counts too, if scored: close outputs may still have another maximum.
    """
    if metric not in _BASELINE_PERFECT_METRICS:
        return False
    tested = step.against_baseline
    judged = [metric, *(name for name in ("top1",) if name in tested)]
    return all(abs(tested[name].difference) <= _NEGLIGIBLE_POINTS for name in judged)


def _accepts_loss(step: StepReport, metric: str) -> bool:
    return _passes_gates(step, metric) or _is_negligible_loss(step, metric)


def _choose(steps: Sequence[StepReport], report: ReportData) -> _Pick | None:
    """Return the fastest step, or the smallest; None if none is faster or smaller than the baseline."""
    sizes, base = view.batch_sizes(report), report.baseline_step
    timed = [
        (step, row)
        for step in steps
        if (row := step.latency_at(sizes[0]) if sizes else None) and row.speedup is not None
    ]
    fastest = _fastest(timed)
    if fastest and fastest.is_faster:
        return fastest
    whole = base.size_bytes if base else None
    smaller = [s for s in steps if s.size_bytes is not None and (whole is None or s.size_bytes < whole)]
    if not smaller:
        return None
    graphs = [step for step in smaller if _is_cpu_graph(step)] or smaller
    least = min(graphs, key=lambda step: step.size_bytes or 0)
    times = next((row for step, row in timed if step is least), None)
    return _Pick(least, times, doubt=fastest.doubt if fastest else None)


def _fastest(timed: Sequence[tuple[StepReport, LatencyReport]]) -> _Pick | None:
    """Return the fastest step by wall clock, by processor time where the clock was disturbed."""
    if not timed:
        return None
    calm = [(step, row) for step, row in timed if row.stable is not False]
    step, row = max(calm or timed, key=lambda pair: pair[1].speedup or 0.0)
    rivals = [(s, r) for s, r in timed if r.stable is False and (not calm or _may_be_faster(r, row))]
    if not rivals:
        return _Pick(step, row)
    best = _smallest_fastest([(s, r) for s, r in timed if r.cpu_speedup is not None])
    doubt = _disturbed_text(rivals)
    return _Pick(*best, by_cpu_time=True, doubt=doubt) if best else _Pick(step, None, doubt=doubt)


def _may_be_faster(disturbed: LatencyReport, fastest: LatencyReport) -> bool:
    """Return whether any round of a disturbed step reached the interval of the fastest other step."""
    reached = [
        timing_round.speedup for timing_round in disturbed.rounds or [] if timing_round.speedup is not None
    ]
    if not reached or not fastest.speedup_ci95:
        return True
    return max(reached) >= fastest.speedup_ci95[0]


def _smallest_fastest(
    known: Sequence[tuple[StepReport, LatencyReport]],
) -> tuple[StepReport, LatencyReport] | None:
    """Return the smallest of the steps whose processor time equals the fastest's; None if there are none."""
    if not known:
        return None
    _, fastest = max(known, key=lambda pair: pair[1].cpu_speedup or 0.0)
    ratio = fastest.cpu_speedup or 0.0
    low = min(ratio * (1 - _MIN_CPU_DIFFERENCE), *(fastest.cpu_speedup_ci95 or (ratio,)))
    alike = [
        (step, row)
        for step, row in known
        if max(row.cpu_speedup or 0.0, *(row.cpu_speedup_ci95 or (0.0,))) >= low
    ]
    return min(alike, key=lambda pair: pair[0].size_bytes or 0)


def _is_cpu_graph(step: StepReport) -> bool:
    return step.format == "onnx" and step.target == "ort-cpu"


def ship_command(report: ReportData, step: StepReport, folder: str) -> str:
    """Return the command that makes a deployable folder of the artifact of `step` in `folder`.

    `smelt package` for graphs of ONNX Runtime; other artifacts, and graphs of the task custom, are copied.
    """
    place, task = shlex.quote(folder), report.recipe.get("task")
    if task == CUSTOM_TASK or not _is_cpu_graph(step):
        return f"cp -rL {place} NEW"
    # third-party graphs that generate have no graph with the loop, which the other formats need
    generates = task in (*TEXT_TO_TEXT_TASKS, "language-modeling")
    return f"smelt package {place}{' --format optimum' * bool(generates and step.details.get('foreign'))}"


def _recommend(pick: _Pick | None, metric: str, report: ReportData) -> Verdict:
    """Return the verdict for the chosen step."""
    if pick is None:
        return _none("nothing-gained", f"none is faster or smaller than {report.baseline}.")
    step = pick.step
    fastest = pick.is_faster
    kind = "fastest" if fastest else "smallest"
    by_cpu = " by CPU time" * pick.by_cpu_time
    scored = step.test if step.test and metric in step.test.against_baseline else step
    parts = [_score_text(step, scored, metric, report)]
    if pick.speedup is not None and pick.times:
        fast = (
            view.significant_digits(pick.speedup, 2) if pick.by_cpu_time else view.number_text(pick.speedup)
        )
        ratio = f"{'about ' * pick.by_cpu_time}{fast}× {view.interval_text(pick.speedup_ci95)}".rstrip()
        parts.append(f"{ratio} as fast{by_cpu} at batch {pick.times.batch_size}")
    share = view.size_ratio(step, report.baseline_step)
    of_base = f" ({100 * share:.0f} %)" if share is not None else ""
    parts.append(f"{view.megabytes(step.size_bytes)} MB{of_base}")
    why = f"the {kind} step{by_cpu * fastest} {_reason_text(step, metric)}"
    text = f"Ship {step.name}, {why}. Compared with {report.baseline}: {'; '.join(parts)}."
    return Verdict(
        step=step.name,
        reason=("fastest-by-cpu-time" if pick.by_cpu_time else "fastest") if fastest else "smallest",
        text=text,
        folder=step.artifact,
        command=ship_command(report, step, step.artifact or ""),
        **_loss_fields(scored, metric),
        batch_size=pick.times.batch_size if pick.times and pick.speedup is not None else None,
        speedup=pick.speedup,
        speedup_ci95=pick.speedup_ci95,
        size_bytes=step.size_bytes,
        size_ratio=share,
        warnings=[
            *_cautions(step, scored, metric, report),
            *(
                warning("gate-failed", f"{step.name} fails a gate on test: {gate_text(gate)}.")
                for gate in (step.test.gates if step.test else ())
                if gate.passed is False
            ),
            *([warning("unreliable-speed", pick.doubt)] if pick.doubt else []),
        ],
    )


def _reason_text(step: StepReport, metric: str) -> str:
    """Return why the loss of a step is accepted."""
    if step.gates:
        judged = all(gate.passed for gate in step.gates)
        return "that passes its gates" if judged else "that fails no gate, of which not all were judged"
    if _is_worse(step, metric):
        return f"that loses at most {_NEGLIGIBLE_POINTS:g} point"
    return "without a significant loss"


def _loss_fields(scored: StepReport | ScoresOnTest, metric: str) -> dict[str, Any]:
    return {
        "metric": metric,
        "value": scored.quality[metric].value,
        "difference": scored.against_baseline[metric],
    }


def _score_text(step: StepReport, scored: StepReport | ScoresOnTest, metric: str, report: ReportData) -> str:
    """Return the score of a step and its difference from the baseline."""
    found = scored.against_baseline[metric]
    on = (
        "" if report.judged_on == "test" else " on test" if scored is step.test else f" on {report.judged_on}"
    )
    value = view.number_text(scored.quality[metric].value, view.metric_digits(metric))
    change = f"{_change_text(found, metric)}, {view.p_value_text(found.p_value)}"
    return f"{view.metric_label(metric)}{on} {value} ({change})"


def _change_text(found: ScoreDifference, metric: str) -> str:
    return f"{view.difference_text(found, metric)} {view.difference_interval_text(found, metric)}".rstrip()


def _cautions(
    step: StepReport, scored: StepReport | ScoresOnTest, metric: str, report: ReportData
) -> list[Message]:
    """Return what a user needs to know about the loss before deploying a recommended step.

    Codes: `accepted-loss`, it is worse, but its gate or the metric accepts that; `significantly-worse`, it is
    worse on test, but not on validation, where it was chosen; `too-few-examples`, there are too few to
    decide. A large loss may not be significant, such as 7.5 BLEU on 30 translations.
    """
    score, found = scored.quality[metric], scored.against_baseline[metric]
    difference = f"{view.metric_label(metric)} {_change_text(found, metric)}"
    if _is_worse(scored, metric):
        if _passes_gates(step, metric):
            allowed = "Its gate allows that."
        elif _is_negligible_loss(scored, metric):
            allowed = f"Losses up to {_NEGLIGIBLE_POINTS:g} point are accepted."
        else:
            text = f"{step.name} is worse than {report.baseline} on test: {difference}."
            return [warning("significantly-worse", f"{text} On validation, where it was chosen, it is not.")]
        return [
            warning("accepted-loss", f"{step.name} is significantly worse than {report.baseline}. {allowed}")
        ]
    return _too_few_examples(step, score, found, metric, report)


def _too_few_examples(
    step: StepReport, score: Quality, found: ScoreDifference, metric: str, report: ReportData
) -> list[Message]:
    sign = 1 if score.higher_is_better else -1
    ends = [sign * end for end in found.ci95 or (-math.inf, math.inf)]
    unknown = -min(ends) > _MAX_UNCERTAIN_DROP * abs(score.value - found.difference)
    # an interval below zero that is yet not significant is unreliable
    if score.n >= _MIN_EXAMPLES and not unknown and max(ends) >= 0:
        return []
    who = "a short text" if metric in WINDOW_METRICS else view.count_text(score.n, view.sample_unit(metric))
    return [
        warning(
            "too-few-examples",
            f"Not enough data ({who}) to decide whether {step.name} is worse than {report.baseline}."
            " Score it on more samples before deploying it.",
        )
    ]


def _chance_text(step: StepReport, metric: str) -> str:
    score = step.quality[metric]
    return (
        f"none is better than chance (the best, {step.name}: {view.metric_label(metric)}"
        f" {view.number_text(score.value, view.metric_digits(metric))}, chance level"
        f" {view.number_text(score.chance, view.metric_digits(metric))})."
    )


def _disturbed_text(steps: Sequence[tuple[StepReport, LatencyReport]]) -> str:
    names = ", ".join(step.name for step, _ in steps)
    return (
        f"The wall-clock speed of {names} is unreliable: {view.disturbance_text(row for _, row in steps)}."
        " Run again when the machine is idle; only these steps are timed again."
    )


def trial_text(report: ReportData) -> str | None:
    """Return that a run used only some of the samples; None where its limit excludes none."""
    limit, rows = report.recipe.get("limit"), report.recipe.get("rows")
    if not isinstance(limit, int):
        return None
    used = rows if isinstance(rows, Mapping) else {}
    if used and all(isinstance(n, int) and n < limit for n in used.values()):
        return None
    return f"A trial on {view.count_text(used.get(report.judged_on, limit), 'sample')}, not a result."


def verdict_lines(report: ReportData) -> list[str]:
    """Return the verdict as sentences, for a terminal and for Markdown: trial, verdict and its cautions."""
    found = report.verdict
    lines = [trial_text(report), *((found.text, *map(str, found.warnings)) if found else ())]
    return [line for line in lines if line]


def pareto_front(steps: Sequence[Mapping[str, Any]], baseline: str | None = None) -> list[str]:
    """Return the names of the Pareto-optimal steps, in the order of `steps`.

    The two axes are the first quality metric of the report and the speed-up over the baseline at the
    smallest batch size that any step was timed with: the paired one, as in the verdict and the table.
    A step is excluded where it lacks either, where its times were disturbed, where it cannot be deployed
    (`deployable`: false) or where its quality is at chance level. A step is dominated where another is at
    least as good in both and better in one. If only the baseline has undisturbed times, nothing was compared
    and the result is empty.

    Args:
        steps: entries of report.json's `steps`.
        baseline: name of the step whose speed-up is 1, even if its timing was disturbed.
    """
    points = _front_points(steps, baseline)
    return [
        name
        for name, (quality, speed) in points.items()
        if not any(q >= quality and s >= speed and (q > quality or s > speed) for q, s in points.values())
    ]


def front_axes(steps: Sequence[Mapping[str, Any]]) -> tuple[str | None, int | None]:
    """Return the first quality metric and the smallest batch size of a report; None where there is none."""
    metric = next((metric for step in steps for metric in step.get("quality") or {}), None)
    sizes = [entry["batch_size"] for step in steps for entry in step.get("latency") or []]
    return metric, min(sizes, default=None)


def _front_points(steps: Sequence[Mapping[str, Any]], baseline: str | None) -> dict[str, tuple[float, float]]:
    """Return (quality, higher is better; speed-up) by step name."""
    metric, batch_size = front_axes(steps)
    points: dict[str, tuple[float, float]] = {}
    disturbed = False
    for step in steps:
        score = (step.get("quality") or {}).get(metric)
        rows = [row for row in step.get("latency") or [] if row["batch_size"] == batch_size]
        if not score or not rows or step.get("deployable") is False or is_step_at_chance(step):
            continue
        speed, counts = rows[0].get("speedup"), rows[0].get("stable") is not False or step["name"] == baseline
        disturbed |= speed is not None and not counts
        if speed is not None and counts:
            sign = 1 if score["higher_is_better"] else -1
            points[step["name"]] = (sign * score["value"], speed)
    return {} if disturbed and set(points) <= {baseline} else points
