"""Render report.html, report.md and the table of steps for a terminal, each from report.json only.

report.html is one file without external resources; its only script searches the examples.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from smelt.core.messages import Message, escape_controls
from smelt.data.splits import CLASSIFICATION_TASKS, CUSTOM_TASK, IMAGE_CLASSIFICATION
from smelt.evaluate.report import chart, examples, sensitivity, view
from smelt.evaluate.report.drawing import css_colors, page_svg
from smelt.evaluate.report.schema import (
    ReportData,
    ScoreDifference,
    ScoresOnTest,
    StepReport,
    validate_report,
)
from smelt.evaluate.report.verdict import trial_text, verdict_lines

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
_MARKDOWN_CONFUSIONS = 3


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
        loss_drawings=_loss_drawings(losses) if losses and with_charts else [],
        colors=css_colors,
        trial=trial_text(checked),
        rows=view.tree_rows(checked),
        metrics=view.metric_names(checked),
        sizes=view.batch_sizes(checked),
        bars=_size_bars(checked),
        change_class=_significance_class,
        badge=lambda status: _BADGES.get(status, "plain"),
        examples=examples,
        classification_tasks=CLASSIFICATION_TASKS,
    )
    return text


def _drawings(picture: chart.Chart, report: ReportData) -> list[str]:
    """Return the chart as markup for desktops and for phones; CSS hides one of them."""
    label = (
        f"{picture.metric} against the {picture.quantity}; the same numbers are in the"
        f" table of steps. Pareto-optimal: {', '.join(report.frontier) or 'none'}."
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
        finalize=_escape_controls,
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
    )
    return environment.get_template(_TEMPLATE)


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
    if folds := view.fold_table(checked):
        parts += ["## Cross-validation", f"{_plain_table(*folds, left=1)}\n\n{view.FOLDS_LEGEND}"]
    if len(view.batch_sizes(checked)) > 0:
        parts += ["## Latency", _latency_section(checked)]
    if losses := chart.find_waterfall(checked):
        parts += ["## Changes by stage", _waterfall_section(losses)]
    if layers := sensitivity.find_layer_table(checked):
        table = _plain_table(*sensitivity.summary_rows(layers), left=3)
        parts += ["## Sensitivity by layer", f"{table}\n\n{sensitivity.LEGEND}"]
    if any(step.gates for step in checked.steps):
        parts += ["## Gates", _gates_section(checked)]
    if examples.agreement_columns(checked):
        title = f"## Agreement with the outputs of {escaped(checked.baseline)}"
        parts += [title, _agreement_section(checked)]
    if shown := examples.steps_with_examples(checked):
        parts += ["## Examples", *(_examples_of_step(step, str(checked.baseline)) for step in shown)]
    if view.report_notes(checked):
        lines = [tuple(map(escaped, note)) for note in view.report_notes(checked)]
        parts += ["## Notes", "\n".join(f"- **{name}** {kind}: {text}" for name, kind, text in lines)]
    parts += ["## How it was measured", _footer_section(checked)]
    return "\n\n".join(parts) + "\n"


def escaped(value: object) -> str:
    """Escape what Markdown or HTML would take as markup, on one line."""
    return " ".join(escape_controls(str(value)).split()).translate(_ESCAPES)


def _code(text: str) -> str:
    """Return `text` as code, where markup has no meaning; as escaped text where a backtick would end it."""
    return escaped(text) if "`" in text else f"`{' '.join(escape_controls(text).split())}`"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table of GitHub's Markdown; the first `left` columns are aligned left. Cells are escaped."""
    marks = [":--" if i < left else "--:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, marks, *rows])


def _header_section(report: ReportData) -> str:
    command = report.verdict.command if report.verdict else None
    task, n = (
        escaped(report.recipe.get("task") or view.MISSING_TEXT),
        view.sample_text(report) or "nothing scored",
    )
    lines = [
        f"# {escaped(view.report_title(report))}: {escaped(report.status)}",
        *(f"**{escaped(line)}**" for line in verdict_lines(report)),
        *([f"In the folder of the run: {_code(command)}"] if command else []),
        f"Task {task}, {n}, {escaped(view.hardware(report))}.",
    ]
    if report.frontier:
        lines.append("Pareto-optimal in quality and speed: " + ", ".join(map(escaped, report.frontier)) + ".")
    return "\n\n".join(lines)


def _step_name_cell(row: view.TreeRow) -> str:
    # Markdown drops spaces at the start of a cell
    return row.branch.replace(" ", "&nbsp;") + escaped(row.step.name)


def _steps_section(report: ReportData) -> str:
    metric = next(iter(view.metric_names(report)), None)
    sizes = view.batch_sizes(report)
    timed = [cell for size in sizes for cell in (f"p50 ms, batch {size}", "speed-up")]
    quality = [f"{escaped(view.metric_label(metric))} (95 % interval)", "difference"] if metric else []
    bits = ["bits per weight"] if view.has_quantized_weights(report) else []
    head = ["step", "stage", "format", "status", *quality, *timed, "MB", "M parameters", *bits]
    rows = [
        [
            _step_name_cell(row),
            escaped(row.step.stage),
            escaped(view.runtime_label(row.step)),
            row.step.status,
            *([_score_cell(row.step, metric), _difference_cell(row.step, metric)] if metric else []),
            *(cell for size in sizes for cell in _latency_cells(row.step, size)),
            _size_cell(row.step, report.baseline_step),
            view.millions(row.step.parameters),
            *([escaped(view.bits_per_weight_text(row.step, report))] if bits else []),
        ]
        for row in view.tree_rows(report)
    ]
    against = escaped(report.baseline or view.MISSING_TEXT)
    legend = "Each step continues from the one above it; branches are drawn. Differences" + (
        " and speed-ups are relative to" if sizes else " are relative to"
    )
    doubt = (
        f" {view.DISTURBED_MARK} after a speed-up: it is unreliable (see the notes)."
        if any(entry.stable is False for step in report.steps for entry in step.latency)
        else ""
    )
    of = "" if report.judged_on == "test" else f" Scores are of {report.judged_on} samples."
    stars = "\\* p < 0.05, corrected (Holm)."
    return f"{markdown_table(head, rows, left=4)}\n\n{legend} {against}; {stars}{of}{doubt}"


def _score_cell(step: StepReport | ScoresOnTest, metric: str) -> str:
    score = step.quality.get(metric)
    if score is None:
        return view.MISSING_TEXT
    shown = view.metric_digits(metric)
    return f"{view.number_text(score.value, shown)} {escaped(view.interval_text(score.ci95, shown))}".rstrip()


def _difference_cell(step: StepReport | ScoresOnTest, metric: str) -> str:
    found = step.against_baseline.get(metric)
    return view.difference_text(found, metric) + ("\\*" if found and view.is_significant(found) else "")


def _latency_cells(step: StepReport, size: int) -> tuple[str, str]:
    entry = step.latency_at(size)
    if entry is None:
        return view.MISSING_TEXT, view.MISSING_TEXT
    if entry.speedup is None:
        return view.significant_digits(entry.p50_ms), view.MISSING_TEXT
    speedup = f"{view.speedup_text(entry)} {escaped(view.interval_text(entry.speedup_ci95))}".rstrip()
    return view.significant_digits(entry.p50_ms), speedup


def _size_cell(step: StepReport, base: StepReport | None) -> str:
    ratio = view.size_ratio_text(step, base)
    return view.megabytes(step.size_bytes) + (f" ({ratio})" if ratio else "")


def _quality_section(report: ReportData) -> str:
    metrics = view.metric_names(report)
    head = ["step", *(escaped(view.metric_label(metric)) for metric in metrics)]
    rows = []
    for row in view.tree_rows(report):
        if row.step.quality:
            cells = [(_score_cell(row.step, m), _difference_cell(row.step, m)) for m in metrics]
            rows.append(
                [_step_name_cell(row), *(s if d == view.MISSING_TEXT else f"{s}, {d}" for s, d in cells)]
            )
    return markdown_table(head, rows)


def _test_section(report: ReportData) -> str:
    """Return the test scores of the steps that were chosen on validation."""
    metrics = view.metric_names(report)
    rows = [
        [_step_name_cell(row), *(f"{_score_cell(tested, m)}, {_difference_cell(tested, m)}" for m in metrics)]
        for row in view.tree_rows(report)
        if (tested := row.step.test)
    ]
    intro = "Steps were chosen on validation and are scored here on test: the expected quality on new data."
    return "\n\n".join(
        [
            intro,
            markdown_table(["step", *(escaped(view.metric_label(metric)) for metric in metrics)], rows),
        ]
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
            f"{view.significant_digits(entry.throughput)} {escaped(entry.unit or '')}".rstrip(),
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
    intro = (
        f"From {view.latency_scope(report)}: {what} part of it; a call is one batch. The baseline's p50 is"
        " from the same rounds. The speed-up by CPU time is also reliable on a busy machine."
    )
    return "\n\n".join([intro, markdown_table(head, rows), *_timings_table(report)])


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
    return ["Parts of the median call:", markdown_table(head, rows)]


def _plain_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Return a Markdown table of plain texts."""
    return markdown_table([*map(escaped, head)], [[*map(escaped, row)] for row in rows], left)


def _waterfall_section(losses: chart.Waterfall) -> str:
    """Return how each stage of one chain changed quality, latency and size."""
    found = [(row, [row.changes[at] for at in losses.panels]) for row in losses.rows]
    rows = [
        [row.step.name, row.step.stage, *(c.text if c else view.MISSING_TEXT for c in changes)]
        for row, changes in found
    ]
    return _plain_table(["step", "stage", *(losses.titles[at] for at in losses.panels)], rows, left=2)


def _gates_section(report: ReportData) -> str:
    rows = [
        [
            _step_name_cell(row),
            escaped(view.metric_label(gate.metric)),
            escaped(gate.kind if gate.confidence is None else f"{gate.kind}, confidence {gate.confidence:g}"),
            word if (word := view.gate_verdict(gate)) == "passed" else f"**{word}**",
            escaped(view.gate_value_text(gate)),
            view.gate_quantity_text(gate.metric, gate.limit),
        ]
        for row in view.tree_rows(report)
        for gate in row.step.gates
    ]
    return markdown_table(["step", "metric", "kind", "result", "value", "limit"], rows, left=4)


def _agreement_section(report: ReportData) -> str:
    columns = examples.agreement_columns(report)
    rows = [
        [_step_name_cell(row), *(examples.agreement_text(row.step, name) for name, _ in columns)]
        for row in view.tree_rows(report)
        if row.step.agreement
    ]
    table = markdown_table(["step", *(title for _, title in columns)], rows)
    return "\n\n".join([table, *map(escaped, examples.agreement_notes(report))])


def _examples_of_step(step: StepReport, baseline: str) -> str:
    """Return the largest confusions of a step and its most changed examples; the HTML page has more."""
    lines = [f"**{escaped(step.name)}**: {examples.counts_text(step)}".rstrip(": ")]
    confused = [
        f"{escaped(label)} → {escaped(predicted)} {count:,}"
        for label, predicted, count in examples.largest_confusions(step, _MARKDOWN_CONFUSIONS)
    ]
    lines += [f"- most confused (label → prediction): {', '.join(confused)}"] if confused else []
    found = step.examples
    for example in (*found.worse[:1], *found.better[:1]) if found else ():
        pair = examples.mark_differences(example.baseline_output, example.output)
        texts = [("source", example.source), ("second text", example.text_pair)]
        texts += [("reference", text) for text in example.references]
        lines.append(f"- row {example.row:,}, {examples.change_text(found.metric, example)}" if found else "")
        lines += [f"  - {name}: {escaped(text)}" for name, text in texts if text]
        lines += [
            f"  - {escaped(name)}: {_marked(parts)}"
            for name, parts in zip((baseline, step.name), pair, strict=True)
        ]
    return "\n".join(lines)


def _marked(parts: examples.Marked) -> str:
    """Return a text in Markdown with its differences in bold; as HTML, which needs no spaces around them."""
    safe = [
        (differs, re.sub(r"\s+", " ", escape_controls(text)).translate(_ESCAPES)) for differs, text in parts
    ]
    return "".join(f"<b>{text}</b>" if differs else text for differs, text in safe)


def _footer_section(report: ReportData) -> str:
    pairs = [(view.metric_label(metric), signature) for metric, signature in view.signatures(report)]
    lines = [f"- {escaped(name)}: {escaped(text)}" for name, text in pairs + view.flatten(report.environment)]
    return "\n".join(lines) or view.MISSING_TEXT


_ASCII_REPLACEMENTS = str.maketrans("├└│─–−…×·", "|`|---~x,")
_MIN_NAME_WIDTH = 10
# warnings about steps that a terminal shows; the report contains all
_MAX_WARNINGS = 3


# not rich's tables: they have no cell across columns, which the reason of a failed step needs, and for this
# and the tables of `smelt bench` and `smelt store` they take as many lines of code
def render_table(report: Mapping[str, Any], width: int = 80, ascii_only: bool = False) -> str:
    """Return the verdict, and the steps as a tree with metric, difference, p50, speed-up and size.

    Where no times were measured, without those; if no name is truncated for it, also with the percentage of
    outputs that equal the baseline's, and with the bits per quantized weight.

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
    optional = [
        ("same %", any(step.agreement for step in checked.steps), examples.same_outputs_text),
        ("bits", view.has_quantized_weights(checked), lambda step: view.bits_per_weight_text(step, checked)),
    ]
    for name, known, cell_text in optional:
        wider = [(row, [*cells, cell_text(row.step)] if cells else []) for row, cells in lines]
        # no name is truncated for these, the report contains them too
        if known and longest <= width - _columns_width([*head, name], wider):
            head, lines = [*head, name], wider
    widths = _column_widths(head, lines)
    room = min(max(_MIN_NAME_WIDTH, width - _columns_width(head, lines)), longest)
    title = _table_line("step", room, head, widths)
    text = [*_wrapped_verdict(checked, width), title, "─" * len(title)]
    for name, (row, cells) in zip(names, lines, strict=True):
        text.append(
            _table_line(name, room, cells, widths) if cells else _unmeasured_line(name, row.step, room, width)
        )
    text += ["", *_legend_lines(checked, metric, sizes, head, width)]
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


def _wrapped_verdict(report: ReportData, width: int) -> list[str]:
    found = [
        line for text in verdict_lines(report) for line in textwrap.wrap(text, width, break_on_hyphens=False)
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
    ordered = view.sort_warnings(about)
    lines = [f"{found.severity}: {', '.join(about[found])}: {found}" for found in ordered]
    left = dict.fromkeys(name for found in ordered[_MAX_WARNINGS:] for name in about[found])
    more = len(lines) - _MAX_WARNINGS
    return lines[:_MAX_WARNINGS] + (
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
    report: ReportData, metric: str | None, sizes: list[int], columns: Sequence[str], width: int
) -> list[str]:
    parts = []
    if report.baseline_step and report.baseline_step.quality:
        parts.append(f"diff{' and speed-up' * bool(sizes)} relative to '{report.baseline}'")
    if any(metric in step.against_baseline for step in report.steps):
        parts.append(
            "differences include the graph's random numbers" if report.is_random else "* p < 0.05 (Holm)"
        )
    if sizes:
        parts.append(f"batch {sizes[0]}")
    if "same %" in columns:
        parts.append(f"same %: outputs equal to those of '{report.baseline}'")
    if "bits" in columns:
        parts.append("bits per quantized weight")
    if n := view.sample_text(report):
        parts.append(n)
    if any(row.stable is False for step in report.steps for row in step.latency):
        parts.append(f"{view.DISTURBED_MARK} unreliable speed")
    lines = textwrap.wrap(", ".join(parts), width) if parts else []
    failed = [
        f"gate {view.gate_verdict(gate)} at '{step.name}': {view.gate_text(gate)}"
        + (f", got {view.gate_value_text(gate)}" if gate.value is not None else "")
        + (f": {gate.reason}" if gate.reason and gate.reason not in step.failure_texts else "")
        for step in report.steps
        for gate in step.gates
        if not gate.passed or gate.undecided
    ]
    few = [(gate, step) for step in report.steps for gate in step.gates if gate.n_needed is not None]
    failed += [f"'{step.name}': {view.too_few_examples_text(gate, step)}" for gate, step in few]
    failed += [view.test_scores_text(report), *view.failed_on_test_texts(report)]
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
