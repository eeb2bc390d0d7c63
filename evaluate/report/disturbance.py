"""Which speeds other work on the machine made unreliable, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smelt.evaluate.report.schema import ReportData, StepReport
from smelt.evaluate.report.step_schema import LatencyReport


def disturbance_text(rows: Iterable[LatencyReport]) -> str:
    """Return why the speeds of `rows` are unreliable, each cause once."""
    causes: dict[str, list[LatencyReport]] = {}
    for row in rows:
        if row.stable is False:
            causes.setdefault(row.cause or row.reason or "", []).append(row)
    return "; ".join(_cause_text(cause, rows) for cause, rows in causes.items())


def _cause_text(cause: str, rows: Sequence[LatencyReport]) -> str:
    """Return one cause as text; with the figures of all its rows."""
    lost_shares = [timing_round.lost_share for row in rows for timing_round in row.rounds or []]
    if cause == "busy" and len(rows) > 1 and lost_shares:
        return f"other processes used the CPU for up to {100 * max(lost_shares):.0f} % of a round"
    if cause == "disagree" and len(rows) > 1:
        return "the rounds disagree"
    return rows[0].reason or cause


def disturbed_texts(report: ReportData) -> list[str]:
    """Return the steps whose speed is unreliable, each cause once."""
    causes: dict[str, list[tuple[StepReport, LatencyReport]]] = {}
    for step in report.steps:
        for row in step.latency:
            if row.stable is False:
                causes.setdefault(row.cause or row.reason or "", []).append((step, row))
    texts = []
    for step_rows in causes.values():
        sizes: dict[str, list[str]] = {}
        for step, row in step_rows:
            sizes.setdefault(step.name, []).append(str(row.batch_size))
        names = ", ".join(f"{name} (batch {', '.join(batches)})" for name, batches in sizes.items())
        texts.append(f"the speed of {names} is unreliable: {disturbance_text(row for _, row in step_rows)}")
    return texts
