"""The headline of a report (trial run, recommended step), and texts that its three renderings share.

The texts are verdicts of gates, errors, reasons and warnings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from smelt.core.messages import Message
from smelt.evaluate.report import view
from smelt.evaluate.report.schema import GateReport, LatencyReport, ReportData, StepReport

# Smaller differences of processor time are not significant: other work that shares caches slows some more.
_MIN_CPU_DIFFERENCE = 0.10


@dataclass(frozen=True)
class Headline:
    """The step that a report recommends.

    trial: that the run used only some of the samples, or None. recommended: the fastest step that can be
    deployed and fails no gate, None where there is none or no speed may be claimed; times: its row at the
    smallest batch. withheld: why no step is recommended although some were timed, or None; likely: the
    fastest step by processor time in that case.
    """

    trial: str | None
    recommended: StepReport | None = None
    times: LatencyReport | None = None
    withheld: str | None = None
    likely: StepReport | None = None


def headline(report: ReportData) -> Headline:
    """Return the headline of `report`.

    There is one measure of speed: the paired speed-up over the baseline at the smallest batch size. Where the
    times of a competing step were disturbed and it may be the fastest, no step is recommended. It may be the
    fastest where any of its rounds, disturbed or not, reached the interval of the fastest other step.
    """
    trial, sizes = _trial_text(report), view.batch_sizes(report)
    done = [
        step
        for step in report.steps
        if step.status in ("done", "cached") and step.name != report.baseline and step.deployable is not False
    ]
    timed = [
        (step, row)
        for step in done
        if (row := step.latency_at(sizes[0]) if sizes else None) and row.speedup is not None
    ]
    scored = [step for step in done if step.quality]
    if scored and all(_at_chance(step) for step in scored):
        return Headline(trial, withheld=_chance_text(scored[0]))
    able = [(step, row) for step, row in timed if not _at_chance(step)]
    fit = [(step, row) for step, row in able if all(gate.passed is not False for gate in step.gates)]
    if not fit:
        return Headline(trial, withheld="No step passes all its gates." if timed else None)
    calm = [(step, row) for step, row in fit if row.stable is not False]
    step, row = max(calm or fit, key=lambda pair: pair[1].speedup or 0.0)
    rivals = [(s, r) for s, r in fit if r.stable is False and (not calm or _may_be_faster(r, row))]
    if rivals:
        known = [(step, row) for step, row in fit if row.cpu_speedup is not None]
        best = _smallest_fastest(known)
        sentences = [_step_text(report, *best, by_processor=True)] if best else []
        return Headline(
            trial, withheld=" ".join([*sentences, _disturbed_text(rivals)]), likely=best and best[0]
        )
    return Headline(trial, step, row)


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


def _at_chance(step: StepReport) -> bool:
    return any(score.at_chance for score in list(step.quality.values())[:1])


def _chance_text(step: StepReport) -> str:
    metric, score = next(iter(step.quality.items()))
    return (
        f"No step is recommended: none is better than chance ({step.name}: {view.metric_label(metric)}"
        f" {view.number_text(score.value, view.metric_digits(metric))}, chance level"
        f" {view.number_text(score.chance, view.metric_digits(metric))})."
    )


def _may_be_faster(disturbed: LatencyReport, fastest: LatencyReport) -> bool:
    reached = [
        timing_round.speedup for timing_round in disturbed.rounds or [] if timing_round.speedup is not None
    ]
    if not reached or not fastest.speedup_ci95:
        return True
    return max(reached) >= fastest.speedup_ci95[0]


def headline_lines(report: ReportData) -> list[str]:
    """Return the headline as sentences, for a terminal and for Markdown."""
    found = headline(report)
    sentences = [found.trial] if found.trial else []
    if found.withheld:
        sentences.append(found.withheld)
    if found.recommended and found.times:
        sentences.append(_recommendation_text(report, found.recommended, found.times))
    return sentences


def _trial_text(report: ReportData) -> str | None:
    """Return the text for a run on some of the samples; None where the limit excludes none."""
    limit, rows = report.recipe.get("limit"), report.recipe.get("rows")
    if not isinstance(limit, int):
        return None
    used = rows if isinstance(rows, Mapping) else {}
    if used and all(isinstance(n, int) and n < limit for n in used.values()):
        return None
    return f"A trial on {view.count_text(used.get(report.judged_on, limit), 'sample')}, not a result."


def _disturbed_text(steps: list[tuple[StepReport, LatencyReport]]) -> str:
    names = ", ".join(step.name for step, _ in steps)
    return (
        f"The wall-clock speed of {names} is unreliable: {view.disturbance_text(row for _, row in steps)}."
        " Run again when the machine is idle; only these steps are timed again."
    )


def _recommendation_text(report: ReportData, step: StepReport, times: LatencyReport) -> str:
    gated = " that passes all gates" if any(s.gates for s in report.steps) else ""
    return f"Fastest step{gated}: {_step_text(report, step, times)}"


def _step_text(report: ReportData, step: StepReport, times: LatencyReport, by_processor: bool = False) -> str:
    """Return name, speed-up, score and size of a step; the speed-up by wall clock or by processor time."""
    if by_processor:
        ratio, ends, how = times.cpu_speedup, times.cpu_speedup_ci95, " by CPU time"
    else:
        ratio, ends, how = times.speedup, times.speedup_ci95, ""
    fast = view.significant_digits(ratio, 2) if by_processor else view.number_text(ratio)
    parts = [
        f"{step.name}, {'about ' * by_processor}{fast}× {view.interval_text(ends)}".rstrip()
        + f"{how} at batch {times.batch_size}"
    ]
    metric = next(iter(view.metric_names(report)), None)
    for of, found in (("", step), ("on test ", step.test)):
        if metric and found and (score := found.quality.get(metric)):
            shown = view.metric_digits(metric)
            lost = found.against_baseline.get(metric)
            change = (
                f" ({view.difference_text(lost, metric)}, {view.p_value_text(view.corrected_p_value(lost))})"
                if lost
                else ""
            )
            parts.append(f"{of}{view.metric_label(metric)} {view.number_text(score.value, shown)}{change}")
    share = view.size_ratio(step, report.baseline_step)
    of_base = f" ({100 * share:.0f} % of {report.baseline})" if share is not None else ""
    parts.append(f"{view.megabytes(step.size_bytes)} MB{of_base}")
    return "; ".join(parts) + "."


# of stages and scores that truncate texts
_TRUNCATED_CODE = "truncated-texts"


def sort_warnings(warnings: Iterable[Message]) -> list[Message]:
    """Return warnings with those about truncated texts last, since the others matter more."""
    return sorted(warnings, key=lambda found: found.code == _TRUNCATED_CODE)


def report_notes(report: ReportData) -> list[tuple[str, str, str]]:
    """Return (step, kind, text) of all errors, reasons, gates without a value, and warnings.

    Notes of the whole run come first, under the step name `run`.
    """
    found: list[tuple[str, str, str]] = [
        ("run", message.severity, str(message)) for message in report.warnings
    ]
    found += [("run", "warning", text) for text in failed_on_test_texts(report)]
    found += [("run", "disturbed", text) for text in disturbed_texts(report)]
    for step in report.steps:
        notes = (
            ("error", step.error and step.error.message),
            ("not scored" if step.unscored else step.status, step.reason),
        )
        found += [(step.name, kind, text) for kind, text in notes if text]
        found += [
            (step.name, gate_verdict(gate), f"gate {gate_text(gate)}: {gate.reason}")
            for gate in step.gates
            if gate.reason and (gate.passed is None or gate.reason not in step.failure_texts)
        ]
        found += [
            (step.name, "warning", too_few_examples_text(gate, step))
            for gate in step.gates
            if gate.n_needed is not None
        ]
        found += [(step.name, warning.severity, str(warning)) for warning in sort_warnings(step.warnings)]
        if step.from_previous_run:
            found.append((step.name, "kept", "from an earlier run in this folder; not part of this run"))
    return found


def disturbed_texts(report: ReportData) -> list[str]:
    """Return the steps whose speed is unreliable, each cause once."""
    causes: dict[str, list[tuple[StepReport, LatencyReport]]] = {}
    for step in report.steps:
        for row in step.latency:
            if row.stable is False:
                causes.setdefault(row.cause or row.reason or "", []).append((step, row))
    texts = []
    for found in causes.values():
        sizes: dict[str, list[str]] = {}
        for step, row in found:
            sizes.setdefault(step.name, []).append(str(row.batch_size))
        names = ", ".join(f"{name} (batch {', '.join(batches)})" for name, batches in sizes.items())
        texts.append(f"the speed of {names} is unreliable: {view.disturbance_text(row for _, row in found)}")
    return texts


def gate_verdict(gate: GateReport) -> str:
    """Return the result of a gate: passed, undecided, failed or not judged."""
    if gate.passed is None:
        return "not judged"
    if not gate.passed:
        return "failed"
    return "undecided" if gate.undecided else "passed"


def gate_text(gate: GateReport) -> str:
    """Return a gate as `BLEU max_drop 1.00`."""
    sure = "" if gate.confidence is None else f", confidence {gate.confidence:g}"
    limit = view.gate_quantity_text(gate.metric, gate.limit)
    return f"{view.metric_label(gate.metric)} {gate.kind} {limit}{sure}"


def test_scores_text(report: ReportData) -> str:
    """Return the test scores of the steps that were chosen on validation, by the first metric."""
    metric = next(iter(view.metric_names(report)), "")
    found = []
    for step in report.steps:
        if step.test and (score := step.test.quality.get(metric)):
            lost = step.test.against_baseline.get(metric)
            change = (
                f" ({view.difference_text(lost, metric)}{'*' if view.is_significant(lost) else ''})"
                if lost
                else ""
            )
            found.append(f"{step.name} {view.number_text(score.value, view.metric_digits(metric))}{change}")
    return f"{view.metric_label(metric)} on test: {', '.join(found)}" if found else ""


def failed_on_test_texts(report: ReportData) -> list[str]:
    """Return the gates that steps pass on validation, where they were chosen, and fail on test."""
    return [
        f"'{step.name}': gate {gate_text(gate)} passes on validation and fails on test:"
        f" {gate_value_text(gate)}"
        for step in report.steps
        for gate in (step.test.gates if step.test else ())
        if gate.passed is False and all(g.passed for g in step.gates if g.metric == gate.metric)
    ]


def too_few_examples_text(gate: GateReport, step: StepReport) -> str:
    """Return that n is too small to decide `gate`, and how large it would have to be."""
    score, difference = step.quality.get(gate.metric), step.against_baseline.get(gate.metric)
    n = f"n = {view.count_text(score.n, view.sample_unit(gate.metric))}" if score else "n"
    low, high = (difference and difference.ci95) or (0.0, 0.0)
    shown = view.metric_digits(gate.metric)
    return (
        f"gate {gate_text(gate)}: {n} is too small to decide it; the difference is known to"
        f" ±{view.number_text((high - low) / 2, shown)}. Use about {_round_up(gate.n_needed or 0):,}."
    )


def _round_up(count: int) -> int:
    """Return `count` rounded up to two digits: more would suggest a false precision."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step


def gate_value_text(gate: GateReport) -> str:
    """Return the judged value, and the bound where the gate has a confidence."""
    value = view.gate_quantity_text(gate.metric, gate.value)
    if gate.bound is None:
        return value
    return f"{value} (bound {view.gate_quantity_text(gate.metric, gate.bound)})"
