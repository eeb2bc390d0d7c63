"""report.html, drawn from report.json alone: one file, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from smelt.core.text import printable
from smelt.evaluate.report import chart, notes, view
from smelt.evaluate.report.headline import headline
from smelt.evaluate.report.schema import Difference, Report, Step, validate_report

_BADGES = {
    "passed": "good",
    "gate-failed": "bad",
    "error": "bad",
    "interrupted": "warn",
    "skipped": "warn",
    "not-reached": "warn",
    "failed": "bad",
    "not judged": "warn",
    "undecided": "warn",
}
_TEMPLATE = "report.html.jinja"


def write_html(report: Mapping[str, Any]) -> str:
    """Return the text of report.html.

    Raises:
        InputError: not a report of schema 2.
    """
    checked = validate_report(report)
    text: str = _template().render(
        report=checked,
        view=view,
        notes=notes,
        pictures=[("wide", chart.scatter(checked)), ("narrow", chart.scatter(checked, chart.NARROW))],
        headline=headline(checked),
        rows=view.rows(checked),
        metrics=view.metrics(checked),
        sizes=view.batch_sizes(checked),
        bars=_bars(checked),
        verdict=_verdict,
        badge=lambda status: _BADGES.get(status, "plain"),
    )
    return text


@cache
def _template() -> Any:
    """Return the compiled template; compiling takes longer than drawing, and a run draws after each step."""
    import jinja2

    source = files("smelt.evaluate.report").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    # everything in a report may come from a stranger's recipe, so all of it is escaped
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    return environment.from_string(source)


def _shown(value: object) -> object:
    """Return a text with its control and direction characters as escapes; what is markup already stays."""
    return printable(value) if type(value) is str else value


def _verdict(difference: Difference | None, higher_is_better: bool) -> str:
    """Return the CSS class of a difference: good or bad only where it is significant."""
    if difference is None or not view.matters(difference) or not difference.difference:
        return "even"
    return "good" if (difference.difference > 0) == higher_is_better else "bad"


def _bars(report: Report) -> list[tuple[Step, float]]:
    """Return the steps that have a size, with the length of their bar in percent of the largest."""
    sized = [row.step for row in view.rows(report) if row.step.size_bytes]
    most = max((step.size_bytes or 0 for step in sized), default=0)
    return [(step, round(100 * (step.size_bytes or 0) / most, 2)) for step in sized]
