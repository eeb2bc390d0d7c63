"""Renders report.md from report.json only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.core.data import CUSTOM_TASK, IMAGE_CLASSIFICATION
from smelt.core.text import escape_controls
from smelt.evaluate.report import notes, view
from smelt.evaluate.report.headline import headline_lines
from smelt.evaluate.report.schema import ReportData, ScoresOnTest, StepReport, validate_report

_ESCAPES = str.maketrans({c: f"\\{c}" for c in "\\`*_[]|#~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def render_markdown(report: Mapping[str, Any]) -> str:
    """Return the text of report.md (GitHub's Markdown).

    Raises:
        InputError: not a report of schema 3.
    """
    checked = validate_report(report)
    parts = [_header_section(checked), "## Steps", _steps_section(checked)]
    if len(view.metric_names(checked)) > 1:
        parts += ["## Quality", _quality_section(checked)]
    if any(step.test for step in checked.steps):
        parts += ["## On test", _test_section(checked)]
    if len(view.batch_sizes(checked)) > 0:
        parts += ["## Latency", _latency_section(checked)]
    if any(step.gates for step in checked.steps):
        parts += ["## Gates", _gates_section(checked)]
    if notes.report_notes(checked):
        lines = [tuple(map(_escape, note)) for note in notes.report_notes(checked)]
        parts += ["## Notes", "\n".join(f"- **{name}** {kind}: {text}" for name, kind, text in lines)]
    parts += ["## How it was measured", _footer_section(checked)]
    return "\n\n".join(parts) + "\n"


def _escape(value: object) -> str:
    """Escape what Markdown or HTML would take as markup, on one line."""
    return " ".join(escape_controls(str(value)).split()).translate(_ESCAPES)


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    marks = [":--" if i < left else "--:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, marks, *rows])


def _header_section(report: ReportData) -> str:
    task, n = (
        _escape(report.recipe.get("task") or view.MISSING_TEXT),
        view.sample_text(report) or "nothing scored",
    )
    lines = [
        f"# {_escape(view.report_title(report))}: {_escape(report.status)}",
        *(f"**{_escape(line)}**" for line in headline_lines(report)),
        f"Task {task}, {n}, {_escape(view.hardware(report))}.",
    ]
    if report.frontier:
        lines.append("Pareto-optimal in quality and speed: " + ", ".join(map(_escape, report.frontier)) + ".")
    return "\n\n".join(lines)


def _step_name_cell(row: view.TreeRow) -> str:
    # Markdown drops spaces at the start of a cell
    return row.branch.replace(" ", "&nbsp;") + _escape(row.step.name)


def _steps_section(report: ReportData) -> str:
    metric = next(iter(view.metric_names(report)), None)
    sizes = view.batch_sizes(report)
    timed = [cell for size in sizes for cell in (f"p50 ms, batch {size}", "speed-up")]
    quality = [f"{_escape(view.metric_label(metric))} (95 % interval)", "difference"] if metric else []
    bits = ["bits per weight"] if view.has_quantized_weights(report) else []
    head = ["step", "stage", "format", "status", *quality, *timed, "MB", "M parameters", *bits]
    rows = [
        [
            _step_name_cell(row),
            _escape(row.step.stage),
            _escape(view.runtime_label(row.step)),
            row.step.status,
            *([_score_cell(row.step, metric), _difference_cell(row.step, metric)] if metric else []),
            *(cell for size in sizes for cell in _latency_cells(row.step, size)),
            _size_cell(row.step, report.baseline_step),
            view.millions(row.step.parameters),
            *([_escape(view.bits_per_weight_text(row.step, report))] if bits else []),
        ]
        for row in view.tree_rows(report)
    ]
    against = _escape(report.baseline or view.MISSING_TEXT)
    legend = "Each step continues from the one above it; branches are drawn. Differences" + (
        " and speed-ups are relative to" if sizes else " are relative to"
    )
    doubt = (
        f" {view.DISTURBED_MARK} after a speed-up: it is unreliable (see the notes)."
        if any(entry.stable is False for step in report.steps for entry in step.latency)
        else ""
    )
    of = "" if report.judged_on == "test" else f" Scores are of {report.judged_on} samples."
    return f"{_markdown_table(head, rows, left=4)}\n\n{legend} {against}; \\* p < 0.05.{of}{doubt}"


def _score_cell(step: StepReport | ScoresOnTest, metric: str) -> str:
    score = step.quality.get(metric)
    if score is None:
        return view.MISSING_TEXT
    shown = view.metric_digits(metric)
    return f"{view.number_text(score.value, shown)} {_escape(view.interval_text(score.ci95, shown))}".rstrip()


def _difference_cell(step: StepReport | ScoresOnTest, metric: str) -> str:
    found = step.against_baseline.get(metric)
    return view.difference_text(found, metric) + ("\\*" if found and view.is_significant(found) else "")


def _latency_cells(step: StepReport, size: int) -> tuple[str, str]:
    entry = step.latency_at(size)
    if entry is None:
        return view.MISSING_TEXT, view.MISSING_TEXT
    if entry.speedup is None:
        return view.significant_digits(entry.p50_ms), view.MISSING_TEXT
    speedup = f"{view.speedup_text(entry)} {_escape(view.interval_text(entry.speedup_ci95))}".rstrip()
    return view.significant_digits(entry.p50_ms), speedup


def _size_cell(step: StepReport, base: StepReport | None) -> str:
    ratio = view.size_ratio_text(step, base)
    return view.megabytes(step.size_bytes) + (f" ({ratio})" if ratio else "")


def _quality_section(report: ReportData) -> str:
    metrics = view.metric_names(report)
    head = ["step", *(_escape(view.metric_label(metric)) for metric in metrics)]
    rows = []
    for row in view.tree_rows(report):
        if row.step.quality:
            cells = [(_score_cell(row.step, m), _difference_cell(row.step, m)) for m in metrics]
            rows.append(
                [_step_name_cell(row), *(s if d == view.MISSING_TEXT else f"{s}, {d}" for s, d in cells)]
            )
    return _markdown_table(head, rows)


def _test_section(report: ReportData) -> str:
    """Return the test scores of the steps that were chosen on validation."""
    metrics = view.metric_names(report)
    rows = [
        [_step_name_cell(row), *(f"{_score_cell(tested, m)}, {_difference_cell(tested, m)}" for m in metrics)]
        for row in view.tree_rows(report)
        if (tested := row.step.test)
    ]
    said = "Steps were chosen on validation and are scored here on test: the expected quality on new data."
    return "\n\n".join(
        [said, _markdown_table(["step", *(_escape(view.metric_label(metric)) for metric in metrics)], rows)]
    )


def _latency_section(report: ReportData) -> str:
    head = ["step", "batch", "device", "threads", "p50 ms", "p90 ms", "p99 ms", "baseline p50 ms"]
    head += ["CPU ms", "speed-up by CPU time", "throughput", "tokens in", "tokens out"]
    rows = [
        [
            _step_name_cell(row),
            str(entry.batch_size),
            row.step.device or view.MISSING_TEXT,
            view.MISSING_TEXT if entry.threads is None else str(entry.threads),
            *map(view.significant_digits, (entry.p50_ms, entry.p90_ms, entry.p99_ms, entry.baseline_p50_ms)),
            view.significant_digits(entry.cpu_ms),
            view.cpu_speedup_text(entry),
            f"{view.significant_digits(entry.throughput)} {_escape(entry.unit or '')}".rstrip(),
            view.number_text(entry.input_tokens, 1),
            view.number_text(entry.output_tokens, 1),
        ]
        for row in view.tree_rows(report)
        for entry in row.step.latency
    ]
    inside: dict[str, str] = {
        IMAGE_CLASSIFICATION: "reading, decoding and resizing files are",
        CUSTOM_TASK: "nothing else is",
    }
    what = inside.get(str(report.recipe.get("task")), "tokenizing and detokenizing are")
    said = (
        f"From {view.latency_scope(report)}: {what} part of it; a call is one batch. The baseline's p50 is"
        " from the same rounds. The speed-up by CPU time is also reliable on a busy machine."
    )
    return "\n\n".join([said, _markdown_table(head, rows), *_timings_table(report)])


def _timings_table(report: ReportData) -> list[str]:
    """Return the table of the parts of the median call; empty where no runner measures them."""
    found = [
        (row, entry.batch_size, view.timing_parts(report, entry.parts))
        for row in view.tree_rows(report)
        for entry in row.step.latency
        if entry.parts
    ]
    if not found:
        return []
    head = ["step", "batch", *(f"{name} ms" for name, _ in found[0][2])]
    rows = [
        [_step_name_cell(row), str(size), *(view.significant_digits(ms) for _, ms in parts)]
        for row, size, parts in found
    ]
    return ["Parts of the median call:", _markdown_table(head, rows)]


def _gates_section(report: ReportData) -> str:
    rows = [
        [
            _step_name_cell(row),
            _escape(view.metric_label(gate.metric)),
            _escape(gate.kind if gate.confidence is None else f"{gate.kind}, confidence {gate.confidence:g}"),
            word if (word := notes.gate_verdict(gate)) == "passed" else f"**{word}**",
            _escape(notes.gate_value_text(gate)),
            view.gate_quantity_text(gate.metric, gate.limit),
        ]
        for row in view.tree_rows(report)
        for gate in row.step.gates
    ]
    return _markdown_table(["step", "metric", "kind", "result", "value", "limit"], rows, left=4)


def _footer_section(report: ReportData) -> str:
    pairs = [(view.metric_label(metric), signature) for metric, signature in view.signatures(report)]
    lines = [f"- {_escape(name)}: {_escape(text)}" for name, text in pairs + view.flatten(report.environment)]
    return "\n".join(lines) or view.MISSING_TEXT
