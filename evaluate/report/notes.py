"""What the three drawings of a report say in words: verdicts of gates, errors, reasons, warnings."""

from __future__ import annotations

from collections.abc import Iterable

from smelt.core.messages import Message
from smelt.evaluate.report import view
from smelt.evaluate.report.schema import Gate, Latency, Report, Step

# of stages and scores that read texts which were too long
_TRUNCATED = "truncated-texts"


def grave_first(warnings: Iterable[Message]) -> list[Message]:
    """Return warnings with those about truncated texts last: what a step made is of more weight."""
    return sorted(warnings, key=lambda found: found.code == _TRUNCATED)


def notes(report: Report) -> list[tuple[str, str, str]]:
    """Return (step, kind, text) of all errors, reasons, gates without a value, and warnings.

    What concerns the whole run comes first, under the step's name `run`.
    """
    found: list[tuple[str, str, str]] = [
        ("run", message.severity, str(message)) for message in report.warnings
    ]
    found += [("run", "warning", text) for text in on_test(report)]
    found += [("run", "disturbed", text) for text in disturbed(report)]
    for step in report.steps:
        said = (
            ("error", step.error and step.error.message),
            ("not scored" if step.unscored else step.status, step.reason),
        )
        found += [(step.name, kind, text) for kind, text in said if text]
        found += [
            (step.name, verdict(gate), f"gate {gate_text(gate)}: {gate.reason}")
            for gate in step.gates
            if gate.reason and (gate.passed is None or gate.reason not in step.why)
        ]
        found += [
            (step.name, "warning", few_text(gate, step)) for gate in step.gates if gate.n_needed is not None
        ]
        found += [(step.name, one.severity, str(one)) for one in grave_first(step.warnings)]
        if step.from_previous_run:
            found.append((step.name, "kept", "from an earlier run in this folder; this one left it out"))
    return found


def disturbed(report: Report) -> list[str]:
    """Return of which steps no speed is claimed, each cause once."""
    causes: dict[str, list[tuple[Step, Latency]]] = {}
    for step in report.steps:
        for row in step.latency:
            if row.stable is False:
                causes.setdefault(row.cause or row.reason or "", []).append((step, row))
    told = []
    for found in causes.values():
        sizes: dict[str, list[str]] = {}
        for step, row in found:
            sizes.setdefault(step.name, []).append(str(row.batch_size))
        names = ", ".join(f"{name} (batch {', '.join(batches)})" for name, batches in sizes.items())
        told.append(f"no speed is claimed of {names}: {view.doubt(row for _, row in found)}")
    return told


def verdict(gate: Gate) -> str:
    """Return the result of a gate: passed, undecided, failed or not judged."""
    if gate.passed is None:
        return "not judged"
    if not gate.passed:
        return "failed"
    return "undecided" if gate.undecided else "passed"


def gate_text(gate: Gate) -> str:
    """Return a gate as `BLEU max_drop 1.00`."""
    sure = "" if gate.confidence is None else f" with confidence {gate.confidence:g}"
    return f"{view.label(gate.metric)} {gate.kind} {view.quantity(gate.metric, gate.limit)}{sure}"


def tested(report: Report) -> str:
    """Return what the steps that were chosen on validation score on test, by the first metric."""
    metric = next(iter(view.metrics(report)), "")
    found = []
    for step in report.steps:
        if step.test and (score := step.test.quality.get(metric)):
            lost = step.test.against_baseline.get(metric)
            change = f" ({view.change(lost, metric)}{'*' if view.matters(lost) else ''})" if lost else ""
            found.append(f"{step.name} {view.number(score.value, view.digits(metric))}{change}")
    return f"{view.label(metric)} on test: {', '.join(found)}" if found else ""


def on_test(report: Report) -> list[str]:
    """Return the limits that steps kept on validation, which chose them, and do not keep on test."""
    return [
        f"'{step.name}': gate {gate_text(gate)}, kept on validation, is not on test: {gate_value(gate)}"
        for step in report.steps
        for gate in (step.test.gates if step.test else ())
        if gate.passed is False and all(g.passed for g in step.gates if g.metric == gate.metric)
    ]


def few_text(gate: Gate, step: Step) -> str:
    """Return that n is too small to see what `gate` asks, and how large it would have to be."""
    score, difference = step.quality.get(gate.metric), step.against_baseline.get(gate.metric)
    n = f"n = {view.counted(score.n, view.unit(gate.metric))}" if score else "n"
    low, high = (difference and difference.ci95) or (0.0, 0.0)
    shown = view.digits(gate.metric)
    return (
        f"gate {gate_text(gate)}: {n} is too small to see it; the difference is known to"
        f" ±{view.number((high - low) / 2, shown)}. About {_round(gate.n_needed or 0):,} would do."
    )


def _round(count: int) -> int:
    """Return `count` to two digits, upwards: more would promise too much."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step


def gate_value(gate: Gate) -> str:
    """Return what was judged: the value, and the bound where the gate asks for one."""
    value = view.quantity(gate.metric, gate.value)
    if gate.bound is None:
        return value
    return f"{value} (bound {view.quantity(gate.metric, gate.bound)})"
