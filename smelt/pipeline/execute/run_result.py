"""The result of a run: its report, the files written to its folder, and the summary on the terminal."""

from __future__ import annotations

import csv
import io
import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from smelt.core.artifact import broken_link_problem
from smelt.core.errors import InputError, MissingDependencyError, did_you_mean
from smelt.core.files import write_atomically
from smelt.core.messages import escape_controls
from smelt.core.system import interrupted_exit_code
from smelt.evaluate.report.chart import CHART_FILES, chart_files
from smelt.evaluate.report.render import render_html, render_table
from smelt.evaluate.report.schema import read_report, validate_report
from smelt.evaluate.report.view import find_task

REPORT_FILES = ("report.json", "report.md", "report.html", "report.csv", *CHART_FILES)
EXIT_CODES = {"passed": 0, "error": 1, "gate-failed": 3}
NOT_COPIED_EXIT_CODE = 4  # passed, but the remote store lacks results


class Report(Mapping[str, Any]):
    """The report of a run, a read-only mapping with the content of report.json (docs/reference/report.md).

    Notebooks display it as the HTML report.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:

        validate_report(data)
        self.data = dict(data)

    @classmethod
    def read(cls, run: str | PathLike[str]) -> Report:
        """Read the report of the run in the folder `run`, or the report.json at that path.

        Raises:
            InputError: there is no report, or this version of smelt cannot read it.
        """
        return cls(read_report(Path(run).expanduser()))

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per step.

        Columns: step, stage, parent, status, format, target, parameters, operations, size_bytes; for each
        metric its value, `_difference` from the baseline, `_p_value` and `_p_value_holm`; `same_outputs`
        (percent), `agreement_bleu`, `agreement_chrf`, `kl_divergence` with the baseline's outputs; for each
        measured batch size `latency_ms_N` (p50, milliseconds), `stable_N` (whether its speed may be claimed),
        `speedup_N`, and `cpu_speedup_N` by CPU time. Values, differences and speed-ups have 95 % intervals in
        `_low` and `_high`.

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

        page = escape(render_html(self.data), quote=True)
        return (
            f'<iframe srcdoc="{page}" style="width: 100%; height: 720px; border: 0" title="report"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Report({self.data['recipe'].get('name', 'run')!r}, {self.data['status']!r})"

    def __str__(self) -> str:

        return render_table(self.data)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


_AGREEMENT_COLUMNS = {
    "equal": "same_outputs",
    "bleu": "agreement_bleu",
    "chrf": "agreement_chrf",
    "kl_divergence": "kl_divergence",
}


def step_row(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step of a report as a flat row."""
    copied_keys = ("stage", "parent", "status", "format", "target", "parameters", "operations", "size_bytes")
    row: dict[str, Any] = {"step": step["name"], **{name: step.get(name) for name in copied_keys}}
    for metric, score in (step["quality"] or {}).items():
        row |= {metric: score["value"], **_interval_columns(metric, score["ci95"])}
        row |= {f"{metric}_{part}": value for part, value in (score.get("parts") or {}).items()}
        if test := (step["against_baseline"] or {}).get(metric):
            row |= {
                f"{metric}_difference": test["difference"],
                **_interval_columns(f"{metric}_difference", test["ci95"]),
                f"{metric}_p_value": test["p_value"],
                f"{metric}_p_value_holm": test.get("p_value_holm"),
            }
    for name, value in (step.get("agreement") or {}).items():
        if name in _AGREEMENT_COLUMNS and value is not None:
            row[_AGREEMENT_COLUMNS[name]] = value
    if (layers := step.get("layer_sqnr")) and layers["output_sqnr_db"] is not None:
        row["output_sqnr_db"] = layers["output_sqnr_db"]
    for latency in step["latency"] or []:
        size = latency["batch_size"]
        row |= {f"latency_ms_{size}": latency["p50_ms"], f"stable_{size}": latency.get("stable")}
        for name in ("speedup", "cpu_speedup"):
            row |= {f"{name}_{size}": latency.get(name)}
            row |= _interval_columns(f"{name}_{size}", latency.get(f"{name}_ci95"))
    return row


def _interval_columns(name: str, interval: Sequence[float] | None) -> dict[str, float]:
    """Return the columns of the ends of an interval; none without one."""
    return {} if interval is None else {f"{name}_low": interval[0], f"{name}_high": interval[1]}


def report_csv(report: Mapping[str, Any]) -> str:
    """Return the table of `Report.to_frame` as CSV, with a line for each step."""
    rows = [step_row(step) for step in report["steps"]]
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_csv_cell, names))
    writer.writerows([_csv_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    """Return a text without control characters, and with an apostrophe before what starts a formula.

    Source: CSV injection, OWASP. Spreadsheets compute cells that begin with one of these characters.
    """
    if not isinstance(value, str):
        return value
    text = escape_controls(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text


@dataclass
class Result:
    """The result of a run: report (see docs/reference/report.md), folder and exit code.

    not_copied: the number of results that the remote store lacks.
    """

    report: Report
    folder: Path
    not_copied: int = 0
    exit_code: int = field(init=False)

    def __post_init__(self) -> None:
        status = self.report["status"]
        self.exit_code = interrupted_exit_code() if status == "interrupted" else EXIT_CODES[status]
        if self.not_copied and not self.exit_code:
            self.exit_code = NOT_COPIED_EXIT_CODE

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
        available = [s["name"] for s in self.report["steps"] if s["artifact"]]
        if step not in available or not folder.is_dir():
            names = ", ".join(available)
            raise InputError(
                f"no artifact of a step '{step}'. Available steps: {names}.{did_you_mean(step, available)}",
                code="no-artifact",
            )
        return folder


def write_report(
    folder: Path, report: Mapping[str, Any], with_charts: bool = True, with_pages: bool = True
) -> None:
    """Write the report to `folder`: report.json, and with pages .md, .html and .csv.

    with_charts: with charts, also as files.
    """
    from smelt.evaluate.report.markdown import render_markdown

    write_atomically(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    if not with_pages:
        return
    write_atomically(folder / "report.md", render_markdown(report))
    write_atomically(folder / "report.html", render_html(report, with_charts))
    write_atomically(folder / "report.csv", report_csv(report))
    if with_charts:
        charts = chart_files(validate_report(report))
        for name in set(CHART_FILES) - charts.keys():
            (folder / name).unlink(missing_ok=True)
        for name, content in charts.items():
            write_atomically(folder / name, content)


def summary_lines(result: Result) -> Sequence[str]:
    """Return the final output of `smelt run`: the table, the report's path, and commands to try and deploy.

    Without the commands where the verdict recommends no step.
    """
    from smelt.evaluate.report.verdict import ship_command

    lines = [render_table(result.report), "", f"Report   {_short_path(result.folder / 'report.html')}"]
    report = validate_report(result.report)
    links = [result.folder / "artifacts" / step.name for step in report.steps if step.artifact]
    problems = ((link, problem) for link in links if (problem := broken_link_problem(link)) is not None)
    if (first_problem := next(problems, None)) is not None:  # no command with these artifacts would work
        return [*lines, f"{_short_path(first_problem[0])}: {first_problem[1][1]}"]
    step = next((step for step in report.steps if report.verdict and step.name == report.verdict.step), None)
    if step is None:
        return lines
    folder = _short_path(result.folder / "artifacts" / step.name)
    example_input = find_task(report).command_input
    return [
        *lines,
        f"Try      {_program()} predict {shlex.quote(folder)} {example_input}",
        f"Package  {ship_command(report, step, folder, _program())}",
    ]


def _program() -> str:
    """Return the name of the command, or its path where it is not on the search path."""
    path = Path(sys.argv[0])
    if path.name != "smelt" or shutil.which("smelt"):
        return "smelt"
    return shlex.quote(_short_path(path.absolute()))


def _short_path(path: Path) -> str:
    """Return `path`, relative to the current folder if it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
