"""Texts that the three renderings of a report share: results of gates, errors, reasons and warnings."""

from __future__ import annotations

from collections.abc import Iterable

from smelt.core.messages import Message
from smelt.evaluate.report import view
from smelt.evaluate.report.schema import GateReport, LatencyReport, ReportData, StepReport

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
