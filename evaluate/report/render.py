"""Render report.html and the table of steps for a terminal, each from report.json only.

report.html is one file without external resources; its only script searches the examples.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from smelt.core.messages import Message, count_text, escape_controls
from smelt.data.tasks import tasks_with
from smelt.evaluate.report import chart, examples, score_tables, sensitivity, view
from smelt.evaluate.report.drawing import css_colors, page_svg
from smelt.evaluate.report.schema import ReportData, StepReport, validate_report
from smelt.evaluate.report.step_schema import ScoreDifference
from smelt.evaluate.report.verdict import headlines, limited_run_text
from smelt.evaluate.report.verdict_facts import verdict_facts

_BADGES = {
    "passed": "good",
    "gate-failed": "bad",
    "error": "bad",
    "interrupted": "warn",
    "skipped": "warn",
    "not-reached": "warn",
    "failed": "bad",
    "not judged": "warn",
    "within the limit, the 95 % interval is not": "warn",
}
_TEMPLATE = "report.html.jinja"


def render_html(report: Mapping[str, Any], with_charts: bool = True) -> str:
    """Return the text of report.html.

    Args:
        report: a report.json.
        with_charts: draw the charts, which takes most of the time.

    Raises:
        InputError: not a report of schema 3.
    """
    checked = validate_report(report)
    picture = chart.scatter_chart(checked) if with_charts else None
    losses = chart.find_waterfall(checked)
    text: str = _template().render(
        report=checked,
        view=view,
        picture=picture,
        drawings=_drawings(picture, checked) if picture else [],
        losses=losses,
        layers=sensitivity.find_layer_table(checked),
        sensitivity=sensitivity,
        score_tables=score_tables,
        loss_drawings=_loss_drawings(losses) if losses and with_charts else [],
        colors=css_colors,
        trial=limited_run_text(checked),
        facts=verdict_facts(checked),
        rows=view.tree_rows(checked),
        metrics=view.metric_names(checked),
        sizes=view.batch_sizes(checked),
        bars=_size_bars(checked),
        change_class=_significance_class,
        badge=lambda status: _BADGES.get(status, "plain"),
        examples=examples,
        classification_tasks=tasks_with(output="labels"),
    )
    return escape_controls(text)


def _drawings(picture: chart.Chart, report: ReportData) -> list[str]:
    """Return the chart as markup for desktops and for phones; CSS hides one of them."""
    label = (
        f"{picture.metric} against the {picture.quantity}; the same numbers are in the"
        f" table of steps. Pareto-optimal: {', '.join(report.pareto_front) or 'none'}."
    )
    return [page_svg(chart.page_figure(picture, size, label)) for size in (chart.WIDE, chart.NARROW)]


def _loss_drawings(losses: chart.Waterfall) -> list[str]:
    layouts = (chart.WATERFALL_WIDE, chart.WATERFALL_NARROW)
    return [page_svg(chart.waterfall_figure(losses, layout)) for layout in layouts]


@cache
def _template() -> Any:
    """Return the compiled template, cached because compiling takes longer than rendering."""
    import jinja2

    folder = files("smelt.evaluate.report")
    # the texts of a report may come from an untrusted recipe, so all of them are escaped
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
    )
    return environment.get_template(_TEMPLATE)


def _significance_class(difference: ScoreDifference | None, higher_is_better: bool) -> str:
    """Return the CSS class of a difference: good or bad only where it is significant."""
    if difference is None or not view.is_significant(difference) or not difference.difference:
        return "even"
    return "good" if (difference.difference > 0) == higher_is_better else "bad"


def _size_bars(report: ReportData) -> list[tuple[StepReport, float]]:
    """Return the steps that have a size, with the length of their bar in percent of the largest."""
    sized = [row.step for row in view.tree_rows(report) if row.step.size_bytes]
    max_bytes = max((step.size_bytes or 0 for step in sized), default=0)
    return [(step, round(100 * (step.size_bytes or 0) / max_bytes, 2)) for step in sized]


_MIN_NAME_WIDTH = 10
# warnings about steps that a terminal shows; the report contains all
_MAX_WARNINGS = 3


# not rich's tables: they have no cell across columns, which the reason of a failed step needs, and for this
# and the tables of `smelt bench` and `smelt store` they take as many lines of code
def render_table(report: Mapping[str, Any], width: int = 80) -> str:
    """Return the verdict, and the steps as a tree with metric, difference, p50, speed-up and size.

    Where no times were measured, without those. Operations and bits per weight are columns where they differ
    between steps and no name is truncated for them.

    Args:
        report: a report.json.
        width: columns of the terminal; at least 60 are used.

    Raises:
        InputError: not a report of schema 3.
    """
    checked = validate_report(report)
    width = max(60, width)
    metric = next(iter(view.metric_names(checked)), None)
    sizes = view.batch_sizes(checked)
    times = ["p50 ms", "speed-up"] if sizes else []
    head = [view.metric_label(metric) if metric else "quality", "difference", *times, "MB"]
    lines = [(row, _step_cells(row.step, metric, sizes)) for row in view.tree_rows(checked)]
    names = [row.branch + row.step.name for row, _ in lines]
    longest = max([len("step"), *map(len, names)])
    optional: list[tuple[str, Callable[[StepReport], str]]] = [
        ("M multiply-adds", lambda step: view.millions(step.operations)),
        ("bits", lambda step: view.bits_per_weight_text(step, checked)),
    ]
    for name, cell_text in optional:
        wider = [(row, [*cells, cell_text(row.step)] if cells else []) for row, cells in lines]
        differs = len({cells[-1] for _, cells in wider if cells} - {view.MISSING_TEXT}) > 1
        # no name is truncated for these, the report contains them too
        if differs and longest <= width - _columns_width([*head, name], wider):
            head, lines = [*head, name], wider
    widths = _column_widths(head, lines)
    name_width = min(max(_MIN_NAME_WIDTH, width - _columns_width(head, lines)), longest)
    title = _table_line("step", name_width, head, widths)
    text = [*_wrapped_verdict(checked, width), title, "─" * len(title)]
    for name, (row, cells) in zip(names, lines, strict=True):
        text.append(
            _table_line(name, name_width, cells, widths)
            if cells
            else f"{_truncate(name, name_width).ljust(name_width)}  {row.step.status}"
        )
    text += ["", *_legend_lines(checked, metric, sizes, width)]
    return "\n".join(line.rstrip() for line in text)


def _column_widths(head: list[str], lines: list[tuple[view.TreeRow, list[str]]]) -> list[int]:
    """Return the width of each column of numbers."""
    return [max([len(head[i]), *(len(cells[i]) for _, cells in lines if cells)]) for i in range(len(head))]


def _columns_width(head: list[str], lines: list[tuple[view.TreeRow, list[str]]]) -> int:
    """Return the total width of the columns of numbers, with the spaces before each."""
    return sum(_column_widths(head, lines)) + 2 * len(head)


def _step_cells(step: StepReport, metric: str | None, sizes: list[int]) -> list[str]:
    """Return the cells of a measured step; empty for others. Without sizes: no times were measured."""
    if step.status not in ("done", "cached"):
        return []
    score = step.quality.get(metric) if metric else None
    difference = step.against_baseline.get(metric) if metric else None
    latency = step.latency_at(sizes[0]) if sizes else None
    return [
        view.number_text(score.value if score else None, view.metric_digits(metric)),
        view.difference_and_interval_text(difference, metric),
        *([view.median_text(latency), view.speedup_text(latency)] if sizes else []),
        view.megabytes(step.size_bytes),
    ]


_FACT_INDENT = " " * 11


def _wrapped_verdict(report: ReportData, width: int) -> list[str]:
    """Return the verdict and its facts, a line for each as far as they fit."""
    lines = [] if report.status == "passed" else [f"Status: {report.status}."]
    lines += [
        line for text in headlines(report) for line in textwrap.wrap(text, width, break_on_hyphens=False)
    ]
    entries = [(fact.label, fact.text) for fact in verdict_facts(report)]
    entries += [("note", str(message)) for message in (report.verdict.warnings if report.verdict else ())]
    for label, text in entries:
        first = f"  {label}".ljust(len(_FACT_INDENT))
        lines += textwrap.wrap(
            text, width, break_on_hyphens=False, initial_indent=first, subsequent_indent=_FACT_INDENT
        )
    return [*lines, ""] if lines else []


def _table_line(name: str, room: int, cells: list[str], widths: list[int]) -> str:
    return _truncate(name, room).ljust(room) + "".join(
        "  " + cell.rjust(size) for cell, size in zip(cells, widths, strict=True)
    )


def _truncate(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _warning_lines(report: ReportData) -> list[str]:
    """Return the first warnings about steps, each once, and the steps that the others are about.

    Warnings about truncated texts come last.
    """
    steps_by_message: dict[Message, list[str]] = {}
    for step in report.steps:
        for message in step.warnings:
            steps_by_message.setdefault(message, []).append(f"'{step.name}'")
    ordered = view.sort_warnings(steps_by_message)
    lines = [f"{message.severity}: {', '.join(steps_by_message[message])}: {message}" for message in ordered]
    remaining_steps = dict.fromkeys(
        name for message in ordered[_MAX_WARNINGS:] for name in steps_by_message[message]
    )
    num_remaining = len(lines) - _MAX_WARNINGS
    return lines[:_MAX_WARNINGS] + (
        [
            f"the report has {num_remaining} more warning{'s' * (num_remaining > 1)}, about "
            f"{', '.join(remaining_steps)}"
        ]
        if remaining_steps
        else []
    )


def _unmeasured_lines(report: ReportData) -> list[str]:
    """Return the steps without an artifact, without scores or without times; each reason once."""
    names_by_reason: dict[tuple[str, str], list[str]] = {}
    for step in report.steps:
        for text in step.failure_texts:
            done = step.status in ("done", "cached")  # which may still have failed to be timed
            kind = "not scored: " if text == step.unscored else "" if done else f"{step.status}: "
            names_by_reason.setdefault((kind, text), []).append(f"'{step.name}'")
    return [f"{', '.join(names)}: {kind}{reason}" for (kind, reason), names in names_by_reason.items()]


def _legend_lines(report: ReportData, metric: str | None, sizes: list[int], width: int) -> list[str]:
    """Return what the table's numbers are, and what a reader needs to know about its steps."""
    sentences = []
    if metric and (n := view.sample_text(report)):
        sentences.append(f"{view.metric_label(metric)} of {n}.")
    if report.baseline_step and report.baseline_step.quality:
        timed = view.timed_baseline(report)
        sentences.append(
            f"Differences{' and speed-ups' * bool(sizes)} are relative to '{report.baseline}'{timed}."
        )
    if any(metric in step.against_baseline for step in report.steps):
        sentences.append(
            "Differences include the graph's random numbers; in brackets 95 % intervals."
            if report.is_random
            else f"In brackets 95 % intervals; {view.SIGNIFICANCE_LEGEND}."
        )
    if sizes:
        row = next(entry for step in report.steps for entry in step.latency)
        threads = f", {count_text(row.threads, 'thread')}" if row.threads else ""
        sentences.append(f"Times: median of a call, batch {sizes[0]}{threads}.")
    if any(row.stable is False for step in report.steps for row in step.latency):
        sentences.append(f"{view.DISTURBED_MARK}: unreliable, see the report.")
    notes = [
        f"'{step.name}': {text}" for step in report.steps if (text := view.measured_elsewhere_text(step))
    ]
    notes += [
        f"'{step.name}': gate {view.gate_verdict(gate)}: {view.gate_result_text(gate)}"
        + (f": {gate.reason}" if gate.reason and gate.reason not in step.failure_texts else "")
        for step in report.steps
        for gate in view.final_gates(step)
        if not gate.passed
    ]
    notes += [
        f"'{step.name}': {view.too_few_examples_text(gate, step)}"
        for step in report.steps
        for gate in step.gates
        if gate.n_needed is not None
    ]
    tested = [(step.name, view.score_texts(step.test)) for step in report.steps if step.test]
    notes += [f"'{name}' on test: {' '.join(texts)}" for name, texts in tested]
    notes += _unmeasured_lines(report)
    if previous_steps := [step.name for step in report.steps if step.from_previous_run]:
        notes.append(f"Kept from an earlier run in this folder: {', '.join(previous_steps)}.")
    notes += [f"{message.severity}: {message}" for message in report.warnings]
    notes += _warning_lines(report)
    return [
        line
        for text in (" ".join(sentences), *notes)
        for line in textwrap.wrap(text, width, break_on_hyphens=False)
    ]
