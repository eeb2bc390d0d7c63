"""Renders report.html from report.json only: one file, no scripts, no external resources."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from smelt.core.text import escape_controls
from smelt.evaluate.report import chart, notes, view
from smelt.evaluate.report.headline import headline
from smelt.evaluate.report.schema import ReportData, ScoreDifference, StepReport, validate_report

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


def render_html(report: Mapping[str, Any]) -> str:
    """Return the text of report.html.

    Raises:
        InputError: not a report of schema 3.
    """
    checked = validate_report(report)
    text: str = _template().render(
        report=checked,
        view=view,
        notes=notes,
        pictures=[
            ("wide", chart.scatter_chart(checked)),
            ("narrow", chart.scatter_chart(checked, chart.NARROW_CANVAS)),
        ],
        headline=headline(checked),
        rows=view.tree_rows(checked),
        metrics=view.metric_names(checked),
        sizes=view.batch_sizes(checked),
        bars=_size_bars(checked),
        verdict=_significance_class,
        badge=lambda status: _BADGES.get(status, "plain"),
    )
    return text


@cache
def _template() -> Any:
    """Return the compiled template, cached because compiling takes longer than rendering."""
    import jinja2

    source = files("smelt.evaluate.report").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    # the texts of a report may come from an untrusted recipe, so all of them are escaped
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_escape_controls,
    )
    return environment.from_string(source)


def _escape_controls(value: object) -> object:
    """Return a text with its control and direction characters escaped; markup is returned unchanged."""
    return escape_controls(value) if type(value) is str else value


def _significance_class(difference: ScoreDifference | None, higher_is_better: bool) -> str:
    """Return the CSS class of a difference: good or bad only where it is significant."""
    if difference is None or not view.is_significant(difference) or not difference.difference:
        return "even"
    return "good" if (difference.difference > 0) == higher_is_better else "bad"


def _size_bars(report: ReportData) -> list[tuple[StepReport, float]]:
    """Return the steps that have a size, with the length of their bar in percent of the largest."""
    sized = [row.step for row in view.tree_rows(report) if row.step.size_bytes]
    most = max((step.size_bytes or 0 for step in sized), default=0)
    return [(step, round(100 * (step.size_bytes or 0) / most, 2)) for step in sized]
