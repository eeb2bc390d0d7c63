"""Compare several runs: one table of scores, sizes and times, with paired tests where the samples are equal.

The first run is the reference. Quality is compared in pairs, by the statistics per sample that a run keeps
in `scores/`; where the samples or the metric's settings differ, only the values are shown, with the reason.
Times of two runs were not measured in alternating rounds, so their ratio has no interval.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.messages import escape_controls
from smelt.evaluate.report import view
from smelt.evaluate.report.chart import (
    NARROW,
    WIDE,
    Chart,
    ChartPoint,
    chart_file,
    page_figure,
    quality_label,
)
from smelt.evaluate.report.drawing import NUM_RUN_COLORS, RUN_PALETTES, css_colors, page_svg
from smelt.evaluate.report.schema import SCORES_FOLDER, ReportData, StepReport, read_report, validate_report
from smelt.evaluate.report.step_schema import ScoreDifference
from smelt.evaluate.significance import Statistics, compare_steps, holm

COMPARISON_SCHEMA = 1
_SCORE_KEYS = {"value", "unit", "higher_is_better", "ci95"}


@dataclass(frozen=True)
class FinishedRun:
    """A run that is compared: its name in the tables, its folder, and its report."""

    name: str
    folder: Path
    report: ReportData

    def finished_step(self, name: str) -> StepReport | None:
        """Return the step `name`; None if the run has none, or it was skipped or failed."""
        finished = (step for step in self.report.steps if step.status in ("done", "cached"))
        return next((step for step in finished if step.name == name), None)

    def statistics(self, step: str) -> Mapping[str, Any]:
        """Return the statistics of a step by metric; empty where the run did not keep them.

        Raises:
            InputError: the file is damaged.
        """
        path = self.folder / SCORES_FOLDER / f"{step}.json.gz"
        if not path.is_file():
            return {}
        try:
            statistics: Mapping[str, Any] = json.loads(gzip.decompress(path.read_bytes()))["statistics"]
        except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
            raise InputError(
                f"{path}: the scores of this step cannot be read: {error}. Run the recipe again.",
                code="damaged-file",
                file=str(path),
            ) from error
        return statistics


def read_runs(folders: Sequence[Path]) -> list[FinishedRun]:
    """Return the runs in `folders`, each with a name of its own.

    Raises:
        InputError: fewer than two runs, no report, or runs of different tasks.
    """
    if len(folders) < 2:
        raise InputError(
            "Only one run was given. Name at least two: smelt compare runs/OLD runs/NEW.",
            code="too-few-runs",
        )
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    reports = [validate_report(read_report(folder)) for folder in folders]
    runs = [FinishedRun(*run_fields) for run_fields in zip(names, folders, reports, strict=True)]
    tasks = {run.name: str(run.report.recipe.get("task")) for run in runs}
    if len(set(tasks.values())) > 1:
        raise InputError(
            "Runs of different tasks cannot be compared: "
            + ", ".join(f"{name} is {task}" for name, task in tasks.items())
            + ". Compare runs of one task.",
            code="other-task",
        )
    return runs


def compare_runs(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Return the comparison as JSON values: for each step the scores, size and times of each run.

    `steps` has every step of any run, in the order of the first run that has it. Each has for every run None
    or an entry with `quality` (value, ci95; difference from the first run with ci95, p_value and
    p_value_holm, corrected for all differences of the comparison; or the `reason` code why there is no paired
    test), `format`, `operations`, `size_bytes`, and `latency_ms`, `threads`, `speedup` (over its own run's
    baseline) and `stable` at the smallest batch size.

    Raises:
        InputError: the stored scores of a run are damaged.
    """
    first = runs[0]
    names = list(dict.fromkeys(step.name for run in runs for step in run.report.steps))
    steps = []
    differences: list[dict[str, Any]] = []
    for name in names:
        base_step, base = first.finished_step(name), first.statistics(name)
        entries: list[dict[str, Any] | None] = []
        for run in runs:
            step = run.finished_step(name)
            if step is None:
                entries.append(None)
                continue
            statistics = base if run is first else run.statistics(name)
            quality: dict[str, dict[str, Any]] = {
                metric: score.model_dump(mode="json", include=_SCORE_KEYS)
                | ({} if run is first else _paired(metric, statistics, base_step, base))
                for metric, score in step.quality.items()
            }
            differences += [score["difference"] for score in quality.values() if "difference" in score]
            entries.append({"run": run.name, "quality": quality, **_cost(step, run.report)})
        steps.append({"step": name, "runs": entries})
    for difference, corrected in zip(differences, holm([d["p_value"] for d in differences]), strict=True):
        difference["p_value_holm"] = corrected
    return {
        "schema": COMPARISON_SCHEMA,
        "task": first.report.recipe.get("task"),
        "reference": first.name,
        "runs": [{"name": run.name, "folder": str(run.folder)} for run in runs],
        "same_machine": len({view.hardware(run.report) for run in runs}) == 1,
        "steps": steps,
    }


def _paired(
    metric: str, run_statistics: Mapping[str, Any], base_step: StepReport | None, base: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the difference from the first run, whose step and statistics are `base_step` and `base`."""
    if base_step is None:
        return {"reason": "no-reference-step"}
    if metric not in base_step.quality:
        return {"reason": "no-reference-score"}
    if metric not in base:
        return {"reason": "no-reference-statistics"}
    if metric not in run_statistics:
        return {"reason": "no-statistics"}
    try:
        difference = compare_steps(
            Statistics.model_validate(run_statistics[metric]), Statistics.model_validate(base[metric])
        )
    except InputError as error:
        return {"reason": error.code}
    return {"difference": dict(difference)}


def _cost(step: StepReport, report: ReportData) -> dict[str, Any]:
    sizes = view.batch_sizes(report)
    row = step.latency_at(sizes[0]) if sizes else None
    return {
        "format": step.format,
        "operations": step.operations,
        "size_bytes": step.size_bytes,
        "batch_size": row.batch_size if row else None,
        "threads": row.threads if row else None,
        "latency_ms": row.p50_ms if row else None,
        "speedup": row.speedup if row else None,
        "stable": row.stable if row else None,
    }


def comparison_rows(comparison: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table: a row per step and run, with every metric.

    Operations are a column if those of a step differ between runs.
    """
    metrics = list(
        dict.fromkeys(
            metric for step in comparison["steps"] for run in step["runs"] if run for metric in run["quality"]
        )
    )
    timed = any(run and run["latency_ms"] for step in comparison["steps"] for run in step["runs"])
    head = ["step", "run", *(text for m in metrics for text in (view.metric_label(m), "difference")), "MB"]
    counted = any(len({run["operations"] for run in step["runs"] if run}) > 1 for step in comparison["steps"])
    head += [*(["M multiply-adds"] if counted else []), *(["p50 ms", "speed-up"] if timed else [])]
    rows = []
    for step in comparison["steps"]:
        for run, run_info in zip(step["runs"], comparison["runs"], strict=True):
            cells = [step["step"], run_info["name"]]
            if run is None:
                rows.append([*cells, *[view.MISSING_TEXT] * (len(head) - 2)])
                continue
            for metric in metrics:
                cells += _score_cells(run["quality"].get(metric), metric)
            cells.append(view.megabytes(run["size_bytes"]))
            cells += [view.millions(run["operations"])] if counted else []
            if timed:
                disturbed_mark = view.DISTURBED_MARK if run["stable"] is False else ""
                cells.append(view.significant_digits(run["latency_ms"]) + disturbed_mark)
                cells.append(
                    f"{run['speedup']:.2f}×{disturbed_mark}" if run["speedup"] else view.MISSING_TEXT
                )
            rows.append(cells)
    return head, rows


def _score_cells(score: Mapping[str, Any] | None, metric: str) -> list[str]:
    if score is None:
        return [view.MISSING_TEXT] * 2
    value = view.number_text(score["value"], view.metric_digits(metric))
    if "difference" not in score:
        return [value, view.MISSING_TEXT]
    difference = ScoreDifference.model_validate(score["difference"])
    return [value, view.difference_and_interval_text(difference, metric)]


PAIR_REASONS = {
    "no-reference-step": "the first run has no such step, or it was skipped or failed",
    "no-reference-score": "the first run has no such score of this step",
    "no-reference-statistics": f"the first run has no statistics by sample in {SCORES_FOLDER}/STEP.json.gz",
    "no-statistics": f"this run has no statistics by sample in {SCORES_FOLDER}/STEP.json.gz",
    "other-examples": "the samples differ",
    "other-signature": "the metric's settings differ",
    "count-mismatch": "the numbers of samples differ",
}


def comparison_notes(comparison: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know: the reference, the stars, and why differences are missing."""
    notes = [
        f"Differences are from {comparison['reference']}, with 95 % intervals; {view.SIGNIFICANCE_LEGEND}."
    ]
    steps_by_gap: dict[tuple[str, str, str], list[str]] = {}
    for step in comparison["steps"]:
        for run in step["runs"]:
            for metric, score in (run or {"quality": {}})["quality"].items():
                if "reason" in score:
                    gap = (run["run"], metric, score["reason"])
                    steps_by_gap.setdefault(gap, []).append(step["step"])
    notes += [
        f"No paired test of {metric} in {name} at {', '.join(steps)}: {PAIR_REASONS.get(reason, reason)}."
        for (name, metric, reason), steps in steps_by_gap.items()
    ]
    if any(run and run["latency_ms"] for step in comparison["steps"] for run in step["runs"]):
        machine_note = "" if comparison["same_machine"] else " on different machines"
        notes.append(
            f"Times were measured in separate runs{machine_note}: compare speed-ups, or use smelt bench."
        )
    if any(run and run["stable"] is False for step in comparison["steps"] for run in step["runs"]):
        notes.append(f"{view.DISTURBED_MARK} unreliable speed: other work disturbed the times.")
    return notes


def comparison_text(comparison: Mapping[str, Any], width: int = 80) -> str:
    """Return the comparison for a terminal: a table of the first metric, and the notes."""
    head, rows = comparison_rows(_first_metric(comparison))
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    name_width = max(8, width - sum(widths[2:]) - 2 * (len(head) - 1))  # of the two names
    widths[1] = min(widths[1], max(4, name_width - widths[0], name_width // 2))
    widths[0] = min(widths[0], max(4, name_width - widths[1]))
    lines = [
        "  ".join(
            _cut(cell, size).ljust(size) if column < 2 else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:], "", *comparison_notes(comparison)])


def _first_metric(comparison: Mapping[str, Any]) -> dict[str, Any]:
    steps = [
        {
            **step,
            "runs": [run and {**run, "quality": dict([*run["quality"].items()][:1])} for run in step["runs"]],
        }
        for step in comparison["steps"]
    ]
    return {**comparison, "steps": steps}


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def comparison_markdown(comparison: Mapping[str, Any]) -> str:
    """Return the comparison in GitHub's Markdown, with every metric."""
    from smelt.evaluate.report.markdown import Markdown, markdown_table

    head, rows = comparison_rows(comparison)
    table = markdown_table(head, rows, left=2)
    notes = Markdown("\n").join(Markdown("- ") + note for note in comparison_notes(comparison))
    names = " and ".join(run["name"] for run in comparison["runs"])
    return str(Markdown("# {}\n\n{}\n\n{}\n").format(names, table, notes))


def comparison_chart(comparison: Mapping[str, Any]) -> Chart | None:
    """Return the chart of quality against latency, a color for each run; None where no step has both.

    A line connects the same step of several runs. Where no run was timed, the size takes the place of the
    latency.
    """
    entries = [
        (step["step"], run_index, run)
        for step in comparison["steps"]
        for run_index, run in enumerate(step["runs"])
        if run and run["quality"]
    ]
    timed = [entry for entry in entries if entry[2]["latency_ms"]]
    plotted = timed or [entry for entry in entries if entry[2]["size_bytes"]]
    metric = next((metric for _, _, run in plotted for metric in run["quality"]), None)
    plotted = [entry for entry in plotted if metric in entry[2]["quality"]]
    if metric is None:
        return None
    paths: dict[str, list[int]] = {}
    for point_index, (name, _, _) in enumerate(plotted):
        paths.setdefault(name, []).append(point_index)
    labeled_points = {path[-1] for path in paths.values()}  # each name is written once
    points = [
        _comparison_point(entry, metric, bool(timed), point_index in labeled_points)
        for point_index, entry in enumerate(plotted)
    ]
    size = min((run["batch_size"] for _, _, run in timed), default=None)
    runs = sorted({run_index for _, run_index, _ in plotted})
    return Chart(
        quality_label(metric, plotted[0][2]["quality"][metric]["higher_is_better"]),
        f"latency at batch {size}" if timed else "size",
        points,
        [(comparison["runs"][run_index]["name"], "", _run_color(run_index)) for run_index in runs],
        unit=" ms" if timed else " MB",
        faster="← faster" if timed else "← smaller",
        paths=list(paths.values()),
    )


def _run_color(run: int) -> str:
    return f"run{run % NUM_RUN_COLORS}"


def _comparison_point(
    entry: tuple[str, int, Mapping[str, Any]], metric: str, timed: bool, named: bool
) -> ChartPoint:
    name, run_index, run = entry
    score = run["quality"][metric]
    low, high = score["ci95"] or (score["value"], score["value"])
    x = run["latency_ms"] if timed else run["size_bytes"] / 1e6
    value = view.number_text(score["value"], view.metric_digits(metric))
    cost = f"p50 {view.significant_digits(x)} ms" if timed else view.size_text(run["size_bytes"])
    return ChartPoint(
        name=name if named else "",
        shape=run["format"] or "other",
        color=_run_color(run_index),
        x=x,
        y=score["value"],
        x_low=x,
        x_high=x,
        y_low=low,
        y_high=high,
        front=False,
        baseline=False,
        competes=True,
        title=f"{run['run']}, {name}: {view.metric_label(metric)} {value}, {cost}",
    )


def comparison_plot(comparison: Mapping[str, Any], path: Path) -> bytes:
    """Return the content of the chart's file `path`, whose suffix is .svg or .png.

    Raises:
        InputError: another suffix, or no step has both quality and latency or size.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise InputError(
            f"--plot {path}: the suffix must be .svg or .png.", code="wrong-suffix", file=str(path)
        )
    chart = comparison_chart(comparison)
    if chart is None:
        raise InputError(
            "--plot: no step of the runs has a score and a latency or size, so there is nothing to draw.",
            code="nothing-to-draw",
        )
    return chart_file(chart, RUN_PALETTES["light"], kind)


def comparison_html(comparison: Mapping[str, Any]) -> str:
    """Return the comparison as one HTML page without scripts, with every metric and the chart."""
    import jinja2

    chart = comparison_chart(comparison)
    label = "The first metric of each step against its latency; the same numbers are in the table."
    source = files("smelt.evaluate.report").joinpath("comparison.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    head, rows = comparison_rows(comparison)
    text: str = environment.from_string(source).render(
        head=head,
        rows=rows,
        runs=len(comparison["runs"]),
        title=" and ".join(run["name"] for run in comparison["runs"]),
        notes=comparison_notes(comparison),
        colors=partial(css_colors, palettes=RUN_PALETTES),
        drawings=[page_svg(page_figure(chart, size, label)) for size in (WIDE, NARROW)] if chart else [],
        keys=[(name, color) for name, _, color in chart.legend] if chart else [],
    )
    return escape_controls(text)
