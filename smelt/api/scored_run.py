"""The run that made an artifact, and how it generated the texts that it scored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact
from smelt.core.files import load_json
from smelt.data.tasks import task_traits

REPORT_FILE = "report.json"


def find_run(given: Path, artifact: Artifact) -> tuple[Path, str] | None:
    """Return the folder of the run that made `artifact` and the step's name; None if unknown.

    Args:
        given: path from the user: a link in a run's `artifacts`, a folder of the store, or a copy.
        artifact: the artifact at this path.
    """
    path = given.absolute()
    if _step_keys(path.parent.parent).get(path.name) == artifact.key:
        return path.parent.parent, path.name
    store = artifact.path.parent.parent
    if not (store / "artifacts").is_dir() or artifact.path.name != artifact.key:
        return None
    from smelt.pipeline.execute.run_folder import list_runs

    for run in list_runs(store):
        for step, key in _step_keys(run.folder).items():
            if key == artifact.key:
                return run.folder, step
    return None


def _step_keys(run: Path) -> dict[str, str]:
    """Return the keys of a run's steps from its report."""
    try:
        report = load_json(run / REPORT_FILE)
        return {str(step["name"]): str(step["key"]) for step in report["steps"] if step["artifact"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def scored_generation(given: Path, artifact: Artifact) -> dict[str, Any]:
    """Return `score.generation` of the run that made `artifact`; empty if unknown, or nothing is generated.

    Args:
        given: path from the user, as in `find_run`.
        artifact: the artifact at this path.
    """
    if not task_traits(artifact.manifest.task).generates:
        return {}
    run = find_run(given, artifact)
    if run is None:
        return {}
    try:
        score = load_json(run[0] / REPORT_FILE)["recipe"].get("score") or {}
        return dict(score.get("generation") or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def generation_with(scored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `scored`, replaced by those of `given` that are set.

    If `given` chooses a search (`num_beams`, `do_sample`), nothing of another search is kept.
    """
    from smelt.generation.config import SEARCH_SETTINGS

    overrides = {name: value for name, value in given.items() if value is not None and value is not False}
    replaces_search = {"num_beams", "do_sample"} & overrides.keys()
    settings = {name: v for name, v in scored.items() if not (replaces_search and name in SEARCH_SETTINGS)}
    return settings | overrides
