"""The report of a search: search.json, search.md and search.html with the winners, as scored on test.

The trials were chosen by their validation scores, so the best of them is better there than it is: the more
trials, the more. The report therefore shows the scores of the winners on test, which no trial has seen.
"""

from __future__ import annotations

import json
import os
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from smelt.core.errors import RunError, SmeltError
from smelt.core.files import write_atomically
from smelt.core.locks import file_lock
from smelt.core.messages import count_text, escape_controls, messages_to_json
from smelt.core.system import interrupted_exit_code
from smelt.evaluate.report import view
from smelt.evaluate.report.drawing import PageFigure, css_colors, page_svg
from smelt.evaluate.report.markdown import Markdown, markdown_table
from smelt.evaluate.report.step_schema import ScoreDifference
from smelt.pipeline.search.space import SearchSpace
from smelt.pipeline.search.study import Search
from smelt.pipeline.search.trials import Trial, objective_text, parameter_text

SEARCH_SCHEMA = 1
_REPORT_FILES = ("search.json", "search.md", "search.html")
_UNITS = {"latency": "relative", "size": "MB", "memory": "MB"}
_RUN_TEXT = (
    "In the folder of the search: `smelt run recipes/TRIAL.yaml --store STORE` runs a trial's recipe,"
    " its artifact is in `points/TRIAL/artifacts`."
)
_WIDTH, _HEIGHT = 680, 380  # of a figure, points


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
        "objectives": [{"name": item.name, "maximize": item.maximize} for item in space.objectives],
        "gates": {
            name: gate.model_dump(exclude_none=True, mode="json") for name, gate in space.constraints.items()
        },
        "parameters": [item.name for item in space.parameters],
        "trials": [_trial_entry(trial, space) for trial in trials],
        "store": {
            "place": str(search.store),
            "steps": sum(cost.steps for cost in costs),
            "cached_steps": sum(cost.cached_steps for cost in costs),
            "seconds": sum(cost.seconds for cost in costs),
            "saved_seconds": sum(cost.saved_seconds for cost in costs),
        },
        "importances": importances(search),
        "front": [],
        "nearest": None,
        "warnings": messages_to_json(search.warnings()),
    }
    if not front and (nearest_trial := search.nearest()) is not None:
        report["nearest"] = _trial_entry(nearest_trial, space)
    for trial in front:
        scored, error = None, None
        if report["ended"] != "interrupted":
            try:
                scored = search.score_on_test(trial)
            except KeyboardInterrupt:
                report["ended"] = "interrupted"
            except SmeltError as failure:
                error = messages_to_json(failure.messages or [failure.as_message()])[0]
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


def importances(search: Search) -> dict[str, dict[str, float]]:
    """Return the importance of each parameter for each objective; the shares of an objective sum to 1.

    It is by how much the best tenth of the trials differs from all of them in a parameter, whose values count
    only in trials that have its stage. Sources: Watanabe et al. 2023, PED-ANOVA, arXiv:2304.10255; for
    optional stages Conditional PED-ANOVA, arXiv:2601.20800.
    """
    import optuna

    study, shares_by_objective = _study_of_used_values(search), {}
    for index, (objective, sign) in enumerate(search.signs().items()):

        def value(trial: Any, index: int = index, sign: int = sign) -> float:
            return float(sign * trial.values[index])

        with suppress(ValueError, RuntimeError), warnings.catch_warnings():  # too few, or all equal
            # that low targets count as good: they are, by their sign
            warnings.simplefilter("ignore", UserWarning)
            shares_by_objective[objective] = {
                name: float(share)
                for name, share in optuna.importance.get_param_importances(study, target=value).items()
            }
    return shares_by_objective


def _study_of_used_values(search: Search) -> Any:
    """Return the completed trials in a study in memory, without the settings of absent stages."""
    import optuna

    study = optuna.create_study(directions=["minimize"] * len(search.space.objectives))
    for trial in search.open_study().get_trials(deepcopy=False):
        if trial.state == optuna.trial.TrialState.COMPLETE:
            used_values = search.space.used_values(trial.params)
            study.add_trial(
                optuna.trial.create_trial(
                    params=used_values,
                    distributions={name: trial.distributions[name] for name in used_values},
                    values=trial.values,
                )
            )
    return study


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
        header, rows = _front_table(report)
        widths = [max(len(cells[column]) for cells in [header, *rows]) for column in range(len(header))]
        lines += [
            "  ".join(
                cell.ljust(w) if column == 0 else cell.rjust(w)
                for column, (cell, w) in enumerate(zip(cells, widths, strict=True))
            )
            for cells in [header, *rows]
        ]
        best = report["front"][0]
        if best["recipe"]:
            relative_folder = Path(os.path.relpath(folder))
            lines += [
                f"Run it: smelt run {shlex.quote(str(relative_folder / best['recipe']))} --store"
                f" {shlex.quote(report['store']['place'])}",
            ]
            if best["deployable"]:
                artifact = shlex.quote(str(relative_folder / best["artifact"]))
                packed = best["format"] == "onnx"
                lines.append(
                    f"Package: {f'smelt package {artifact}' if packed else f'cp -rL {artifact} NEW'}"
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
    num_done, counts = len(report["trials"]), report["left"]
    points = "" if counts["points"] is None else f", {counts['points']:,} of the space's points"
    return (
        f"The time limit ended the search after {num_done} of {num_done + counts['trials']} trials; untried:"
        f" {count_text(counts['trials'], 'trial')}{points}. The same command continues it; a longer time"
        " (--time-limit or time_limit_minutes) tries more at once."
    )


def _sentences(report: Mapping[str, Any]) -> list[str]:
    """Return what the search did and found, in sentences."""
    trials, store = report["trials"], report["store"]
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial["status"]] = counts.get(trial["status"], 0) + 1
    kinds = ", ".join(f"{count} {status}" for status, count in counts.items())
    share = 100 * store["cached_steps"] / store["steps"] if store["steps"] else 0
    sentences = [
        f"{count_text(len(trials), 'trial')} ({kinds or 'none'}) in {store['seconds'] / 60:.1f} minutes;"
        f" {share:.0f} % of {count_text(store['steps'], 'step')} came from the store, which saved"
        f" {store['saved_seconds'] / 60:.1f} minutes."
    ]
    if report["ended"] == "time":
        sentences.append(_time_text(report))
    if report["ended"] == "exhausted":
        sentences.append("The space is exhausted: every combination was tried.")
    sentences += [f"{message['severity']}: {message['message']}" for message in report["warnings"]]
    if report["limit"]:
        sentences.append(f"A search on at most {report['limit']} samples per split, not a result.")
    if any(point["deployable"] is False for point in report["front"]):
        sentences.append(
            "The last step cannot be deployed here: torch computes quantized layers in float, and graphs for"
            " GPUs were measured on the CPU. Add a stage that exports for this machine, such as onnx with"
            " target ort-cpu, and search again."
        )
    if not report["front"]:
        nearest = report["nearest"]
        sentences.append(
            "No trial meets the constraints."
            if nearest is None
            else f"No trial meets the constraints. The nearest is {nearest['name']}:"
            f" {_violation_text(nearest)}; {_parameters_text(nearest)}."
        )
        return sentences
    if any(point["test"] or point["test_error"] for point in report["front"]):
        failed_on_test = [point["name"] for point in report["front"] if point["passes_on_test"] is False]
        sentences.append(
            f"Trials were chosen on validation, where the best of {len(trials)} looks better than it is. The"
            " scores on test are without this bias for each trial; picking the best of them by test adds it"
            " again."
        )
        sentences += [
            f"{point['name']} was not scored on test: error[{error['code']}]: {error['message']}"
            for point in report["front"]
            if (error := point["test_error"])
        ]
        if failed_on_test:
            sentences.append(f"On test a constraint is violated by {', '.join(failed_on_test)}.")
    return sentences


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
    header = ["trial"]
    for metric in metrics:
        header += [f"{view.metric_label(metric)} val.", "test", "difference"]
    header += ["MB", "speed-up"]
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
        cpu_mark = " (CPU)" if latency.get("stable") is False else ""
        cells += [
            view.megabytes(point["size_bytes"]),
            f"{speed:.2f}×{cpu_mark}" if speed else view.MISSING_TEXT,
        ]
        rows.append(cells)
    return header, rows


def _difference_text(difference: Mapping[str, Any] | None, metric: str) -> str:
    if difference is None:
        return view.MISSING_TEXT
    score_difference = ScoreDifference.model_validate(difference)
    interval_text = view.difference_interval_text(score_difference, metric)
    return f"{view.difference_text(score_difference, metric)} {interval_text}".rstrip()


def _parameter_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the parameters of the front, with the importance of each parameter."""
    names = [point["name"] for point in report["front"]]
    header = ["parameter", *names, *(f"importance for {name}" for name in report["importances"])]
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
    return header, rows


def search_markdown(report: Mapping[str, Any]) -> str:
    """Return the report in GitHub's Markdown."""
    blocks = [Markdown("# Search of ") + Path(report["recipe"]).name, " ".join(_sentences(report))]
    if report["front"]:
        blocks += [Markdown("## Front"), markdown_table(*_front_table(report))]
        if any(point["recipe"] for point in report["front"]):
            blocks.append(Markdown(_RUN_TEXT))
    blocks += [Markdown("## Parameters"), markdown_table(*_parameter_table(report))]
    blocks += [Markdown("## Trials"), markdown_table(*_trials_table(report))]
    return str(Markdown("\n\n").join(blocks)) + "\n"


def search_html(report: Mapping[str, Any]) -> str:
    """Return the report as one HTML page without scripts."""
    import jinja2

    source = files("smelt.pipeline.search").joinpath("search.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    tables = [("Front", _front_table(report))] if report["front"] else []
    tables.append(("Parameters", _parameter_table(report)))
    tables.append(("Trials", _trials_table(report)))
    page: str = environment.from_string(source).render(
        title=Path(report["recipe"]).name,
        sentences=_sentences(report),
        tables=[(name, header, rows) for name, (header, rows) in tables],
        figures=_figures(report),
        how_to_run=_RUN_TEXT if any(point["recipe"] for point in report["front"]) else "",
        colors=css_colors,
    )
    return escape_controls(page)


def _trials_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    names = [objective["name"] for objective in report["objectives"]]
    header = ["trial", "status", *names, "seconds", "parameters"]
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
    return header, rows


def _objective_value(trial: Mapping[str, Any], name: str) -> float | None:
    value = trial["values"].get(name)
    return None if value is None else value / 1e6 if name in ("size", "memory") else float(value)


def _axis_title(name: str) -> str:
    return f"{name} ({_UNITS[name]})" if name in _UNITS else view.metric_label(name)


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return title and SVG element of Optuna's figures of the trials; none with fewer than two values.

    They are drawn with matplotlib: those of plotly need its 4 MB script in the page, or a connection.
    """
    from optuna.visualization import matplotlib as plots

    names = [_axis_title(objective["name"]) for objective in report["objectives"]]
    study = _plotted_study(report, names)
    completed_trials = [trial for trial in study.trials if trial.values is not None]
    feasible_values = [
        trial.values
        for trial in completed_trials
        if all(violation <= 0 for violation in trial.constraints.values())
    ]
    figures: dict[str, Callable[[], Any]] = {}
    if len(names) in (2, 3):
        figures["Trials and front"] = partial(plots.plot_pareto_front, study)
    if len(names) == 1:
        figures["History"] = partial(plots.plot_optimization_history, study, target_name=names[0])
    elif feasible_values:
        worst_values = [
            (min if objective["maximize"] else max)(column)
            for objective, column in zip(
                report["objectives"], zip(*feasible_values, strict=True), strict=True
            )
        ]
        figures["History"] = partial(plots.plot_hypervolume_history, study, worst_values)
    figures["Parameters of the trials"] = partial(plots.plot_parallel_coordinate, study, target_name=names[0])
    return [
        (title, page_svg(PageFigure(partial(_draw, plot), f"figure{number}", _WIDTH, _HEIGHT, title, {})))
        for number, (title, plot) in enumerate(figures.items() if len(completed_trials) > 1 else ())
    ]


def _draw(plot: Callable[[], Any], colors: Mapping[str, str]) -> Any:
    """Return the matplotlib Figure of a plot of Optuna, which has colors of its own."""
    from matplotlib import pyplot

    figure = plot().figure
    pyplot.close(figure)
    figure.axes[0].set_title("")  # the page has it
    figure.set_size_inches(_WIDTH / 72, _HEIGHT / 72)
    figure.set_layout_engine("tight")
    return figure


def _plotted_study(report: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return a study in memory with the values of the report; names: of the objectives.

    Trials without all values have failed in it, and so have numbers without a trial. The range of a parameter
    is that of its values.
    """
    import optuna

    trials = {trial["number"]: trial for trial in report["trials"]}
    used_parameters = {
        n: {name: trial["parameters"][name] for name in trial["used"]} for n, trial in trials.items()
    }
    distributions = {
        name: _range_of([values[name] for values in used_parameters.values() if name in values])
        for name in dict.fromkeys(name for values in used_parameters.values() for name in values)
    }
    direction = optuna.study.StudyDirection
    directions = [
        direction.MAXIMIZE if objective["maximize"] else direction.MINIMIZE
        for objective in report["objectives"]
    ]
    study = optuna.create_study(directions=directions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(names))
    for number in range(max(trials, default=-1) + 1):
        trial, parameters = (
            trials.get(number, {"values": {}, "violations": {}}),
            used_parameters.get(number, {}),
        )
        objective_values = [_objective_value(trial, objective["name"]) for objective in report["objectives"]]
        values = [value for value in objective_values if value is not None]
        is_complete = len(values) == len(objective_values)
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.COMPLETE if is_complete else optuna.trial.TrialState.FAIL,
                values=values if is_complete else None,
                params=parameters,
                distributions={name: distributions[name] for name in parameters},
                constraints=dict(trial["violations"]),
            )
        )
    return study


def _range_of(values: Sequence[Any]) -> Any:
    """Return the range of the values of a parameter as a distribution of Optuna."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if any(isinstance(value, bool | str) or value is None for value in values):
        return CategoricalDistribution(list(dict.fromkeys(values)))
    kind = IntDistribution if all(isinstance(value, int) for value in values) else FloatDistribution
    return kind(min(values), max(values))
