"""The report of a search: search.json, search.md and search.html with the winners, as scored on test.

The trials were chosen by their validation scores, so the best of them is better there than it is: the more
trials, the more. The report therefore shows the scores of the winners on test, which no trial has seen.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from smelt.core.errors import RunError, SmeltError
from smelt.core.files import write_atomically
from smelt.core.locks import file_lock
from smelt.core.messages import escape_controls, messages_to_json
from smelt.core.termination import interrupted_exit_code
from smelt.evaluate.report import view
from smelt.evaluate.report.drawing import PageFigure, css_colors, new_figure, page_svg, shorten, style_axes
from smelt.evaluate.report.markdown import Markdown, markdown_table
from smelt.evaluate.report.schema import ScoreDifference
from smelt.pipeline.search.analysis import hypervolumes, importances
from smelt.pipeline.search.space import SearchSpace
from smelt.pipeline.search.study import Search
from smelt.pipeline.search.trials import Trial, objective_text, parameter_text

SEARCH_SCHEMA = 1
_REPORT_FILES = ("search.json", "search.md", "search.html")
_STATUS_COLORS = {"feasible": "accent", "infeasible": "bad", "stopped": "soft", "failed": "line"}
_TITLES = {"latency": "time of a call, share of the baseline's", "size": "MB", "memory": "peak memory, MB"}
_RUN_TEXT = (
    "In the folder of the search: `smelt run recipes/TRIAL.yaml --store STORE` runs a trial's recipe,"
    " its artifact is in `points/TRIAL/artifacts`."
)
_WIDE, _HEIGHT = 640, 300


def finish_search(search: Search, ended: str) -> dict[str, Any]:
    """Score the front on test, write the report, and return it (the content of search.json).

    One worker at a time: the next one finds the scores in the store, and the last one reports all trials.

    Args:
        search: the search; its trials are finished.
        ended: why it ended: `trials`, `time`, `exhausted` or `interrupted`. After an interruption nothing is
            scored on test.

    Returns:
        `ended`; `left`, the numbers of trials and points that were not tried;
        `trials` with parameters (`used`: without the settings of absent stages), values, violations and
        status; `front`, the Pareto-optimal trials that meet
        the constraints, each with its scores on validation and `test`, its recipe and artifact; `nearest`,
        where no trial meets them; `store`, what the store saved; `importances` of the parameters.
    """

    def wait(holder: str) -> None:
        search.print_line(f"scores on test: waits for {holder}, which is scoring")

    with file_lock(search.folder / "finish.lock", wait):
        return _write_report(search, ended)


def _write_report(search: Search, ended: str) -> dict[str, Any]:
    trials, front = search.finished_trials(), search.front()
    space = search.space
    costs = [trial.result for trial in trials]
    report: dict[str, Any] = {
        "schema": SEARCH_SCHEMA,
        "smelt": version("smelt"),
        "recipe": str(space.path),
        "ended": ended,
        "left": search.untried(),
        "sampler": space.sampler,
        "seed": search.seed,
        "limit": search.options.limit,
        "baseline": search.baseline,
        "objectives": [{"name": each.name, "maximize": each.maximize} for each in space.objectives],
        "subject_to": {
            name: gate.model_dump(exclude_none=True, mode="json")
            for name, gate in space.settings.subject_to.items()
        },
        "parameters": [each.name for each in space.parameters],
        "trials": [_trial_entry(trial, space) for trial in trials],
        "store": {
            "place": str(search.store),
            "steps": sum(cost.steps for cost in costs),
            "cached_steps": sum(cost.cached_steps for cost in costs),
            "seconds": sum(cost.seconds for cost in costs),
            "saved_seconds": sum(cost.saved_seconds for cost in costs),
        },
        "importances": importances(search),
        "hypervolumes": hypervolumes(trials, search) if len(space.objectives) == 2 else [],
        "front": [],
        "nearest": None,
        "warnings": messages_to_json(search.warnings()),
    }
    if not front and (nearest := search.nearest()) is not None:
        report["nearest"] = _trial_entry(nearest, space)
    for trial in front:
        scored, error = None, None
        if report["ended"] != "interrupted":
            try:
                scored = search.score_on_test(trial)
            except KeyboardInterrupt:
                report["ended"] = "interrupted"
            except SmeltError as failure:
                error = messages_to_json(failure.found or [failure.as_message()])[0]
        report["front"].append(_point_entry(search, trial, scored, error))
    for name, text in zip(
        _REPORT_FILES,
        (
            json.dumps(report, indent=1, ensure_ascii=False) + "\n",
            search_markdown(report),
            search_html(report),
        ),
        strict=True,
    ):
        write_atomically(search.folder / name, text)
    return report


def _trial_entry(trial: Trial, space: SearchSpace) -> dict[str, Any]:
    result = trial.result
    return {
        "name": trial.name,
        "number": trial.number,
        "parameters": dict(trial.parameters),
        "used": [*space.used_values(trial.parameters)],
        "status": result.status,
        "values": dict(result.values),
        "violations": dict(result.violations),
        "quality": {name: score["value"] for name, score in result.quality.items()},
        "size_bytes": result.size_bytes,
        "seconds": result.seconds,
        "saved_seconds": result.saved_seconds,
        "samples": result.samples,
        "error": result.error and dict(result.error),
    }


def _point_entry(
    search: Search, trial: Trial, scored: Mapping[str, Any] | None, error: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a trial of the front with its scores on validation and test. error: why test was not scored."""
    leaf = None if scored is None else next(s for s in scored["steps"] if s["name"] == search.space.leaf)
    test = (leaf or {}).get("test")
    result = trial.result
    latency = result.latency or next(iter((leaf or {}).get("latency") or []), None)
    folder = search.folder / "points" / trial.name
    return _trial_entry(trial, search.space) | {
        "validation": {"quality": dict(result.quality), "against_baseline": dict(result.differences)},
        "test": test,
        "passes_on_test": None
        if test is None
        else all(gate["passed"] is not False for gate in test.get("gates") or []),
        "test_error": error or _test_error(scored),
        "latency": latency and {
            key: latency.get(key)
            for key in ("batch_size", "p50_ms", "speedup", "speedup_ci95", "cpu_speedup", "stable")
        },
        "memory_bytes": result.memory_bytes,
        "format": (leaf or {}).get("format"),
        "deployable": (leaf or {}).get("deployable"),
        "recipe": str(Path("recipes") / f"{trial.name}.yaml") if scored is not None else None,
        "artifact": str((folder / "artifacts" / search.space.leaf).relative_to(search.folder))
        if scored is not None
        else None,
    }  # fmt: skip


def _test_error(scored: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the first error of a run that scores on test, as code and message; None without one."""
    return next((step["error"] for step in (scored or {"steps": []})["steps"] if step["error"]), None)


def summary_text(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the end of the output of `smelt search`: the front, what to run, and where the report is."""
    lines = ["", *_sentences(report)]
    if report["front"]:
        head, rows = _front_table(report)
        widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
        lines += [
            "  ".join(
                cell.ljust(w) if at == 0 else cell.rjust(w)
                for at, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in [head, *rows]
        ]
        best = report["front"][0]
        if best["recipe"]:
            place = Path(os.path.relpath(folder))
            lines += [
                f"Run it: smelt run {shlex.quote(str(place / best['recipe']))} --store"
                f" {shlex.quote(report['store']['place'])}",
            ]
            if best["deployable"]:
                artifact = shlex.quote(str(place / best["artifact"]))
                packed = best["format"] == "onnx"
                lines.append(
                    f"Ship it: {f'smelt package {artifact}' if packed else f'cp -rL {artifact} NEW'}"
                )
    return [*lines, f"Report: {Path(os.path.relpath(folder)) / 'search.html'}"]


def exit_code(report: Mapping[str, Any]) -> int:
    """Return the exit code of the command: 0, or why there is no winner (see `smelt search --help`)."""
    if report["ended"] == "interrupted":
        return interrupted_exit_code()
    if not report["front"]:
        return 3
    return RunError.exit_code if all(point["test_error"] for point in report["front"]) else 0


def _time_text(report: Mapping[str, Any]) -> str:
    """Return that time ended the search, and what it has not tried."""
    tried, left = len(report["trials"]), report["left"]
    points = "" if left["points"] is None else f", {left['points']:,} of the space's points"
    return (
        f"The time limit ended the search after {tried} of {tried + left['trials']} trials; untried:"
        f" {view.count_text(left['trials'], 'trial')}{points}. The same command continues it; a longer time"
        " (--timeout, --budget or max_minutes) tries more at once."
    )


def _sentences(report: Mapping[str, Any]) -> list[str]:
    """Return what the search did and found, in sentences."""
    trials, store = report["trials"], report["store"]
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial["status"]] = counts.get(trial["status"], 0) + 1
    kinds = ", ".join(f"{count} {status}" for status, count in counts.items())
    share = 100 * store["cached_steps"] / store["steps"] if store["steps"] else 0
    found = [
        f"{view.count_text(len(trials), 'trial')} ({kinds or 'none'}) in {store['seconds'] / 60:.1f} minutes;"
        f" {share:.0f} % of {view.count_text(store['steps'], 'step')} came from the store, which saved"
        f" {store['saved_seconds'] / 60:.1f} minutes."
    ]
    if report["ended"] == "time":
        found.append(_time_text(report))
    if report["ended"] == "exhausted":
        found.append("The space is exhausted: every combination was tried.")
    found += [f"{message['severity']}: {message['message']}" for message in report["warnings"]]
    if report["limit"]:
        found.append(f"A search on at most {report['limit']} samples per split, not a result.")
    if any(point["deployable"] is False for point in report["front"]):
        found.append(
            "The last step cannot be deployed: torch computes its quantized layers in float. Add a stage that"
            " exports, such as onnx, and search again."
        )
    if not report["front"]:
        nearest = report["nearest"]
        found.append(
            "No trial meets the constraints."
            if nearest is None
            else f"No trial meets the constraints. The nearest is {nearest['name']}:"
            f" {_violation_text(nearest)}; {_parameters_text(nearest)}."
        )
        return found
    if any(point["test"] or point["test_error"] for point in report["front"]):
        lost = [point["name"] for point in report["front"] if point["passes_on_test"] is False]
        found.append(
            f"Trials were chosen on validation, where the best of {len(trials)} looks better than it is. The"
            " scores on test are without this bias for each trial; picking the best of them by test adds it"
            " again."
        )
        found += [
            f"{point['name']} was not scored on test: error[{error['code']}]: {error['message']}"
            for point in report["front"]
            if (error := point["test_error"])
        ]
        if lost:
            found.append(f"On test a constraint is violated by {', '.join(lost)}.")
    return found


def _violation_text(entry: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} beyond its limit by {objective_text(name, amount)}"
        for name, amount in entry["violations"].items()
        if amount > 0
    )


def _values_text(entry: Mapping[str, Any], names: Sequence[str]) -> str:
    values = {**entry["quality"], **entry["values"]}
    return ", ".join(f"{name} {objective_text(name, values[name])}" for name in names)


def _parameters_text(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {parameter_text(entry['parameters'][name])}" for name in entry["used"])


def _front_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the front: scores on validation and test, size and speed-up."""
    metrics = list(
        dict.fromkeys(name for point in report["front"] for name in point["validation"]["quality"])
    )
    head = ["trial"]
    for metric in metrics:
        head += [f"{view.metric_label(metric)} val.", "test", "difference"]
    head += ["MB", "speed-up"]
    rows = []
    for point in report["front"]:
        cells = [point["name"]]
        for metric in metrics:
            digits = view.metric_digits(metric)
            test = point["test"] or {"quality": {}, "against_baseline": {}}
            score, difference = test["quality"].get(metric), test["against_baseline"].get(metric)
            cells.append(view.number_text(point["validation"]["quality"][metric]["value"], digits))
            cells.append(view.number_text(score["value"], digits) if score else view.MISSING_TEXT)
            cells.append(_difference_text(difference, metric))
        latency = point["latency"] or {}
        speed = latency.get("cpu_speedup") if latency.get("stable") is False else latency.get("speedup")
        by = " (CPU)" if latency.get("stable") is False else ""
        cells += [view.megabytes(point["size_bytes"]), f"{speed:.2f}×{by}" if speed else view.MISSING_TEXT]
        rows.append(cells)
    return head, rows


def _difference_text(difference: Mapping[str, Any] | None, metric: str) -> str:
    if difference is None:
        return view.MISSING_TEXT
    found = ScoreDifference.model_validate(difference)
    ends = view.difference_interval_text(found, metric)
    return f"{view.difference_text(found, metric)} {ends}".rstrip()


def _parameter_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the parameters of the front, with the importance of each parameter."""
    names = [point["name"] for point in report["front"]]
    head = ["parameter", *names, *(f"importance for {name}" for name in report["importances"])]
    rows = [
        [
            parameter,
            *(
                parameter_text(point["parameters"][parameter])
                if parameter in point["used"]
                else view.MISSING_TEXT
                for point in report["front"]
            ),
            *(
                f"{100 * shares[parameter]:.0f} %" if parameter in shares else view.MISSING_TEXT
                for shares in report["importances"].values()
            ),
        ]
        for parameter in report["parameters"]
    ]
    return head, rows


def search_markdown(report: Mapping[str, Any]) -> str:
    """Return the report in GitHub's Markdown."""
    parts = [Markdown("# Search of ") + Path(report["recipe"]).name, " ".join(_sentences(report))]
    if report["front"]:
        parts += [Markdown("## Front"), markdown_table(*_front_table(report))]
        if any(point["recipe"] for point in report["front"]):
            parts.append(Markdown(_RUN_TEXT))
    parts += [Markdown("## Parameters"), markdown_table(*_parameter_table(report))]
    parts += [Markdown("## Trials"), markdown_table(*_trials_table(report))]
    return str(Markdown("\n\n").join(parts)) + "\n"


def search_html(report: Mapping[str, Any]) -> str:
    """Return the report as one HTML page without scripts."""
    import jinja2

    source = files("smelt.pipeline.search").joinpath("search.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found = {trial["status"] for trial in report["trials"]}
    keys = [(status, color) for status, color in _STATUS_COLORS.items() if status in found]
    figures = [
        (title, page_svg(figure), legend)
        for title, figure, legend in (
            ("Trials and front", _front_figure(report), keys),
            ("History", _history_figure(report), []),
            ("Parameters of the trials", _parallel_figure(report), keys),
        )
        if figure is not None
    ]
    tables = [("Front", _front_table(report))] if report["front"] else []
    tables.append(("Parameters", _parameter_table(report)))
    tables.append(("Trials", _trials_table(report)))
    page: str = environment.from_string(source).render(
        title=Path(report["recipe"]).name,
        sentences=_sentences(report),
        tables=[(name, head, rows) for name, (head, rows) in tables],
        figures=figures,
        how_to_run=_RUN_TEXT if any(point["recipe"] for point in report["front"]) else "",
        colors=css_colors,
    )
    return escape_controls(page)


def _trials_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    names = [each["name"] for each in report["objectives"]]
    head = ["trial", "status", *names, "seconds", "parameters"]
    rows = [
        [
            trial["name"],
            trial["status"] if not trial["error"] else f"failed: {trial['error']['code']}",
            *(
                objective_text(name, trial["values"][name]) if name in trial["values"] else view.MISSING_TEXT
                for name in names
            ),
            f"{trial['seconds']:.0f}",
            _parameters_text(trial),
        ]
        for trial in report["trials"]
    ]
    return head, rows


def _objective_value(trial: Mapping[str, Any], name: str) -> float | None:
    value = trial["values"].get(name)
    return None if value is None else value / 1e6 if name in ("size", "memory") else float(value)


def _axis_title(name: str) -> str:
    return f"{name} ({_TITLES[name]})" if name in _TITLES else view.metric_label(name)


def _front_figure(report: Mapping[str, Any]) -> PageFigure | None:
    """Return the trials by the first two objectives, or by the first and the first metric."""
    names = [each["name"] for each in report["objectives"]][:2]
    if len(names) == 1:
        metrics = {name: None for trial in report["trials"] for name in trial["quality"]}
        names += [name for name in metrics if name != names[0]][:1]
    if len(names) < 2:
        return None

    def value(trial: Mapping[str, Any], name: str) -> float | None:
        found = _objective_value(trial, name)
        return found if found is not None else trial["quality"].get(name)

    points = [(trial, value(trial, names[0]), value(trial, names[1])) for trial in report["trials"]]
    points = [(trial, x, y) for trial, x, y in points if x is not None and y is not None]
    if not points:
        return None
    front = {point["name"] for point in report["front"]}

    def draw(colors: Mapping[str, str]) -> Any:
        figure, axes = _axes(colors)
        for at, (trial, x, y) in enumerate(points):
            color = colors[_STATUS_COLORS[trial["status"]]]
            size = 11 if trial["name"] in front else 7
            axes.plot(x, y, "o", markersize=size, color=color, gid=f"trial-{at}", zorder=3)
        line = sorted((x, y) for trial, x, y in points if trial["name"] in front)
        if len(line) > 1:
            axes.plot(*zip(*line, strict=True), color=colors["accent"], linestyle=(0, (5, 4)), zorder=2)
        _label(axes, _axis_title(names[0]), _axis_title(names[1]), colors)
        return figure

    titles = {
        f"trial-{at}": f"{trial['name']}: {_values_text(trial, names)}; {_parameters_text(trial)}"
        for at, (trial, *_) in enumerate(points)
    }
    return PageFigure(draw, "front", _WIDE, _HEIGHT, f"{names[1]} against {names[0]} of the trials", titles)


def _history_figure(report: Mapping[str, Any]) -> PageFigure | None:
    """Return the best value so far by trial, or for two objectives the area that the front dominates."""
    objective, numbers = report["objectives"][0], [trial["number"] for trial in report["trials"]]
    if report["hypervolumes"]:
        values = list(zip(numbers, report["hypervolumes"], strict=True))
        title = "hypervolume, share of the final one"
    elif len(report["objectives"]) == 1:
        values, best, sign = [], math.inf, -1 if objective["maximize"] else 1
        for at, trial in zip(numbers, report["trials"], strict=True):
            found = _objective_value(trial, objective["name"])
            if trial["status"] == "feasible" and found is not None:
                best = min(best, sign * found)
            if math.isfinite(best):
                values.append((at, sign * best))
        title = f"best {_axis_title(objective['name'])}"
    else:
        return None
    if len(values) < 2:
        return None

    def draw(colors: Mapping[str, str]) -> Any:
        figure, axes = _axes(colors)
        axes.step(*zip(*values, strict=True), where="post", color=colors["accent"], linewidth=2)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _label(axes, "trial", title, colors)
        return figure

    return PageFigure(draw, "history", _WIDE, _HEIGHT, f"{title} by trial", {})


def _parallel_figure(report: Mapping[str, Any]) -> PageFigure | None:
    """Return parallel coordinates: a line for each trial through its parameters and the first objective.

    A line has a gap where the trial does not have the stage of a parameter.
    """
    first = report["objectives"][0]["name"]
    rows = [trial for trial in report["trials"] if first in trial["values"]]
    if len(rows) < 2:
        return None
    columns = [
        (name, [trial["parameters"][name] if name in trial["used"] else None for trial in rows])
        for name in report["parameters"]
    ]
    columns.append((first, [_objective_value(trial, first) for trial in rows]))
    places = [_places(values) for _, values in columns]

    def draw(colors: Mapping[str, str]) -> Any:
        figure, axes = _axes(colors)
        for at, trial in enumerate(rows):
            axes.plot(
                range(len(columns)), [column[at] for column, _ in places],
                color=colors[_STATUS_COLORS[trial["status"]]], linewidth=1.4, alpha=0.7, gid=f"line-{at}",
            )  # fmt: skip
        for at, (_, ends) in enumerate(places):
            for height, text in ends:
                axes.annotate(
                    shorten(text, 14), (at, height), (0, 9 if height > 0.5 else -16), fontsize=10,
                    textcoords="offset points", ha="center", color=colors["soft"],
                )  # fmt: skip
        axes.set_ylim(-0.16, 1.16)
        axes.set_yticks([])
        axes.set_xticks(range(len(columns)), [shorten(name, 16) for name, _ in columns])
        return figure

    titles = {f"line-{at}": f"{trial['name']}: {_parameters_text(trial)}" for at, trial in enumerate(rows)}
    return PageFigure(
        draw, "parallel", _WIDE, _HEIGHT, "parameters and first objective of the trials", titles
    )


def _places(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the height from 0 to 1 of each value of a column, NaN for None, and the labels of its ends."""
    known = [value for value in values if value is not None]
    if not known:
        return [math.nan] * len(values), []
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
    kinds = sorted(set(known)) if numbers else sorted(set(known), key=str)
    if numbers:
        low, span = kinds[0], (kinds[-1] - kinds[0]) or 1
        heights = [math.nan if value is None else (value - low) / span for value in values]
    else:
        last = max(1, len(kinds) - 1)
        heights = [math.nan if value is None else kinds.index(value) / last for value in values]
    ends = [(0.0, parameter_text(kinds[0]))]
    if len(kinds) > 1:
        ends.append((1.0, parameter_text(kinds[-1])))
    return heights, ends


def _axes(colors: Mapping[str, str]) -> tuple[Any, Any]:
    figure = new_figure(_WIDE, _HEIGHT, colors)
    axes = figure.add_axes((0.11, 0.18, 0.86, 0.76), facecolor=colors["card"])
    style_axes(axes, colors)
    axes.ticklabel_format(useOffset=False, scilimits=(-4, 7))
    return figure, axes


def _label(axes: Any, x: str, y: str, colors: Mapping[str, str]) -> None:
    axes.set_xlabel(escape_controls(x), color=colors["soft"])
    axes.set_ylabel(escape_controls(y), color=colors["soft"])
