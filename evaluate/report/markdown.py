"""Render report.md from report.json: Markdown in which every text of the report is escaped.

Texts of a report may come from an untrusted recipe, model or data. `Markdown` escapes whatever is put into it
and is not `Markdown` itself, so that no section can forget it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from markupsafe import Markup

from smelt.core.messages import escape_controls
from smelt.evaluate.report import chart, examples, score_tables, sensitivity, view
from smelt.evaluate.report.schema import ReportData, StepReport, validate_report
from smelt.evaluate.report.step_schema import ScoresOnTest
from smelt.evaluate.report.verdict import headlines
from smelt.evaluate.report.verdict_facts import verdict_facts

_ESCAPES = str.maketrans({c: f"\\{c}" for c in "\\`*_[]|#~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})
_NUM_CONFUSIONS = 3


class Markdown(Markup):
    """A text in GitHub's Markdown: `+`, `join` and `format` escape other texts, on one line."""

    __slots__ = ()

    @classmethod
    def escape(cls, s: Any, /) -> Self:
        """Return `s` without what Markdown or HTML would take as markup; Markdown is returned unchanged."""
        return s if isinstance(s, cls) else cls(" ".join(escape_controls(str(s)).split()).translate(_ESCAPES))


def render_markdown(report: Mapping[str, Any]) -> str:
    """Return the text of report.md (GitHub's Markdown).

    Raises:
        InputError: not a report of schema 3.
    """
    checked = validate_report(report)
    parts = [_header_section(checked)]
    if any(step.test for step in checked.steps):
        parts += [_heading("On test"), _test_section(checked)]
    if any(step.gates for step in checked.steps):
        parts += [_heading("Gates"), _gates_section(checked)]
    parts += [_heading("Steps"), _steps_section(checked)]
    if len(view.metric_names(checked)) > 1:
        parts += [_heading("Quality"), _quality_section(checked)]
    if folds := score_tables.fold_table(checked):
        parts += [_heading("Cross-validation"), markdown_table(*folds), Markdown(score_tables.FOLDS_LEGEND)]
    if losses := chart.find_waterfall(checked):
        parts += [_heading("Changes by stage"), _waterfall_section(losses)]
    if example_groups := examples.steps_by_examples(checked):
        parts += [_heading("Examples"), *(_step_examples(steps, checked) for steps in example_groups)]
    if len(view.batch_sizes(checked)) > 0:
        parts += [_heading("Latency"), _latency_section(checked)]
    if layers := sensitivity.find_layer_table(checked):
        table = markdown_table(*sensitivity.summary_rows(layers), left=3)
        parts += [_heading("Sensitivity by layer"), table, Markdown(sensitivity.LEGEND)]
    if examples.agreement_columns(checked):
        title = f"Agreement with the outputs of {checked.baseline}"
        parts += [_heading(title), _agreement_section(checked)]
    if notes := view.report_notes(checked):
        lines = [Markdown("- **{}** {}: {}").format(*note) for note in notes]
        parts += [_heading("Notes"), _join_lines(lines)]
    parts += [_heading("How it was measured"), _footer_section(checked)]
    return str(_join_paragraphs(parts)) + "\n"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Markdown:
    """Return a table of GitHub's Markdown; the first `left` columns are aligned left. Cells are escaped."""
    alignments = [":--" if i < left else "--:" for i in range(len(head))]
    return _join_lines(
        Markdown("| {} |").format(Markdown(" | ").join(cells)) for cells in [head, alignments, *rows]
    )


def _join_lines(lines: Iterable[str]) -> Markdown:
    return Markdown("\n").join(lines)


def _join_paragraphs(parts: Iterable[str]) -> Markdown:
    return Markdown("\n\n").join(parts)


def _heading(text: str) -> Markdown:
    return Markdown("## ") + text


def _code(text: str) -> Markdown:
    """Return `text` as code, where markup has no meaning; as escaped text where a backtick would end it."""
    if "`" in text:
        return Markdown.escape(text)
    return Markdown(f"`{' '.join(escape_controls(text).split())}`")


def _header_section(report: ReportData) -> Markdown:
    command = report.verdict.command if report.verdict else None
    fact_line = Markdown("- {}: **{}**, {}")
    facts = [fact_line.format(fact.label, fact.value, fact.rest) for fact in verdict_facts(report)]
    lines = [
        Markdown("# {}: {}").format(view.report_title(report), view.status_text(report)),
        *(Markdown("**{}**").format(line) for line in headlines(report)),
        *([_join_lines(facts)] if facts else []),
        *(Markdown.escape(message) for message in (report.verdict.warnings if report.verdict else ())),
        *([Markdown("In the folder of the run: ") + _code(command)] if command else []),
        _join_lines(Markdown("- {}: {}").format(*entry) for entry in view.run_facts(report)),
    ]
    if report.pareto_front:
        names = Markdown(", ").join(report.pareto_front)
        lines.append(Markdown("Pareto-optimal in quality and speed: {}.").format(names))
    return _join_paragraphs(lines)


def _step_name_cell(row: view.TreeRow) -> Markdown:
    # Markdown drops spaces at the start of a cell
    return Markdown(row.branch.replace(" ", "&nbsp;")) + row.step.name


def _steps_section(report: ReportData) -> Markdown:
    metric = next(iter(view.metric_names(report)), None)
    sizes = view.batch_sizes(report)
    timed = [cell for size in sizes for cell in (f"p50 ms, batch {size}", "speed-up")]
    quality = [f"{view.metric_label(metric)} (95 % interval)", "difference (95 % interval)"] if metric else []
    operations = ["M multiply-adds"] if view.has_operations(report) else []
    bits = ["bits per weight"] if view.has_quantized_weights(report) else []
    head = ["step", "stage", "format", "status", *quality, *timed, "MB", "M parameters", *operations, *bits]
    rows = [
        [
            _step_name_cell(row),
            row.step.stage,
            view.runtime_label(row.step),
            row.step.status,
            *([_score_cell(row.step, metric), _difference_cell(row.step, metric)] if metric else []),
            *(cell for size in sizes for cell in _latency_cells(row.step, size)),
            _size_cell(row.step, report.baseline_step),
            view.millions(row.step.parameters),
            *([view.millions(row.step.operations)] if operations else []),
            *([view.bits_per_weight_text(row.step, report)] if bits else []),
        ]
        for row in view.tree_rows(report)
    ]
    return _join_paragraphs([markdown_table(head, rows, left=4), _steps_legend(report, bool(sizes))])


def _steps_legend(report: ReportData, timed: bool) -> str:
    """Return what the table of steps compares with, and what its marks mean."""
    against = f"{report.baseline or view.MISSING_TEXT}{view.timed_baseline(report)}"
    legend = (
        "Each step continues from the one above it; branches are drawn. Differences"
        f"{' and speed-ups' * timed} are relative to {against}; {view.SIGNIFICANCE_LEGEND}."
    )
    if report.judged_on != "test":
        legend += f" Scores are of {report.judged_on} samples."
    if view.has_operations(report):
        legend += f" {view.OPERATIONS_LEGEND}"
    if any(entry.stable is False for step in report.steps for entry in step.latency):
        legend += f" {view.DISTURBED_MARK} after a time or speed-up: it is unreliable (see the notes)."
    return legend


def _score_cell(step: StepReport | ScoresOnTest, metric: str) -> str:
    score = step.quality.get(metric)
    if score is None:
        return view.MISSING_TEXT
    digits = view.metric_digits(metric)
    return f"{view.number_text(score.value, digits)} {view.interval_text(score.ci95, digits)}".rstrip()


def _difference_cell(step: StepReport | ScoresOnTest, metric: str) -> str:
    return view.difference_and_interval_text(step.against_baseline.get(metric), metric)


def _latency_cells(step: StepReport, size: int) -> tuple[str, str]:
    entry = step.latency_at(size)
    if entry is None:
        return view.MISSING_TEXT, view.MISSING_TEXT
    if entry.speedup is None:
        return view.median_text(entry), view.MISSING_TEXT
    speedup = f"{view.speedup_text(entry)} {view.interval_text(entry.speedup_ci95)}".rstrip()
    return view.median_text(entry), speedup


def _size_cell(step: StepReport, base: StepReport | None) -> str:
    ratio = view.size_ratio_text(step, base)
    return view.megabytes(step.size_bytes) + (f" ({ratio})" if ratio else "")


def _quality_section(report: ReportData) -> Markdown:
    metrics = view.metric_names(report)
    head = ["step", *(view.metric_label(metric) for metric in metrics)]
    rows = []
    for row in view.tree_rows(report):
        if row.step.quality:
            cells = [(_score_cell(row.step, m), _difference_cell(row.step, m)) for m in metrics]
            rows.append(
                [_step_name_cell(row), *(s if d == view.MISSING_TEXT else f"{s}, {d}" for s, d in cells)]
            )
    return markdown_table(head, rows)


def _test_section(report: ReportData) -> Markdown:
    """Return the test scores of the steps that were chosen on validation."""
    metrics = view.metric_names(report)
    rows = [
        [_step_name_cell(row), *(f"{_score_cell(tested, m)}, {_difference_cell(tested, m)}" for m in metrics)]
        for row in view.tree_rows(report)
        if (tested := row.step.test)
    ]
    intro = "Steps were chosen on validation and are scored here on test: the expected quality on new data."
    head = ["step", *(view.metric_label(metric) for metric in metrics)]
    return _join_paragraphs([intro, markdown_table(head, rows)])


def _latency_section(report: ReportData) -> Markdown:
    head = ["step", "batch", "device", "threads", "p50 ms", "p90 ms", "p99 ms", "baseline p50 ms"]
    head += ["CPU ms", "speed-up by CPU time", "throughput", "tokens in", "tokens out"]
    rows = [
        [
            _step_name_cell(row),
            str(entry.batch_size),
            row.step.device or view.MISSING_TEXT,
            view.MISSING_TEXT if entry.threads is None else str(entry.threads),
            view.median_text(entry),
            *map(view.significant_digits, (entry.p90_ms, entry.p99_ms, entry.baseline_p50_ms)),
            view.significant_digits(entry.cpu_ms),
            view.cpu_speedup_text(entry),
            f"{view.significant_digits(entry.throughput)} {entry.unit or ''}".rstrip(),
            view.number_text(entry.input_tokens, 1),
            view.number_text(entry.output_tokens, 1),
        ]
        for row in view.tree_rows(report)
        for entry in row.step.latency
    ]
    part_text = view.find_task(report).call_includes
    intro = (
        f"From {view.latency_scope(report)}: {part_text} part of it; a call is one batch. The "
        "baseline's p50 is"
        " from the same rounds. The speed-up by CPU time is also reliable on a busy machine."
    )
    return _join_paragraphs([intro, markdown_table(head, rows), *_timings_table(report)])


def _timings_table(report: ReportData) -> list[Markdown]:
    """Return the table of the parts of the median call; empty where no runner measures them."""
    timings = [
        (row, entry.batch_size, [*view.timing_parts(report, entry.parts), ("graphs alone", entry.graph_ms)])
        for row in view.tree_rows(report)
        for entry in row.step.latency
        if entry.parts
    ]
    if not timings:
        return []
    head = ["step", "batch", *(f"{name} ms" for name, _ in timings[0][2])]
    rows = [
        [_step_name_cell(row), str(size), *(view.significant_digits(ms) for _, ms in parts)]
        for row, size, parts in timings
    ]
    return [Markdown("Parts of the median call:"), markdown_table(head, rows)]


def _waterfall_section(losses: chart.Waterfall) -> Markdown:
    """Return how each stage of one chain changed quality, latency and size."""
    rows_of_panels = [
        (row, [row.changes[panel_index] for panel_index in losses.panels]) for row in losses.rows
    ]
    rows = [
        [row.step.name, row.step.stage, *(c.text if c else view.MISSING_TEXT for c in changes)]
        for row, changes in rows_of_panels
    ]
    return markdown_table(
        ["step", "stage", *(losses.titles[panel_index] for panel_index in losses.panels)], rows, left=2
    )


def _gates_section(report: ReportData) -> Markdown:
    rows = [
        [
            step.name,
            split,
            view.gate_text(gate),
            view.gate_value_text(gate),
            Markdown("{}" if gate.passed else "**{}**").format(view.gate_verdict(gate)),
        ]
        for step, split, gate in view.gate_rows(report)
    ]
    return markdown_table(["step", "data", "limit", "value", "result"], rows, left=3)


def _agreement_section(report: ReportData) -> Markdown:
    columns = examples.agreement_columns(report)
    rows = [
        [_step_name_cell(row), *(examples.agreement_text(row.step, name) for name, _ in columns)]
        for row in view.tree_rows(report)
        if row.step.agreement
    ]
    table = markdown_table(["step", *(title for _, title in columns)], rows)
    return _join_paragraphs([table, *examples.agreement_notes(report)])


def _step_examples(steps: Sequence[StepReport], report: ReportData) -> Markdown:
    """Return the largest confusions and the most changed examples of steps that share them."""
    step, baseline = steps[0], str(report.baseline)
    counts = examples.counts_text(step)
    lines = [Markdown("**{}**").format(", ".join(s.name for s in steps)) + (f": {counts}" if counts else "")]
    confusion_text = ", ".join(
        f"{label} → {predicted} {count:,}"
        for label, predicted, count in examples.largest_confusions(step, _NUM_CONFUSIONS)
    )
    lines += (
        [Markdown("- most confused (label → prediction): {}").format(confusion_text)]
        if confusion_text
        else []
    )
    step_examples = step.examples
    for example in (*step_examples.worse[:1], *step_examples.better[:1]) if step_examples else ():
        pair = examples.mark_differences(example.baseline_output, example.output)
        texts = [("source", example.source), ("second text", example.text_pair)]
        texts += [("reference", text) for text in example.references]
        change = examples.change_text(step_examples.metric, example) if step_examples else ""
        lines.append(Markdown("- row {:,}, {}").format(example.row, change))
        lines += [Markdown("  - {}: {}").format(name, text) for name, text in texts if text]
        lines += [
            Markdown("  - {}: {}").format(name, _marked(parts))
            for name, parts in zip((baseline, step.name), pair, strict=True)
        ]
    return _join_lines(lines)


def _marked(parts: examples.Marked) -> Markdown:
    """Return a text with its differences in bold; as HTML, which needs no spaces around them."""
    safe = [
        (differs, Markdown(re.sub(r"\s+", " ", escape_controls(text)).translate(_ESCAPES)))
        for differs, text in parts
    ]
    return Markdown("").join(
        Markdown("<b>{}</b>").format(text) if differs else text for differs, text in safe
    )


def _footer_section(report: ReportData) -> Markdown:
    pairs = [(view.metric_label(metric), signature) for metric, signature in view.signatures(report)]
    lines = [Markdown("- {}: {}").format(*pair) for pair in pairs + view.flatten(report.environment)]
    return _join_lines(lines) or Markdown(view.MISSING_TEXT)
