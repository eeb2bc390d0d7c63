"""The headline and the table of steps for a terminal, in plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from smelt.core.messages import Message
from smelt.evaluate.report import notes, view
from smelt.evaluate.report.headline import lines as headline_lines
from smelt.evaluate.report.schema import Report, Step, validate_report

_ASCII = str.maketrans("├└│─–−…×·", "|`|---~x,")
_NARROWEST_NAME = 10
# warnings about steps that a terminal shows; the report has all
_MOST_WARNINGS = 3


def table(report: Mapping[str, Any], width: int = 80, ascii_only: bool = False) -> str:
    """Return the headline, and the steps as a tree with metric, difference, p50, speed-up and size.

    Where no times were taken, without those; where weights are codes and no name is cut for it, with the bits
    of a coded weight.

    Args:
        report: a report.json.
        width: columns of the terminal; at least 60 are used.
        ascii_only: write no other characters than ASCII, for terminals that cannot show them.

    Raises:
        InputError: not a report of schema 2.
    """
    checked = validate_report(report)
    width = max(60, width)
    metric = next(iter(view.metrics(checked)), None)
    sizes = view.batch_sizes(checked)
    times = ["p50 ms", "speed-up"] if sizes else []
    head = [view.label(metric) if metric else "quality", "diff", *times, "MB"]
    lines = [(row, _cells(row.step, metric, sizes)) for row in view.rows(checked)]
    names = [row.branch + row.step.name for row, _ in lines]
    longest = max([len("step"), *map(len, names)])
    with_bits = [(row, [*cells, view.bits(row.step, checked)] if cells else []) for row, cells in lines]
    bits = view.coded(checked) and longest <= width - _taken([*head, "bits"], with_bits)
    if bits:  # no name is cut for them, the report has them too
        head, lines = [*head, "bits"], with_bits
    widths = _widths(head, lines)
    room = min(max(_NARROWEST_NAME, width - _taken(head, lines)), longest)
    title = _line("step", room, head, widths)
    text = [*_headline(checked, width), title, "─" * len(title)]
    for name, (row, cells) in zip(names, lines, strict=True):
        text.append(_line(name, room, cells, widths) if cells else _unmeasured(name, row.step, room, width))
    text += ["", *_legend(checked, metric, sizes, bits, width)]
    joined = "\n".join(line.rstrip() for line in text)
    return joined.translate(_ASCII).encode("ascii", "replace").decode() if ascii_only else joined


def _widths(head: list[str], lines: list[tuple[view.Row, list[str]]]) -> list[int]:
    """Return the width of each column of figures."""
    return [max([len(head[i]), *(len(cells[i]) for _, cells in lines if cells)]) for i in range(len(head))]


def _taken(head: list[str], lines: list[tuple[view.Row, list[str]]]) -> int:
    """Return what the columns of figures take, with the blanks before each."""
    return sum(_widths(head, lines)) + 2 * len(head)


def _cells(step: Step, metric: str | None, sizes: list[int]) -> list[str]:
    """Return the cells of a measured step; nothing for one that was not. No sizes: no times were taken."""
    if step.status not in ("done", "cached"):
        return []
    score = step.quality.get(metric) if metric else None
    difference = step.against_baseline.get(metric) if metric else None
    latency = step.at(sizes[0]) if sizes else None
    mark = "" if difference is None else "*" if view.matters(difference) else " "
    return [
        view.number(score.value if score else None, view.digits(metric)),
        view.change(difference, metric) + mark,
        *([view.median(latency), view.speed(latency)] if sizes else []),
        view.megabytes(step.size_bytes),
    ]


def _headline(report: Report, width: int) -> list[str]:
    found = [
        line for text in headline_lines(report) for line in textwrap.wrap(text, width, break_on_hyphens=False)
    ]
    return [*found, ""] if found else []


def _line(name: str, room: int, cells: list[str], widths: list[int]) -> str:
    return _cut(name, room).ljust(room) + "".join(
        "  " + cell.rjust(size) for cell, size in zip(cells, widths, strict=True)
    )


def _unmeasured(name: str, step: Step, room: int, width: int) -> str:
    words = " ".join([step.status + ":", *next(iter(step.why), "").split()])
    return f"{_cut(name, room).ljust(room)}  {_cut(words.rstrip(':'), width - room - 2)}"


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _warned(report: Report) -> list[str]:
    """Return the first warnings about steps, each once, and whom the others are about.

    Those about texts that were cut come after all others.
    """
    about: dict[Message, list[str]] = {}
    for step in report.steps:
        for found in step.warnings:
            about.setdefault(found, []).append(f"'{step.name}'")
    ordered = notes.grave_first(about)
    said = [f"{found.severity}: {', '.join(about[found])}: {found}" for found in ordered]
    left = dict.fromkeys(name for found in ordered[_MOST_WARNINGS:] for name in about[found])
    more = len(said) - _MOST_WARNINGS
    return said[:_MOST_WARNINGS] + (
        [f"the report has {more} more warning{'s' * (more > 1)}, about {', '.join(left)}"] if left else []
    )


def _unscored(report: Report) -> list[str]:
    """Return which steps are not scored, each reason once."""
    about: dict[str, list[str]] = {}
    for step in report.steps:
        if step.unscored:
            about.setdefault(step.unscored, []).append(f"'{step.name}'")
    return [
        f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} not scored: {why}"
        for why, names in about.items()
    ]


def _legend(report: Report, metric: str | None, sizes: list[int], bits: bool, width: int) -> list[str]:
    parts = []
    if report.base and report.base.quality:
        parts.append(f"diff{' and speed-up' * bool(sizes)} against '{report.baseline}'")
    if any(metric in step.against_baseline for step in report.steps):
        parts.append("differences include draws of the graph" if report.draws else "* p < 0.05")
    if sizes:
        parts.append(f"batch {sizes[0]}")
    if bits:
        parts.append("bits per quantized weight")
    if n := view.sample_text(report):
        parts.append(n)
    if any(row.stable is False for step in report.steps for row in step.latency):
        parts.append(f"{view.DOUBT} no speed is claimed")
    lines = textwrap.wrap(", ".join(parts), width) if parts else []
    failed = [
        f"gate {notes.verdict(gate)} at '{step.name}': {notes.gate_text(gate)}"
        + (f", read {notes.gate_value(gate)}" if gate.value is not None else "")
        + (f": {gate.reason}" if gate.reason and gate.reason not in step.why else "")
        for step in report.steps
        for gate in step.gates
        if not gate.passed or gate.undecided
    ]
    few = [(gate, step) for step in report.steps for gate in step.gates if gate.n_needed is not None]
    failed += [f"'{step.name}': {notes.few_text(gate, step)}" for gate, step in few]
    failed += [notes.tested(report), *notes.on_test(report)]
    failed += _unscored(report)
    # a step that is done can still have failed to be timed
    untimed = [step for step in report.steps if step.error and step.status != "error"]
    failed += [f"'{step.name}': {step.error.message}" for step in untimed if step.error]
    if earlier := [step.name for step in report.steps if step.from_previous_run]:
        failed.append(f"kept from an earlier run in this folder: {', '.join(earlier)}")
    failed += [f"{message.severity}: {message}" for message in report.warnings]
    failed += _warned(report)
    for text in failed:
        lines += textwrap.wrap(text, width)
    return [*lines, f"status: {report.status}"]
