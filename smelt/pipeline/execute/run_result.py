"""The result of a run: its report, the files written to its folder, and the summary on the terminal."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, MissingDependencyError, did_you_mean
from smelt.core.files import write_atomically
from smelt.core.messages import Message, warning
from smelt.data.splits import CUSTOM_TASK, IMAGE_CLASSIFICATION, TEXT_TO_TEXT_TASKS
from smelt.evaluate.metrics import WINDOW_METRICS
from smelt.evaluate.report.schema import is_step_at_chance

# If an interval extends further below the baseline than this fraction of its score, more samples are needed.
_MAX_UNCERTAIN_DROP = 0.05
# With fewer samples, resampled intervals are unreliable.
_MIN_EXAMPLES = 20
_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
# Metrics that are perfect for the baseline by definition, so that any change of outputs is worse; losses up
# to `_NEGLIGIBLE_POINTS` are accepted unless a gate decides.
_BASELINE_PERFECT_METRICS = ("agreement", "top1", "relative_error")
_NEGLIGIBLE_POINTS = 1.0
EXIT_CODES = {"passed": 0, "error": 1, "gate-failed": 3, "interrupted": 130}


class Report(Mapping[str, Any]):
    """The report of a run, a read-only mapping with the content of report.json (docs/reference/report.md).

    Notebooks display it as the HTML report.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        from smelt.evaluate.report.schema import validate_report

        validate_report(data)
        self.data = dict(data)

    @classmethod
    def read(cls, run: str | PathLike[str]) -> Report:
        """Read the report of the run in the folder `run`, or the report.json at that path.

        Raises:
            InputError: there is no report, or this version of smelt cannot read it.
        """
        from smelt.evaluate.report.schema import read_report

        return cls(read_report(Path(run).expanduser()))

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per step.

        Columns: step, stage, parent, status, format, target, parameters, size_bytes; for each metric its
        value, `_difference` from the baseline, `_p_value` and `_p_value_holm`; for each measured
        batch size `latency_ms_N` (p50, milliseconds) and `speedup_N`.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise MissingDependencyError(
                "to_frame needs pandas: pip install 'smelt[notebook]'", code="not-installed"
            ) from error

        return pandas.DataFrame([step_row(step) for step in self.data["steps"]]).set_index("step")

    def _repr_html_(self) -> str:
        from smelt.evaluate.report.render import render_html

        page = escape(render_html(self.data), quote=True)
        return (
            f'<iframe srcdoc="{page}" style="width: 100%; height: 720px; border: 0" title="report"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Report({self.data['recipe'].get('name', 'run')!r}, {self.data['status']!r})"

    def __str__(self) -> str:
        from smelt.evaluate.report.render import render_table

        return render_table(self.data)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


def step_row(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step of a report as a flat row."""
    same = ("stage", "parent", "status", "format", "target", "parameters", "size_bytes")
    row: dict[str, Any] = {"step": step["name"], **{name: step[name] for name in same}}
    for metric, score in (step["quality"] or {}).items():
        row[metric] = score["value"]
        if test := (step["against_baseline"] or {}).get(metric):
            row |= {
                f"{metric}_difference": test["difference"],
                f"{metric}_p_value": test["p_value"],
                f"{metric}_p_value_holm": test.get("p_value_holm"),
            }
    for timed in step["latency"] or []:
        row[f"latency_ms_{timed['batch_size']}"] = timed["p50_ms"]
        row[f"speedup_{timed['batch_size']}"] = timed["speedup"]
    return row


def report_csv(report: Mapping[str, Any]) -> str:
    """Return the table of `Report.to_frame` as CSV, with a line for each step."""
    rows = [step_row(step) for step in report["steps"]]
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@dataclass
class Result:
    """The result of a run: report (see docs/reference/report.md), folder and exit code."""

    report: Report
    folder: Path
    exit_code: int = field(init=False)

    def __post_init__(self) -> None:
        self.exit_code = EXIT_CODES[self.report["status"]]

    def __repr__(self) -> str:
        """Return a short form without the report: name, status and folder."""
        name = self.report["recipe"].get("name", "run")
        return f"Result({name!r}, {self.report['status']!r}, {str(self.folder)!r})"

    def artifact(self, step: str) -> Path:
        """Return the folder of the artifact of `step`, for `smelt.load`.

        Raises:
            InputError: no such step, or it has no artifact.
        """
        folder = self.folder / "artifacts" / step
        given = [s["name"] for s in self.report["steps"] if s["artifact"]]
        if step not in given or not folder.is_dir():
            known = ", ".join(given)
            raise InputError(
                f"no artifact of a step '{step}'. Available steps: {known}.{did_you_mean(step, given)}",
                code="no-artifact",
            )
        return folder


def write_report(folder: Path, report: Mapping[str, Any], charts: bool = True) -> None:
    """Write report.json, .md, .html and .csv to `folder`; `charts`: also the chart's files."""
    from smelt.evaluate.report.chart import CHART_FILES, chart_files
    from smelt.evaluate.report.render import render_html, render_markdown
    from smelt.evaluate.report.schema import validate_report

    write_atomically(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_atomically(folder / "report.md", render_markdown(dict(report)))
    write_atomically(folder / "report.html", render_html(dict(report)))
    write_atomically(folder / "report.csv", report_csv(report))
    if charts:
        drawn = chart_files(validate_report(report))
        for name in CHART_FILES.keys() - drawn:
            (folder / name).unlink(missing_ok=True)
        for name, content in drawn.items():
            write_atomically(folder / name, content)


def summary_lines(result: Result) -> Sequence[str]:
    """Return the final output of `smelt run`: the table, the report's path, and commands to try and deploy.

    For an interrupted run, without the commands.
    """
    from smelt.evaluate.report.render import render_table

    lines = [render_table(result.report), "", f"Report: {_short_path(result.folder / 'report.html')}"]
    step = smallest_deployable_step(result.report)
    if step is not None and result.report["status"] != "interrupted":  # its gates were not evaluated
        for note in deployment_notes(result.report, step):
            wrapped = textwrap.wrap(note.message, 80, break_on_hyphens=False)
            lines += [line.replace(_NO_BREAK_SPACE, " ") for line in wrapped]
        place = shlex.quote(_short_path(result.folder / "artifacts" / step))
        if result.report["recipe"].get("task") == CUSTOM_TASK:
            return [
                *lines,
                f"Try it: smelt predict {place} --data FILE.npz",
                f"Ship it: cp -rL {place} NEW",
            ]
        what = "IMAGE.png" if result.report["recipe"].get("task") == IMAGE_CLASSIFICATION else '"TEXT"'
        lines += [
            f"Try it: smelt predict {place} {what}",
            f"Ship it: smelt package {place}{_package_format_option(result.report, step)}",
        ]
    return lines


def recommended_steps(report: Mapping[str, Any]) -> list[str]:
    """Return the steps to score on test after they were chosen on validation; the baseline is first.

    They are the baseline, the Pareto-optimal steps, the recommended step and the smallest deployable step.
    """
    from smelt.evaluate.report.headline import headline
    from smelt.evaluate.report.schema import validate_report

    found = headline(validate_report(report))
    picks = [step.name for step in (found.recommended, found.likely) if step]
    named = [report["baseline"], *report["frontier"], *picks, smallest_deployable_step(report)]
    scored = {step["name"] for step in report["steps"] if step["quality"]}
    return [name for name in dict.fromkeys(named) if name in scored]


def deployment_notes(report: Mapping[str, Any], name: str) -> list[Message]:
    """Return what a user needs to know before deploying the step `name`.

    Codes: `gate-failed`, it fails a gate, which means that all deployable steps do; `significantly-worse`, it
    is worse than the baseline; `accepted-loss`, it is worse, but its gate or the metric accepts that;
    `too-few-examples`, there are too few to decide. A large loss may not be significant, such as 7.5 BLEU on
    30 translations.
    """
    gates = next(step.get("gates") or [] for step in report["steps"] if step["name"] == name)
    failed = any(gate["passed"] is False for gate in gates)
    text = f"{name} fails a gate, as do all other deployable steps."
    quality = _quality_note(report, name)
    return [warning("gate-failed", text)] * failed + ([] if quality is None else [quality])


def _quality_note(report: Mapping[str, Any], name: str) -> Message | None:
    from smelt.evaluate.report import view
    from smelt.evaluate.report.schema import ScoreDifference

    step = next(step for step in report["steps"] if step["name"] == name)
    step = step | (step.get("test") or {})  # scores on test, if the step was chosen on validation
    metric = next((m for m in step["quality"] if m in (step.get("against_baseline") or {})), None)
    if metric is None or name == report["baseline"]:
        return None
    score, test = step["quality"][metric], step["against_baseline"][metric]
    who = (
        "a short text" if metric in WINDOW_METRICS else view.count_text(score["n"], view.sample_unit(metric))
    )
    found = ScoreDifference.model_validate(test)
    ends = view.difference_interval_text(found, metric).replace(" ", _NO_BREAK_SPACE)
    of = " on test" if step.get("test") else ""
    change = f"{view.difference_text(found, metric)}{_NO_BREAK_SPACE}{ends}"
    difference = f"{view.metric_label(metric)}{of} {change}".rstrip(_NO_BREAK_SPACE)
    sign = 1 if score["higher_is_better"] else -1
    ends_up = [sign * end for end in test["ci95"] or (-math.inf, math.inf)]
    if _is_significantly_worse(step):
        little = (
            f"; losses up to {_NEGLIGIBLE_POINTS:g} point are accepted" if _is_negligible_loss(step) else ""
        )
        allowed = "; its gate allows that" if _passes_gates(step) else little
        change = f"{difference}, {view.p_value_text(test['p_value'])}{allowed}"
        code = "accepted-loss" if allowed else "significantly-worse"
        return warning(code, f"{name} is worse than {report['baseline']}: {change}.")
    if (
        score["n"] < _MIN_EXAMPLES
        or -min(ends_up) > _MAX_UNCERTAIN_DROP * abs(score["value"] - test["difference"])
        or max(ends_up) < 0  # and yet not significant
    ):
        return warning(
            "too-few-examples",
            f"{name}: not enough data ({who}) to decide whether it is worse than {report['baseline']}:"
            f" {difference}. Score it on more samples before deploying it.",
        )
    return None


def _package_format_option(report: Mapping[str, Any], name: str) -> str:
    """Return the format option of `smelt package` for the step; third-party generation graphs need one."""
    details = next((step.get("details") or {} for step in report["steps"] if step["name"] == name), {})
    generates = report["recipe"].get("task") in (*TEXT_TO_TEXT_TASKS, "language-modeling")
    return " --format optimum" if generates and details.get("foreign") else ""


def smallest_deployable_step(report: Mapping[str, Any]) -> str | None:
    """Return the smallest Pareto-optimal step that runs in ONNX Runtime on a CPU; None if there is none.

    Without latencies (not measured, or disturbed), the candidates are the steps that are not significantly
    worse than the baseline, lose a negligible amount, or pass their gates; else the best step. A step that
    fails a gate is returned only if all do, a step with quality at chance level never.
    """
    candidates = [
        step
        for step in report["steps"]
        if step["artifact"] and step["format"] == "onnx" and step["target"] == "ort-cpu"
    ]
    candidates = [step for step in candidates if not is_step_at_chance(step)]
    kept = [
        s for s in candidates if all(gate["passed"] is not False for gate in s.get("gates") or [])
    ] or candidates
    worth = [step for step in kept if step["name"] in report["frontier"]]
    worth = (
        worth
        or [s for s in kept if not _is_significantly_worse(s) or _is_negligible_loss(s) or _passes_gates(s)]
        or _best_step(kept)
    )
    if not worth:
        return None
    return str(min(worth, key=lambda step: step["size_bytes"])["name"])


def _is_significantly_worse(step: Mapping[str, Any]) -> bool:
    """Return whether the first metric of a step is significantly worse than the baseline's."""
    from smelt.evaluate.report.view import SIGNIFICANCE_LEVEL

    for metric, score in (step.get("quality") or {}).items():
        test = (step.get("against_baseline") or {}).get(metric)
        sign = 1 if score["higher_is_better"] else -1
        return test is not None and test["p_value"] < SIGNIFICANCE_LEVEL and sign * test["difference"] < 0
    return False


def _is_negligible_loss(step: Mapping[str, Any]) -> bool:
    """Return whether a step loses little agreement with the baseline, if that is its first metric.

    `top1` counts too, if scored: close outputs may still have another maximum.
    """
    tested = step.get("against_baseline") or {}
    first = next((name for name in step.get("quality") or {} if name in tested), None)
    if first not in _BASELINE_PERFECT_METRICS:
        return False
    judged = [first, *(name for name in ("top1",) if name in tested)]
    return all(abs(tested[name]["difference"]) <= _NEGLIGIBLE_POINTS for name in judged)


def _passes_gates(step: Mapping[str, Any]) -> bool:
    """Return whether the first metric of a step has gates and passes all of them."""
    tested = step.get("against_baseline") or {}
    metric = next((name for name in step.get("quality") or {} if name in tested), None)
    asked = [gate["passed"] for gate in step.get("gates") or [] if gate.get("metric") == metric]
    return metric is not None and bool(asked) and all(asked)


def _best_step(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a list with the step that has the best first metric; empty for no steps."""
    signs = {True: 1, False: -1}
    scores = [next(iter(step["quality"].values())) for step in steps]
    values = [signs[score["higher_is_better"]] * score["value"] for score in scores]
    return [steps[values.index(max(values))]] if values else []


def _short_path(path: Path) -> str:
    """Return `path`, relative to the current folder if it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
