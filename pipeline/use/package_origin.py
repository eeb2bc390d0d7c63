"""What a package tells of its artifact beyond the artifact's own folder: read from the run that made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, read_manifest
from smelt.core.errors import InputError
from smelt.core.files import load_json
from smelt.core.messages import Message, warning

if TYPE_CHECKING:
    from smelt.evaluate.report.schema import Quality, Report, Tested
    from smelt.evaluate.report.schema import Step as ReportStep
    from smelt.export.package.form import Origin, Score, Step

_REPORT = "report.json"
_ROOT = "model"


def run_of(given: Path, artifact: Artifact) -> tuple[Path, str] | None:
    """Return the folder of the run that made `artifact`, and its step there; None where it is not known.

    Args:
        given: as the user named the artifact: a link in a run's `artifacts`, a folder of the store, or one
            that was copied away.
        artifact: what is there.
    """
    from smelt.execute.store_runs import runs_of

    place = given.absolute()
    if _steps_in(place.parent.parent).get(place.name) == artifact.key:
        return place.parent.parent, place.name
    store = artifact.path.parent.parent
    if not (store / "artifacts").is_dir() or artifact.path.name != artifact.key:
        return None
    for run in runs_of(store):
        for step, key in _steps_in(run.folder).items():
            if key == artifact.key:
                return run.folder, step
    return None


def artifacts_of(run: Path) -> dict[str, Artifact]:
    """Return the artifacts of a run by their steps; what is gone or damaged is left out."""
    found = {}
    for place in sorted((run / "artifacts").glob("*")):
        try:
            found[place.name] = Artifact(place.resolve(), read_manifest(place.resolve()))
        except InputError:
            continue
    return found


def origin_of(artifact: Artifact, run: Path | None, step: str) -> Origin:
    """Return what the run in the folder `run` holds of `artifact`, which is its `step`."""
    from smelt.evaluate.report.schema import validate_report
    from smelt.evaluate.report.view import model_name
    from smelt.export.package.form import Origin

    if run is None:
        return Origin(licence=_licence(artifact.manifest.details))
    try:
        report = validate_report(load_json(run / _REPORT))
    except (InputError, OSError, ValueError, RecursionError):
        return Origin(licence=_licence(artifact.manifest.details))
    root = artifacts_of(run).get(_ROOT)
    tested = any(found.test for found in report.steps if found.name == step)
    split = "test" if tested else report.judged_on
    return Origin(
        run=str(report.recipe.get("name") or run.name),
        model=model_name(report),
        licence=None if root is None else _licence(root.manifest.details),
        steps=tuple(_steps(report, step)),
        scores=tuple(_scores(report, step)),
        times=tuple(_times(report, step)),
        data=_data(report, split),
        split=split,
        doubts=tuple(_doubts(report, step)),
        generation=dict((report.recipe.get("score") or {}).get("generation") or {}),
    )


def _doubts(report: Report, step: str) -> Iterator[Message]:
    """Yield the limits that the step does not keep, or perhaps does not, and that the run was a trial."""
    from smelt.evaluate.report.headline import lines
    from smelt.evaluate.report.notes import gate_text, gate_value, verdict

    found = next(found for found in report.steps if found.name == step)
    for gate in found.gates:
        if gate.passed is not True or gate.undecided:
            read = f": {gate_value(gate)}" if gate.value is not None else ""
            yield warning("gate-not-kept", f"its gate {gate_text(gate)} is {verdict(gate)}{read}")
    for gate in found.test.gates if found.test else ():
        if gate.passed is False:
            text = f"its gate {gate_text(gate)} is not kept on test: {gate_value(gate)}"
            yield warning("gate-not-kept-on-test", text)
    if report.recipe.get("limit") is not None:
        yield from (warning("scored-on-few-rows", text) for text in lines(report)[:1])


def _steps_in(run: Path) -> dict[str, str]:
    """Return the keys of a run's steps, as its report has them."""
    try:
        report = load_json(run / _REPORT)
        return {str(step["name"]): str(step["key"]) for step in report["steps"] if step["artifact"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _licence(details: Mapping[str, Any]) -> str | None:
    said = details.get("licence")
    return said if isinstance(said, str) else None


def _steps(report: Report, step: str) -> list[Step]:
    """Return the way from the model to `step`, with the settings that the recipe names."""
    from smelt.export.package.form import Step

    named = {found.name: found for found in report.steps}
    way: list[Step] = []
    at: str | None = step
    while at is not None:
        found = named[at]
        way.append(Step(found.name, found.stage, _said(report, found.name)))
        at = found.parent
    return way[::-1]


def _said(report: Report, step: str) -> Mapping[str, Any]:
    """Return the settings of a step that the recipe names."""
    from smelt.evaluate.report.schema import ENTRY_KEYS

    for said in report.recipe.get("stages") or ():
        entry = {said: {}} if isinstance(said, str) else said
        word = next((key for key in entry if key not in ENTRY_KEYS), "")
        if entry.get("name", word) == step:
            return dict(entry[word] or {})
    return {}


def _scores(report: Report, step: str) -> list[Score]:
    from smelt.evaluate.report.view import digits, label
    from smelt.export.package.form import Score

    found = next(found for found in report.steps if found.name == step)
    own = (found.test or found).quality
    base = {} if report.base is None or report.baseline == step else _counterpart(report.base, found).quality

    def text(metric: str, found: Quality) -> str:
        n = digits(metric)
        ends = f" [{found.ci95[0]:.{n}f}, {found.ci95[1]:.{n}f}]" if found.ci95 else ""
        return f"{found.value:.{n}f}{ends}"

    return [
        Score(
            label(metric),
            text(metric, found),
            text(metric, base[metric]) if metric in base else None,
            found.n,
            found.signature,
            metric,
            found.value,
        )
        for metric, found in own.items()
    ]


def _counterpart(base: ReportStep, found: ReportStep) -> ReportStep | Tested:
    """Return the scores of the baseline on the rows that `found` tells of."""
    return base.test if found.test is not None and base.test is not None else base


def _data(report: Report, split: str) -> str | None:
    """Return what the recipe names for the split that is scored; None where it names nothing by a word."""
    said = (report.recipe.get("data") or {}).get(split)
    said = said.get("path") or said.get("hub") if isinstance(said, dict) else said
    return said if isinstance(said, str) else None


def _times(report: Report, step: str) -> list[str]:
    """Return a line for each batch size that was timed."""
    from smelt.evaluate.report.view import hardware

    lines = []
    for row in next(found for found in report.steps if found.name == step).latency:
        said = f"{row.p50_ms:.3g} ms (median) at batch {row.batch_size}, threads: {row.threads or 'all'}"
        if row.stable and row.speedup and row.speedup_ci95 and step != report.baseline:
            low, high = row.speedup_ci95
            said += f": {row.speedup:.2f} times as fast as {report.baseline} [{low:.2f}, {high:.2f}]"
        said += (
            "" if row.stable is not False else " (other work disturbed it, so that it may be faster alone)"
        )
        lines.append(f"{said}; {hardware(report)}")
    return lines
