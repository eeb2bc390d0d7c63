"""Renders the headline and the table of steps as plain text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from smelt.core.messages import Message
from smelt.evaluate.report import notes, view
from smelt.evaluate.report.headline import headline_lines
from smelt.evaluate.report.schema import ReportData, StepReport, validate_report

_ASCII_REPLACEMENTS = str.maketrans("├└│─–−…×·", "|`|---~x,")
_MIN_NAME_WIDTH = 10
# warnings about steps that a terminal shows; the report contains all
_MAX_WARNINGS = 3


def render_table(report: Mapping[str, Any], width: int = 80, ascii_only: bool = False) -> str:
    """Return the headline, and the steps as a tree with metric, difference, p50, speed-up and size.

    Where no times were measured, without those; with quantized weights, and if no name is truncated for it,
    also with the bits per quantized weight.

    Args:
        report: a report.json.
        width: columns of the terminal; at least 60 are used.
        ascii_only: use ASCII characters only, for terminals that cannot show others.

    Raises:
        InputError: not a report of schema 3.
    """
    checked = validate_report(report)
    width = max(60, width)
    metric = next(iter(view.metric_names(checked)), None)
    sizes = view.batch_sizes(checked)
    times = ["p50 ms", "speed-up"] if sizes else []
    head = [view.metric_label(metric) if metric else "quality", "diff", *times, "MB"]
    lines = [(row, _step_cells(row.step, metric, sizes)) for row in view.tree_rows(checked)]
    names = [row.branch + row.step.name for row, _ in lines]
    longest = max([len("step"), *map(len, names)])
    with_bits = [
        (row, [*cells, view.bits_per_weight_text(row.step, checked)] if cells else []) for row, cells in lines
    ]
    bits = view.has_quantized_weights(checked) and longest <= width - _columns_width(
        [*head, "bits"], with_bits
    )
    if bits:  # no name is truncated for them, the report contains them too
        head, lines = [*head, "bits"], with_bits
    widths = _column_widths(head, lines)
    room = min(max(_MIN_NAME_WIDTH, width - _columns_width(head, lines)), longest)
    title = _table_line("step", room, head, widths)
    text = [*_headline_lines(checked, width), title, "─" * len(title)]
    for name, (row, cells) in zip(names, lines, strict=True):
        text.append(
            _table_line(name, room, cells, widths) if cells else _unmeasured_line(name, row.step, room, width)
        )
    text += ["", *_legend_lines(checked, metric, sizes, bits, width)]
    joined = "\n".join(line.rstrip() for line in text)
    return joined.translate(_ASCII_REPLACEMENTS).encode("ascii", "replace").decode() if ascii_only else joined


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
    mark = "" if difference is None else "*" if view.is_significant(difference) else " "
    return [
        view.number_text(score.value if score else None, view.metric_digits(metric)),
        view.difference_text(difference, metric) + mark,
        *([view.median_text(latency), view.speedup_text(latency)] if sizes else []),
        view.megabytes(step.size_bytes),
    ]


def _headline_lines(report: ReportData, width: int) -> list[str]:
    found = [
        line for text in headline_lines(report) for line in textwrap.wrap(text, width, break_on_hyphens=False)
    ]
    return [*found, ""] if found else []


def _table_line(name: str, room: int, cells: list[str], widths: list[int]) -> str:
    return _truncate(name, room).ljust(room) + "".join(
        "  " + cell.rjust(size) for cell, size in zip(cells, widths, strict=True)
    )


def _unmeasured_line(name: str, step: StepReport, room: int, width: int) -> str:
    words = " ".join([step.status + ":", *next(iter(step.failure_texts), "").split()])
    return f"{_truncate(name, room).ljust(room)}  {_truncate(words.rstrip(':'), width - room - 2)}"


def _truncate(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _warning_lines(report: ReportData) -> list[str]:
    """Return the first warnings about steps, each once, and the steps that the others are about.

    Warnings about truncated texts come last.
    """
    about: dict[Message, list[str]] = {}
    for step in report.steps:
        for found in step.warnings:
            about.setdefault(found, []).append(f"'{step.name}'")
    ordered = notes.sort_warnings(about)
    said = [f"{found.severity}: {', '.join(about[found])}: {found}" for found in ordered]
    left = dict.fromkeys(name for found in ordered[_MAX_WARNINGS:] for name in about[found])
    more = len(said) - _MAX_WARNINGS
    return said[:_MAX_WARNINGS] + (
        [f"the report has {more} more warning{'s' * (more > 1)}, about {', '.join(left)}"] if left else []
    )


def _unscored_lines(report: ReportData) -> list[str]:
    """Return the steps that are not scored, each reason once."""
    about: dict[str, list[str]] = {}
    for step in report.steps:
        if step.unscored:
            about.setdefault(step.unscored, []).append(f"'{step.name}'")
    return [
        f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} not scored: {why}"
        for why, names in about.items()
    ]


def _legend_lines(
    report: ReportData, metric: str | None, sizes: list[int], bits: bool, width: int
) -> list[str]:
    parts = []
    if report.baseline_step and report.baseline_step.quality:
        parts.append(f"diff{' and speed-up' * bool(sizes)} relative to '{report.baseline}'")
    if any(metric in step.against_baseline for step in report.steps):
        parts.append("differences include the graph's random numbers" if report.is_random else "* p < 0.05")
    if sizes:
        parts.append(f"batch {sizes[0]}")
    if bits:
        parts.append("bits per quantized weight")
    if n := view.sample_text(report):
        parts.append(n)
    if any(row.stable is False for step in report.steps for row in step.latency):
        parts.append(f"{view.DISTURBED_MARK} unreliable speed")
    lines = textwrap.wrap(", ".join(parts), width) if parts else []
    failed = [
        f"gate {notes.gate_verdict(gate)} at '{step.name}': {notes.gate_text(gate)}"
        + (f", got {notes.gate_value_text(gate)}" if gate.value is not None else "")
        + (f": {gate.reason}" if gate.reason and gate.reason not in step.failure_texts else "")
        for step in report.steps
        for gate in step.gates
        if not gate.passed or gate.undecided
    ]
    few = [(gate, step) for step in report.steps for gate in step.gates if gate.n_needed is not None]
    failed += [f"'{step.name}': {notes.too_few_examples_text(gate, step)}" for gate, step in few]
    failed += [notes.test_scores_text(report), *notes.failed_on_test_texts(report)]
    failed += _unscored_lines(report)
    # a finished step can still have failed to be timed
    untimed = [step for step in report.steps if step.error and step.status != "error"]
    failed += [f"'{step.name}': {step.error.message}" for step in untimed if step.error]
    if earlier := [step.name for step in report.steps if step.from_previous_run]:
        failed.append(f"kept from an earlier run in this folder: {', '.join(earlier)}")
    failed += [f"{message.severity}: {message}" for message in report.warnings]
    failed += _warning_lines(report)
    for text in failed:
        lines += textwrap.wrap(text, width)
    return [*lines, f"status: {report.status}"]
