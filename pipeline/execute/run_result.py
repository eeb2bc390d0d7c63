"""What a run gives: its report, drawn into the run's folder, and what the command line says of it."""

from __future__ import annotations

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

from smelt.core.data import CUSTOM, IMAGES, TEXT_TO_TEXT
from smelt.core.errors import InputError, MissingDependencyError, nearest
from smelt.core.files import load_json, write_atomically
from smelt.evaluate.frontier import at_chance
from smelt.evaluate.metrics import WINDOW_METRICS

# The share of the baseline's score that an interval may reach below it before more rows are asked for.
_OPEN = 0.05
# Of fewer rows an interval says nothing: drawn again and again, two rows are always much the same.
_ROWS = 20
_HARD = "\N{NO-BREAK SPACE}"
# Of metrics that the baseline is perfect in by definition, so that whatever changes outputs is worse: the
# points that may be lost, where no gate says more.
_PERFECT = ("agreement", "top1", "relative_error")
_LITTLE = 1.0
EXIT_CODES = {"passed": 0, "error": 1, "gate-failed": 3, "interrupted": 130}


class Report(Mapping[str, Any]):
    """The report of a run: what report.json holds (docs/reference/report.md), as a read-only mapping.

    In a notebook it shows as the HTML report.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        from smelt.evaluate.report.schema import validate_report

        validate_report(data)
        self.data = dict(data)

    @classmethod
    def read(cls, run: str | PathLike[str]) -> Report:
        """Read the report of the run in the folder `run`, or the report.json at that path.

        Raises:
            InputError: there is no report, or not one that this version of smelt reads.
        """
        place = Path(run).expanduser()
        path = place if place.is_file() else place / "report.json"
        if not path.is_file():
            raise InputError(
                f"{path}: no such file. Give the folder of a run, such as runs/quickstart.",
                code="missing-file",
                file=str(path),
            )
        try:
            return cls(load_json(path))
        except ValueError as error:
            raise InputError(f"{path}: broken JSON: {error}", code="damaged-file", file=str(path)) from error
        except InputError as error:
            raise InputError(
                f"{path}: {error}", code=error.code, file=str(path), found=error.found
            ) from error

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per step.

        Columns: step, stage, parent, status, format, target, parameters, size_bytes; each metric, its
        `_difference` from the baseline and `_p_value`; of each timed batch size `latency_ms_N` (p50,
        milliseconds) and `speedup_N`.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise MissingDependencyError(
                "to_frame needs pandas: pip install 'smelt[notebook]'", code="not-installed"
            ) from error

        return pandas.DataFrame([_row(step) for step in self.data["steps"]]).set_index("step")

    def _repr_html_(self) -> str:
        from smelt.evaluate.report.html import write_html

        page = escape(write_html(self.data), quote=True)
        return (
            f'<iframe srcdoc="{page}" style="width: 100%; height: 720px; border: 0" title="report"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Report({self.data['recipe'].get('name', 'run')!r}, {self.data['status']!r})"

    def __str__(self) -> str:
        from smelt.evaluate.report.table import table

        return table(self.data)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


def _row(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step of a report as a flat row."""
    same = ("stage", "parent", "status", "format", "target", "parameters", "size_bytes")
    row: dict[str, Any] = {"step": step["name"], **{name: step[name] for name in same}}
    for metric, score in (step["quality"] or {}).items():
        row[metric] = score["value"]
        if test := (step["against_baseline"] or {}).get(metric):
            row |= {f"{metric}_difference": test["difference"], f"{metric}_p_value": test["p_value"]}
    for timed in step["latency"] or []:
        row[f"latency_ms_{timed['batch_size']}"] = timed["p50_ms"]
        row[f"speedup_{timed['batch_size']}"] = timed["speedup"]
    return row


@dataclass
class Result:
    """What a run gave: the report (see docs/reference/report.md), its folder, the exit code."""

    report: Report
    folder: Path
    exit_code: int = field(init=False)

    def __post_init__(self) -> None:
        self.exit_code = EXIT_CODES[self.report["status"]]

    def __repr__(self) -> str:
        """Return name, status and where it is: a session that shows the result wants no whole report."""
        name = self.report["recipe"].get("name", "run")
        return f"Result({name!r}, {self.report['status']!r}, {str(self.folder)!r})"

    def artifact(self, step: str) -> Path:
        """Return the folder of the artifact that `step` gave, for `smelt.load`.

        Raises:
            InputError: no such step, or it gave nothing.
        """
        folder = self.folder / "artifacts" / step
        given = [s["name"] for s in self.report["steps"] if s["artifact"]]
        if step not in given or not folder.is_dir():
            known = ", ".join(given)
            raise InputError(
                f"'{step}' gave no artifact; there are {known}.{nearest(step, given)}", code="no-artifact"
            )
        return folder


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write report.json and draw report.md and report.html from it."""
    from smelt.evaluate.report.html import write_html
    from smelt.evaluate.report.markdown import write_markdown

    write_atomically(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_atomically(folder / "report.md", write_markdown(dict(report)))
    write_atomically(folder / "report.html", write_html(dict(report)))


def summary_lines(result: Result) -> Sequence[str]:
    """Return what `smelt run` prints at its end: the table, where everything is, what to do with it.

    Of a run that was interrupted nothing is named to be used.
    """
    from smelt.evaluate.report.table import table

    lines = [table(result.report), "", f"Report: {_short(result.folder / 'report.html')}"]
    step = step_to_ship(result.report)
    if step is not None and result.report["status"] != "interrupted":  # whose gates nobody has judged
        lines += _failed(result.report, step) + _left_open(result.report, step)
        place = shlex.quote(_short(result.folder / "artifacts" / step))
        if result.report["recipe"].get("task") == CUSTOM:
            return [*lines, f"Try it: smelt predict {place} --data FILE.npz", f"Ship it: cp -rL {place} NEW"]
        what = "IMAGE.png" if result.report["recipe"].get("task") == IMAGES else '"TEXT"'
        lines += [
            f"Try it: smelt predict {place} {what}",
            f"Ship it: smelt package {place}{_form(result.report, step)}",
        ]
    return lines


def chosen(report: Mapping[str, Any]) -> list[str]:
    """Return the steps that a report names, and so what is to be scored on test where validation chose them.

    They are the Pareto front, the recommended step, the one to ship, and the baseline, which comes first.
    """
    from smelt.evaluate.report.headline import headline
    from smelt.evaluate.report.schema import validate_report

    found = headline(validate_report(report))
    picks = [step.name for step in (found.pick, found.likely) if step]
    named = [report["baseline"], *report["frontier"], *picks, step_to_ship(report)]
    scored = {step["name"] for step in report["steps"] if step["quality"]}
    return [name for name in dict.fromkeys(named) if name in scored]


def _failed(report: Mapping[str, Any], name: str) -> list[str]:
    """Say that the step fails a gate: then all do."""
    gates = next(step.get("gates") or [] for step in report["steps"] if step["name"] == name)
    if all(gate["passed"] is not False for gate in gates):
        return []
    return textwrap.wrap(f"{name} fails a gate, as do all steps that could be shipped.", 80)


def _left_open(report: Mapping[str, Any], name: str) -> list[str]:
    """Say that a step is worse than the baseline, or that the rows were too few to tell.

    A loss may be large and not significant: of 30 translations 7.5 BLEU were.
    """
    from smelt.evaluate.report import view
    from smelt.evaluate.report.schema import Difference

    step = next(step for step in report["steps"] if step["name"] == name)
    step = step | (step.get("test") or {})  # what was chosen on validation counts by what it does on test
    metric = next((m for m in step["quality"] if m in (step.get("against_baseline") or {})), None)
    if metric is None or name == report["baseline"]:
        return []
    score, test = step["quality"][metric], step["against_baseline"][metric]
    who = "so short a text" if metric in WINDOW_METRICS else view.counted(score["n"], view.unit(metric))
    found = Difference.model_validate(test)
    ends = view.change_interval(found, metric).replace(" ", _HARD)
    of = " on test" if step.get("test") else ""
    difference = f"{view.label(metric)}{of} {view.change(found, metric)}{_HARD}{ends}".rstrip(_HARD)
    sign = 1 if score["higher_is_better"] else -1
    ends_up = [sign * end for end in test["ci95"] or (-math.inf, math.inf)]
    if _is_worse(step):
        little = f"; up to {_LITTLE:g} point may be lost" if _is_little(step) else ""
        allowed = "; its gate allows that" if _is_allowed(step) else little
        told = f"{difference}, {view.probability(test['p_value'])}{allowed}"
        text = f"{name} is worse than {report['baseline']}: {told}."
    elif (
        score["n"] < _ROWS
        or -min(ends_up) > _OPEN * abs(score["value"] - test["difference"])
        or max(ends_up) < 0  # and yet not significant
    ):
        text = (
            f"{name}: {who} cannot tell whether it is worse than {report['baseline']}: {difference}."
            " Score it on more before you ship it."
        )
    else:
        return []
    return [line.replace(_HARD, " ") for line in textwrap.wrap(text, 80, break_on_hyphens=False)]


def _form(report: Mapping[str, Any], name: str) -> str:
    """Return the option of `smelt package` that the step needs: taken graphs hold no whole generation."""
    details = next((step.get("details") or {} for step in report["steps"] if step["name"] == name), {})
    generates = report["recipe"].get("task") in (*TEXT_TO_TEXT, "language-modeling")
    return " --format optimum" if generates and details.get("foreign") else ""


def step_to_ship(report: Mapping[str, Any]) -> str | None:
    """Return the smallest step that any machine with ONNX Runtime runs, of those that are worth having.

    Where no times say which are (none were taken, or all but the baseline's were disturbed), it is of those
    that are not significantly worse than the baseline, that agree with it but for a little, or whose gates
    allow that, else it is the best. A step that fails a gate is named only where all do, one whose quality is
    that of chance never. None where no step left for it.
    """
    there = [
        step
        for step in report["steps"]
        if step["artifact"] and step["format"] == "onnx" and step["target"] == "ort-cpu"
    ]
    there = [step for step in there if not at_chance(step)]
    kept = [s for s in there if all(gate["passed"] is not False for gate in s.get("gates") or [])] or there
    worth = [step for step in kept if step["name"] in report["frontier"]]
    worth = worth or [s for s in kept if not _is_worse(s) or _is_little(s) or _is_allowed(s)] or _best(kept)
    if not worth:
        return None
    return str(min(worth, key=lambda step: step["size_bytes"])["name"])


def _is_worse(step: Mapping[str, Any]) -> bool:
    """Say whether the first metric of a step is significantly worse than the baseline's."""
    from smelt.evaluate.report.view import SIGNIFICANT

    for metric, score in (step.get("quality") or {}).items():
        test = (step.get("against_baseline") or {}).get(metric)
        sign = 1 if score["higher_is_better"] else -1
        return test is not None and test["p_value"] < SIGNIFICANT and sign * test["difference"] < 0
    return False


def _is_little(step: Mapping[str, Any]) -> bool:
    """Say whether a step loses little of its agreement with the baseline, if that is its first metric.

    Choices count as well, where they are scored: outputs may be near and choose others.
    """
    tested = step.get("against_baseline") or {}
    first = next((name for name in step.get("quality") or {} if name in tested), None)
    if first not in _PERFECT:
        return False
    judged = [first, *(name for name in ("top1",) if name in tested)]
    return all(abs(tested[name]["difference"]) <= _LITTLE for name in judged)


def _is_allowed(step: Mapping[str, Any]) -> bool:
    """Say whether the first metric of a step, which may be worse, has gates and passes them."""
    tested = step.get("against_baseline") or {}
    metric = next((name for name in step.get("quality") or {} if name in tested), None)
    asked = [gate["passed"] for gate in step.get("gates") or [] if gate.get("metric") == metric]
    return metric is not None and bool(asked) and all(asked)


def _best(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the step with the best first metric; none of none."""
    signs = {True: 1, False: -1}
    scores = [next(iter(step["quality"].values())) for step in steps]
    values = [signs[score["higher_is_better"]] * score["value"] for score in scores]
    return [steps[values.index(max(values))]] if values else []


def _short(path: Path) -> str:
    """Return `path` relative to the current folder where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
