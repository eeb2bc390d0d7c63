"""The Pareto-optimal steps of a report, and its verdict: the step to deploy, its loss and gain; or why none.

`decide` is the one place where a step is recommended. The result is the field `verdict` of report.json,
which the terminal, report.md and report.html show.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smelt.core.messages import Message, count_text, warning
from smelt.data.tasks import tasks_with
from smelt.evaluate.report import view
from smelt.evaluate.report.disturbance import disturbance_text
from smelt.evaluate.report.quality_loss import (
    NEGLIGIBLE_POINTS,
    Scored,
    accepts_loss,
    is_decidable,
    is_uncertain,
    is_worse,
    judged_metrics,
    notable_losses,
    quality_warnings,
    refused_losses,
    samples_text,
    shows_loss,
    signed_difference,
    signed_value,
)
from smelt.evaluate.report.schema import ReportData, StepReport, Verdict
from smelt.evaluate.report.step_schema import GateReport, LatencyReport, is_step_at_chance
from smelt.evaluate.report.view import gate_text

# Smaller differences of processor time are not significant: other work that shares caches slows some more.
_MIN_CPU_DIFFERENCE = 0.10
# Smaller gains of speed or size are none, and steps whose speed-ups differ by less are equally fast.
_MIN_GAIN = 0.02

UNFINISHED = Verdict(
    reason="not-finished", text="No step is recommended: the run has not finished, its gates are not judged."
)
"""The verdict of a run in progress, or of one that was interrupted."""


@dataclass(frozen=True)
class _Pick:
    """A step with its times at the smallest batch size, None where it was not timed.

    by_cpu_time: whether its speed-up is by processor time. doubt: why no wall-clock speed is claimed.
    equally_fast: the names of the other candidates that are as fast. is_lossless: whether the step was chosen
    as the smallest of those without a significant loss, not of all.
    """

    step: StepReport
    times: LatencyReport | None
    by_cpu_time: bool = False
    doubt: str | None = None
    equally_fast: tuple[str, ...] = ()
    is_lossless: bool = False

    @property
    def is_disturbed(self) -> bool:
        """Whether the wall-clock times of this step were disturbed."""
        return self.times is not None and self.times.stable is False

    @property
    def speedup(self) -> float | None:
        """The speed-up that is claimed."""
        if self.times is None or (self.is_disturbed and not self.by_cpu_time):
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
        """Whether the step is faster than the baseline, beyond the interval and by `_MIN_GAIN`."""
        if self.speedup is None or (self.doubt and not self.by_cpu_time):
            return False
        return _is_gain(self.speedup, self.speedup_ci95)

    @property
    def is_slower(self) -> bool:
        """Whether the step is slower than the baseline, by processor time where its times were disturbed."""
        speedup, ends, limit = self.speedup, self.speedup_ci95, 1.0
        if self.times and self.is_disturbed:
            speedup, ends = self.times.cpu_speedup, self.times.cpu_speedup_ci95
            limit -= _MIN_CPU_DIFFERENCE
        return speedup is not None and max(ends or (speedup,)) < limit


def decide(report: ReportData) -> Verdict:
    """Return the verdict of a finished run: the step to deploy, or why none is recommended.

    Candidates are the deployable steps, other than the baseline, that were compared with it, are better than
    chance, fail no gate, and lose nothing significant by any metric (p < 0.05, not corrected, and an
    interval without zero; `quality_loss`). A loss is accepted where the step's gates on that
    metric, or on the first one, pass, and up to 1 point of a metric that is perfect for the baseline by
    definition. With too few examples for any loss to be significant nothing is recommended.

    Recommended is the fastest candidate by the paired speed-up at the smallest batch size; of steps as fast
    (their intervals overlap, or the speed-ups differ by less than 2 %) the smallest of those that lose
    nothing significant by any metric; where gates accept a loss of each, the smallest. Where the times of a
    candidate that may be the fastest were disturbed, processor time decides. Where nothing was timed, or
    nothing is faster, it is the smallest, of graphs for ONNX Runtime if there are any. If the step was also
    scored on test and fails a gate there, none is recommended: another would be chosen on test.
    """
    metrics = judged_metrics(report)
    steps = [
        step
        for step in report.steps
        if step.status in ("done", "cached")
        and step.artifact
        and step.name != report.baseline
        and step.deployable is not False
    ]
    if not steps:
        return _none("no-deployable-step", _not_deployable_text(report))
    metric = metrics[0] if metrics else ""
    compared_steps = [step for step in steps if metric in step.quality and metric in step.against_baseline]
    if not compared_steps:
        return _none("not-scored", "the quality of no step was compared with the baseline's.")
    useful = [step for step in compared_steps if not step.quality[metric].at_chance]
    if not useful:
        best = max(compared_steps, key=lambda step: signed_value(step, metric))
        return _none("at-chance", _chance_text(best, metric))
    rules: dict[str, Callable[[StepReport], bool]] = {
        "gates-failed": lambda step: all(gate.passed is not False for gate in step.gates),
        "significantly-worse": lambda step: not refused_losses(step, metrics),
        "too-few-examples": lambda step: accepts_loss(step, metric) or is_decidable(step, metric),
    }
    candidates, num_worse = useful, sum(bool(refused_losses(step, metrics)) for step in useful)
    for reason, keeps in rules.items():
        remaining = [step for step in candidates if keeps(step)]
        if not remaining:
            return _closest(reason, candidates, metrics)
        candidates = remaining
    pick = _choose(candidates, metrics, report)
    if pick is None:
        return _nothing_gained([step for step in useful if step not in candidates], metrics, report)
    return _recommend(pick, metrics, report, num_worse)


def shortlisted(report: ReportData) -> list[str]:
    """Return the steps to score on test after they were chosen on validation; the baseline is first.

    They are the baseline, the Pareto-optimal steps, and the step that the verdict names with those that are
    as fast and the steps that it comes from; where it names none, the smallest graph for ONNX Runtime that
    fails no gate.
    """
    verdict = decide(report)
    parents = {step.name: step.parent for step in report.steps}
    selected_names = [report.baseline, *report.pareto_front, verdict.step, verdict.closest]
    selected_names += verdict.equally_fast
    ancestor = parents.get(verdict.step or "")
    while ancestor is not None:
        selected_names.append(ancestor)
        ancestor = parents[ancestor]
    if not (verdict.step or verdict.closest):
        eligible = [step for step in report.steps if step.artifact and _is_cpu_graph(step)]
        eligible = [step for step in eligible if all(gate.passed is not False for gate in step.gates)]
        selected_names += [step.name for step in sorted(eligible, key=lambda step: step.size_bytes or 0)[:1]]
    scored_names = {step.name for step in report.steps if step.quality}
    return [name for name in dict.fromkeys(selected_names) if name in scored_names]


def _none(reason: Any, text: str) -> Verdict:
    return Verdict(reason=reason, text=f"No step is recommended: {text}")


def _nothing_gained(excluded: Sequence[StepReport], metrics: Sequence[str], report: ReportData) -> Verdict:
    """Return that no candidate is faster or smaller; names the step of `excluded` that is, if any."""
    metric = metrics[0]
    pick = _choose(excluded, metrics, report)
    if pick is None:
        return _none("nothing-gained", _no_gain_text(report))
    step = pick.step
    gain, failed = "faster" if pick.is_faster else "smaller", _failed_gates_text(step.gates)
    losses = " and ".join(view.metric_label(name) for name in refused_losses(step, metrics))
    reason = (
        f"fails {failed}"
        if failed
        else f"is significantly worse by {losses}"
        if losses
        else f"was compared on too few examples ({samples_text(step, metric)})"
    )
    return Verdict(
        reason="nothing-gained",
        text=f"No step is recommended: {step.name} is {gain} than {report.baseline}, but {reason}; of the"
        " others that can be deployed none is faster or smaller.",
        closest=step.name,
        **_loss_fields(step, metric),
    )


def _no_gain_text(report: ReportData) -> str:
    """Return that no deployable step is faster or smaller, with those that are smaller."""
    base_size = (report.baseline_step and report.baseline_step.size_bytes) or 0
    names = [
        step.name
        for step in report.steps
        if step.deployable is False and step.size_bytes and _is_smaller(step.size_bytes, base_size)
    ]
    text = f"none that can be deployed is faster or smaller than {report.baseline}"
    verb = "are" if len(names) > 1 else "is"
    return f"{text}; {', '.join(names)} {verb} smaller, but cannot be deployed." if names else f"{text}."


def _failed_gates_text(gates: Sequence[GateReport]) -> str:
    return " and ".join(gate_text(gate) for gate in gates if gate.passed is False)


def _closest(reason: Any, steps: Sequence[StepReport], metrics: Sequence[str]) -> Verdict:
    """Return that no step is recommended and why, with the step of the best score."""
    metric = metrics[0]
    best = max(steps, key=lambda step: signed_value(step, metric))
    losses = refused_losses(best, metrics)
    gates = ", ".join(f"{name}: {{max_degradation: NUMBER}}" for name in losses or [metric])
    loss_texts = " and ".join(view.metric_label(name) for name in losses)
    why, hint = {
        "gates-failed": ("none passes all its gates.", f", and fails {_failed_gates_text(best.gates)}."),
        "significantly-worse": (
            "all are significantly worse.",
            f", and loses {loss_texts}. To accept such a loss, set a gate: gates: {{{gates}}}.",
        ),
        "too-few-examples": (
            f"{samples_text(best, metric)} are too few for any loss to be significant.",
            f". Score more samples, or set a gate: gates: {{{gates}}}.",
        ),
    }[reason]
    return Verdict(
        reason=reason,
        text=f"No step is recommended: {why} {best.name} comes closest{hint}",
        closest=best.name,
        **_loss_fields(best, metric),
    )


def _is_smaller(size_bytes: int, base_bytes: int) -> bool:
    return size_bytes <= (1 - _MIN_GAIN) * base_bytes


def _is_gain(speedup: float, ends: tuple[float, float] | None) -> bool:
    return speedup >= 1 + _MIN_GAIN and (ends is None or ends[0] > 1)


def _choose(steps: Sequence[StepReport], metrics: Sequence[str], report: ReportData) -> _Pick | None:
    """Return the fastest step, or the smallest; None if none is faster or smaller than the baseline."""
    sizes, base = view.batch_sizes(report), report.baseline_step
    timed = [
        (step, row)
        for step in steps
        if (row := step.latency_at(sizes[0]) if sizes else None) and row.speedup is not None
    ]
    fastest = _fastest(timed, metrics)
    if fastest and fastest.is_faster:
        return fastest
    base_size = base.size_bytes if base else None
    smaller = [
        step
        for step in steps
        if step.size_bytes is not None and (base_size is None or _is_smaller(step.size_bytes, base_size))
    ]
    if not smaller:
        return None
    graphs = [step for step in smaller if _is_cpu_graph(step)] or smaller
    smallest = min(graphs, key=lambda step: step.size_bytes or 0)
    times = smallest.latency_at(sizes[0]) if sizes else None
    doubt = fastest.doubt if fastest else None
    if times and times.stable is False:
        doubt = doubt or _disturbed_text([(smallest, times)])
    return _Pick(smallest, times, doubt=doubt)


def _fastest(timed: Sequence[tuple[StepReport, LatencyReport]], metrics: Sequence[str]) -> _Pick | None:
    """Return the fastest step by wall clock, by processor time where the clock was disturbed."""
    if not timed:
        return None
    calm = [(step, row) for step, row in timed if row.stable is not False]
    step, row = max(calm or timed, key=lambda pair: pair[1].speedup or 0.0)
    rivals = [(s, r) for s, r in timed if r.stable is False and (not calm or _may_be_faster(r, row))]
    if not rivals:
        ratio = row.speedup or 0.0
        low = min(ratio * (1 - _MIN_GAIN), *(row.speedup_ci95 or (ratio,)))
        equally_fast = [
            (s, r) for s, r in calm or timed if max(r.speedup or 0.0, *(r.speedup_ci95 or (0.0,))) >= low
        ]
        gains = [(s, r) for s, r in equally_fast if _is_gain(r.speedup or 0.0, r.speedup_ci95)]
        return _best_of_equally_fast(gains or [(step, row)], metrics)
    disturbance = _disturbed_text(rivals)
    best = _fastest_by_cpu_time([(s, r) for s, r in timed if r.cpu_speedup is not None], metrics)
    best = best or _Pick(step, None)
    return replace(best, by_cpu_time=best.times is not None, doubt=disturbance)


def _may_be_faster(disturbed: LatencyReport, fastest: LatencyReport) -> bool:
    """Return whether any round of a disturbed step reached the interval of the fastest other step."""
    round_speedups = [
        timing_round.speedup for timing_round in disturbed.rounds or [] if timing_round.speedup is not None
    ]
    if not round_speedups or not fastest.speedup_ci95:
        return True
    return max(round_speedups) >= fastest.speedup_ci95[0]


def _fastest_by_cpu_time(
    timed: Sequence[tuple[StepReport, LatencyReport]], metrics: Sequence[str]
) -> _Pick | None:
    """Return the best of the steps whose processor time equals the fastest's; None if there are none."""
    if not timed:
        return None
    _, fastest = max(timed, key=lambda pair: pair[1].cpu_speedup or 0.0)
    ratio = fastest.cpu_speedup or 0.0
    low = min(ratio * (1 - _MIN_CPU_DIFFERENCE), *(fastest.cpu_speedup_ci95 or (ratio,)))
    equally_fast = [
        (step, row)
        for step, row in timed
        if max(row.cpu_speedup or 0.0, *(row.cpu_speedup_ci95 or (0.0,))) >= low
    ]
    return _best_of_equally_fast(equally_fast, metrics)


def _best_of_equally_fast(alike: Sequence[tuple[StepReport, LatencyReport]], metrics: Sequence[str]) -> _Pick:
    """Return the smallest of the steps that lose nothing significant; where all do, the smallest of them.

    All are candidates: a loss of theirs is one that a gate allows, yet none is better than an allowed one.
    """
    lossless = [pair for pair in alike if not notable_losses(pair[0], metrics)]
    step, row = min(
        lossless or alike, key=lambda pair: (pair[0].size_bytes or 0, -signed_difference(pair[0], metrics[0]))
    )
    return _Pick(
        step,
        row,
        equally_fast=tuple(other.name for other, _ in alike if other is not step),
        is_lossless=bool(lossless),
    )


def _is_cpu_graph(step: StepReport) -> bool:
    return step.format == "onnx" and step.target == "ort-cpu"


def ship_command(report: ReportData, step: StepReport, folder: str, program: str = "smelt") -> str:
    """Return the command that makes a deployable folder of the artifact of `step` in `folder`.

    `smelt package` for graphs of ONNX Runtime; other artifacts, and graphs of the task custom, are copied.
    program: the command smelt, as it was called.
    """
    quoted_folder, task = shlex.quote(folder), report.recipe.get("task")
    if task in tasks_with(modality="arrays") or not _is_cpu_graph(step):
        return f"cp -rL {quoted_folder} NEW"
    # third-party graphs that generate have no graph with the loop, which the other formats need
    generates = task in tasks_with(generates=True)
    form = " --format optimum" * bool(generates and step.details.get("foreign"))
    return f"{program} package {quoted_folder}{form}"


def _recommend(pick: _Pick, metrics: Sequence[str], report: ReportData, num_worse: int) -> Verdict:
    """Return the verdict for the chosen step. num_worse: how many others are significantly worse."""
    metric = metrics[0]
    step = pick.step
    scores = step.test if step.test and metric in step.test.against_baseline else step
    if failed := _failed_gates_text(view.final_gates(step)):  # on test
        text = f"No step is recommended: {step.name}, chosen on validation, fails {failed} on test."
        return Verdict(reason="gates-failed", text=text, closest=step.name, **_loss_fields(scores, metric))
    fastest = pick.is_faster
    kind = "fastest" if fastest else "smallest"
    by_cpu = " by CPU time" * (pick.by_cpu_time and fastest)
    text = f"Recommended: {step.name}, the {kind} step{by_cpu} {_reason_text(step, metrics)}."
    equally_fast = pick.equally_fast if fastest else ()
    if equally_fast:
        verb = "are" if len(equally_fast) > 1 else "is"
        which = "without a significant loss" if pick.is_lossless else "which all lose significantly"
        text += f" {', '.join(equally_fast)} {verb} as fast; {step.name} is the smallest of those {which}"
        text += f" on {report.judged_on}."
    return Verdict(
        step=step.name,
        reason=("fastest-by-cpu-time" if pick.by_cpu_time else "fastest") if fastest else "smallest",
        text=text,
        equally_fast=list(equally_fast),
        folder=step.artifact,
        command=ship_command(report, step, step.artifact or ""),
        **_loss_fields(scores, metric),
        batch_size=pick.times.batch_size if pick.times and pick.speedup is not None else None,
        speedup=pick.speedup,
        speedup_ci95=pick.speedup_ci95,
        size_bytes=step.size_bytes,
        size_ratio=view.size_ratio(step, report.baseline_step),
        warnings=[
            *quality_warnings(step, scores, metrics, report.baseline or "", num_worse),
            *_step_warnings(pick, report),
        ],
    )


def _step_warnings(pick: _Pick, report: ReportData) -> list[Message]:
    """Return warnings about the speed and the outputs of the recommended step."""
    step, warnings = pick.step, list[Message]()
    if pick.is_slower:
        by_cpu = " by CPU time" * (pick.by_cpu_time or pick.is_disturbed)
        text = f"{step.name} is slower than {report.baseline}{by_cpu}; it is recommended for its size alone."
        warnings.append(warning("slower", text))
    if step.outputs and step.outputs.is_degenerate:
        base = report.baseline_step
        baseline = f" {base.name}: {base.outputs.text()}." if base and base.outputs else ""
        text = f"Outputs of {step.name} are degenerate: {step.outputs.text()}.{baseline}"
        warnings.append(warning("degenerate-outputs", f"{text} Read some of them before deploying it."))
    return [*warnings, *([warning("unreliable-speed", pick.doubt)] if pick.doubt else [])]


def _reason_text(step: StepReport, metrics: Sequence[str]) -> str:
    """Return why the loss of a step is accepted: what was judged, and whether that shows anything."""
    if step.gates:
        judged = all(gate.passed for gate in step.gates)
        return "within its gates" if judged else "that fails no gate, of which not all were judged"
    if is_worse(step, metrics[0]):
        return f"that loses at most {NEGLIGIBLE_POINTS:g} point"
    if is_uncertain(step, metrics[0]):
        samples, label = samples_text(step, metrics[0]), view.metric_label(metrics[0])
        if shows_loss(step, metrics[0]):
            return f"for which {samples} show a loss of {label} that the test does not confirm"
        return f"for which {samples} neither show nor exclude a loss of {label}"
    tested = [name for name in metrics if name in step.against_baseline and is_decidable(step, name)]
    *names, last = [view.metric_label(name) for name in tested]
    return f"without a significant loss of {' or '.join([', '.join(names), last] if names else [last])}"


def _loss_fields(scored: Scored, metric: str) -> dict[str, Any]:
    return {
        "metric": metric,
        "value": scored.quality[metric].value,
        "difference": scored.against_baseline[metric],
    }


def _not_deployable_text(report: ReportData) -> str:
    names = ", ".join(step.name for step in report.steps if view.measured_elsewhere_text(step))
    if names:
        return f"{names}: measured on the CPU, but made for GPUs. Run the recipe on a machine with a GPU."
    return "no step can be deployed. Add a stage that exports, such as onnx."


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
        f"The wall-clock speed of {names} is unreliable: {disturbance_text(row for _, row in steps)}."
        " Run again when the machine is idle; only these steps are timed again."
    )


def limited_run_text(report: ReportData) -> str | None:
    """Return that a run used only some of the samples; None where its limit excludes none."""
    limit, rows = report.recipe.get("limit"), report.recipe.get("rows")
    if not isinstance(limit, int):
        return None
    used_rows = rows if isinstance(rows, Mapping) else {}
    if used_rows and all(isinstance(n, int) and n < limit for n in used_rows.values()):
        return None
    return f"A trial on {count_text(used_rows.get(report.judged_on, limit), 'sample')}, not a result."


def headlines(report: ReportData) -> list[str]:
    """Return what stands first in a terminal and in Markdown: whether it is a trial, and the verdict."""
    return [line for line in (limited_run_text(report), report.verdict and report.verdict.text) if line]


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
