"""report.md, drawn from report.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.core.data import CUSTOM, IMAGES
from smelt.core.text import printable
from smelt.evaluate.report import notes, view
from smelt.evaluate.report.headline import lines as headline_lines
from smelt.evaluate.report.schema import Report, Step, Tested, validate_report

_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_[]|#~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def write_markdown(report: Mapping[str, Any]) -> str:
    """Return the text of report.md (GitHub's Markdown).

    Raises:
        InputError: not a report of schema 2.
    """
    checked = validate_report(report)
    parts = [_header(checked), "## Steps", _steps(checked)]
    if len(view.metrics(checked)) > 1:
        parts += ["## Quality", _quality(checked)]
    if any(step.test for step in checked.steps):
        parts += ["## On test", _on_test(checked)]
    if len(view.batch_sizes(checked)) > 0:
        parts += ["## Latency", _latency(checked)]
    if any(step.gates for step in checked.steps):
        parts += ["## Gates", _gates(checked)]
    if notes.notes(checked):
        lines = [tuple(map(_text, note)) for note in notes.notes(checked)]
        parts += ["## Notes", "\n".join(f"- **{name}** {kind}: {text}" for name, kind, text in lines)]
    parts += ["## How it was measured", _foot(checked)]
    return "\n\n".join(parts) + "\n"


def _text(value: object) -> str:
    """Escape what Markdown or HTML would take as markup, on one line."""
    return " ".join(printable(str(value)).split()).translate(_SPECIAL)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    marks = [":--" if i < left else "--:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, marks, *rows])


def _header(report: Report) -> str:
    task, n = _text(report.recipe.get("task") or view.MISSING), view.sample_text(report) or "nothing scored"
    lines = [
        f"# {_text(view.title(report))}: {_text(report.status)}",
        *(f"**{_text(line)}**" for line in headline_lines(report)),
        f"Task {task}, {n}, {_text(view.hardware(report))}.",
    ]
    if report.frontier:
        lines.append("On the front of quality and speed: " + ", ".join(map(_text, report.frontier)) + ".")
    return "\n\n".join(lines)


def _name(row: view.Row) -> str:
    # Markdown drops spaces at the start of a cell
    return row.branch.replace(" ", "&nbsp;") + _text(row.step.name)


def _steps(report: Report) -> str:
    metric = next(iter(view.metrics(report)), None)
    sizes = view.batch_sizes(report)
    timed = [cell for size in sizes for cell in (f"p50 ms, batch {size}", "speed-up")]
    quality = [f"{_text(view.label(metric))} (95 % interval)", "difference"] if metric else []
    bits = ["bits per weight"] if view.coded(report) else []
    head = ["step", "stage", "format", "status", *quality, *timed, "MB", "M parameters", *bits]
    rows = [
        [
            _name(row),
            _text(row.step.stage),
            _text(view.kind_of(row.step)),
            row.step.status,
            *([_score(row.step, metric), _difference(row.step, metric)] if metric else []),
            *(cell for size in sizes for cell in _times(row.step, size)),
            _size(row.step, report.base),
            view.millions(row.step.parameters),
            *([_text(view.bits(row.step, report))] if bits else []),
        ]
        for row in view.rows(report)
    ]
    against = _text(report.baseline or view.MISSING)
    legend = "A step goes on from the one above it, branches are drawn; differences" + (
        " and speed-ups are against" if sizes else " are against"
    )
    doubt = (
        f" {view.DOUBT} behind a speed-up: it is not claimed (notes)."
        if any(entry.stable is False for step in report.steps for entry in step.latency)
        else ""
    )
    of = "" if report.judged_on == "test" else f" Scores are of {report.judged_on} rows."
    return f"{_table(head, rows, left=4)}\n\n{legend} {against}; \\* p < 0.05.{of}{doubt}"


def _score(step: Step | Tested, metric: str) -> str:
    score = step.quality.get(metric)
    if score is None:
        return view.MISSING
    shown = view.digits(metric)
    return f"{view.number(score.value, shown)} {_text(view.interval(score.ci95, shown))}".rstrip()


def _difference(step: Step | Tested, metric: str) -> str:
    found = step.against_baseline.get(metric)
    return view.change(found, metric) + ("\\*" if found and view.matters(found) else "")


def _times(step: Step, size: int) -> tuple[str, str]:
    entry = step.at(size)
    if entry is None:
        return view.MISSING, view.MISSING
    if entry.speedup is None:
        return view.significant_digits(entry.p50_ms), view.MISSING
    speedup = f"{view.speed(entry)} {_text(view.interval(entry.speedup_ci95))}".rstrip()
    return view.significant_digits(entry.p50_ms), speedup


def _size(step: Step, base: Step | None) -> str:
    ratio = view.ratio_text(step, base)
    return view.megabytes(step.size_bytes) + (f" ({ratio})" if ratio else "")


def _quality(report: Report) -> str:
    metrics = view.metrics(report)
    head = ["step", *(_text(view.label(metric)) for metric in metrics)]
    rows = []
    for row in view.rows(report):
        if row.step.quality:
            cells = [(_score(row.step, m), _difference(row.step, m)) for m in metrics]
            rows.append([_name(row), *(s if d == view.MISSING else f"{s}, {d}" for s, d in cells)])
    return _table(head, rows)


def _on_test(report: Report) -> str:
    """Draw what the steps that were chosen on validation score on test."""
    metrics = view.metrics(report)
    rows = [
        [_name(row), *(f"{_score(tested, m)}, {_difference(tested, m)}" for m in metrics)]
        for row in view.rows(report)
        if (tested := row.step.test)
    ]
    said = "Chosen on validation, scored here on other rows: what to expect of new ones."
    return "\n\n".join([said, _table(["step", *(_text(view.label(metric)) for metric in metrics)], rows)])


def _latency(report: Report) -> str:
    head = ["step", "batch", "device", "threads", "p50 ms", "p90 ms", "p99 ms", "baseline p50 ms"]
    head += ["processor ms", "speed-up by it", "throughput", "tokens in", "tokens out"]
    rows = [
        [
            _name(row),
            str(entry.batch_size),
            row.step.device or view.MISSING,
            view.MISSING if entry.threads is None else str(entry.threads),
            *map(view.significant_digits, (entry.p50_ms, entry.p90_ms, entry.p99_ms, entry.baseline_p50_ms)),
            view.significant_digits(entry.cpu_ms),
            view.cpu_speed(entry),
            f"{view.significant_digits(entry.throughput)} {_text(entry.unit or '')}".rstrip(),
            view.number(entry.input_tokens, 1),
            view.number(entry.output_tokens, 1),
        ]
        for row in view.rows(report)
        for entry in row.step.latency
    ]
    inside: dict[str, str] = {
        IMAGES: "reading, decoding and resizing files are",
        CUSTOM: "nothing else is",
    }
    what = inside.get(str(report.recipe.get("task")), "tokenizing and detokenizing are")
    said = (
        f"From {view.way(report)}: {what} part of it; a call is one batch. Beside its p50 stands the"
        " baseline's in the same rounds; by CPU time a speed-up is known on a busy machine too."
    )
    return "\n\n".join([said, _table(head, rows), *_parts(report)])


def _parts(report: Report) -> list[str]:
    """Return the table of what the median call goes into; none where no runner shows it."""
    found = [
        (row, entry.batch_size, view.parts(report, entry.parts))
        for row in view.rows(report)
        for entry in row.step.latency
        if entry.parts
    ]
    if not found:
        return []
    head = ["step", "batch", *(f"{name} ms" for name, _ in found[0][2])]
    rows = [
        [_name(row), str(size), *(view.significant_digits(ms) for _, ms in parts)]
        for row, size, parts in found
    ]
    return ["What the median call goes into:", _table(head, rows)]


def _gates(report: Report) -> str:
    rows = [
        [
            _name(row),
            _text(view.label(gate.metric)),
            _text(gate.kind if gate.confidence is None else f"{gate.kind}, confidence {gate.confidence:g}"),
            word if (word := notes.verdict(gate)) == "passed" else f"**{word}**",
            _text(notes.gate_value(gate)),
            view.quantity(gate.metric, gate.limit),
        ]
        for row in view.rows(report)
        for gate in row.step.gates
    ]
    return _table(["step", "metric", "kind", "result", "value", "limit"], rows, left=4)


def _foot(report: Report) -> str:
    pairs = [(view.label(metric), signature) for metric, signature in view.signatures(report)]
    lines = [f"- {_text(name)}: {_text(text)}" for name, text in pairs + view.flatten(report.environment)]
    return "\n".join(lines) or view.MISSING
