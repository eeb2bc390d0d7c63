"""A run's folder: its recipe, its links to the store, and results of an earlier run.

A run with `--until` runs a part of the recipe. Artifacts of the other steps from an earlier run in the same
folder are kept if they still match the recipe, and are marked in the report. Their links protect them from
`smelt store clean`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import load_json, partial_files, write_atomically
from smelt.execute.store_runs import linked_keys

if TYPE_CHECKING:
    from smelt.execute.step_runner import StepRunner
    from smelt.planning.plan import Plan

_LOG_FILE = "log.txt"
# Files of a run that was killed right after its start.
_INITIAL_FILES = {".lock", _LOG_FILE}
_REPORT_FILES = ("report.json", "report.md", "report.html")


def require_run_folder(folder: Path) -> None:
    """Require that `folder` is empty or of a run, as a run removes and overwrites files in it.

    Raises:
        InputError: it is not (`not-a-run`).
    """
    there = {place.name for place in folder.iterdir()} if folder.is_dir() else set()
    if there - _INITIAL_FILES and not there >= {_LOG_FILE, "recipe.yaml"}:
        some = ", ".join(sorted(there - _INITIAL_FILES)[:3])
        raise InputError(
            f"{folder}: not empty and not the folder of a run (contains {some}). A run would overwrite its"
            " files. Choose another folder with --out.",
            code="not-a-run",
        )


@dataclass
class RunFolder:
    """The folder of one run. previous_keys: keys of an earlier run's artifacts that may be kept, by step."""

    path: Path
    previous_keys: dict[str, str] = field(default_factory=dict)

    def replaced_recipe(self, plan: Plan) -> str | None:
        """Return the name of another recipe whose report will be replaced; None if there is none."""
        try:
            name = load_json(self.path / "report.json")["recipe"]["name"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return name if isinstance(name, str) and name != plan.path.stem else None

    def prepare(self, plan: Plan, store: Path) -> None:
        """Remove links of earlier runs, except those of steps excluded by `--until`; write the recipe.

        Raises:
            OSError: the folder cannot be written to.
        """
        links = linked_keys(store, self.path) if plan.excluded_steps else {}
        self.previous_keys = {
            step.name: links[step.name] for step in plan.excluded_steps if step.name in links
        }
        artifacts = self.path / "artifacts"
        for place in artifacts.iterdir() if artifacts.is_dir() else ():
            if place.name not in self.previous_keys:
                _remove(place)
        if not self.previous_keys:  # else the report describes kept artifacts until this run replaces it
            for name in _REPORT_FILES:
                (self.path / name).unlink(missing_ok=True)
        for part in partial_files(self.path):
            part.unlink(missing_ok=True)  # left by a killed run; this run has the folder locked
        write_atomically(self.path / "recipe.yaml", plan.text)

    def link_artifact(self, name: str, artifact: Artifact) -> None:
        """Create the link `artifacts/NAME` to `artifact`."""
        link = self.path / "artifacts" / name
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        os.symlink(os.path.relpath(artifact.path, link.parent), link)

    def keep_previous(
        self, plan: Plan, shop: StepRunner, done: Mapping[str, Artifact]
    ) -> dict[str, Artifact]:
        """Return an earlier run's artifacts of excluded steps that still match the recipe, by step.

        Links to other artifacts are removed. A link is also kept if its step cannot be checked because a step
        that it depends on failed in this run.

        Args:
            plan: plan of this run.
            shop: step runner of this run.
            done: artifacts of this run, by step.
        """
        known, kept, stale = dict(done), dict[str, Artifact](), set[str]()
        for step in plan.excluded_steps:
            missing = [name for name in step.dependencies if name not in known]
            if missing:
                stale |= {step.name} if stale.intersection(missing) else set()
                continue
            found = None
            if shop.step_key(step, known) == self.previous_keys.get(step.name):
                found = _find_artifact(shop, self.previous_keys[step.name])
            if found is None:
                stale.add(step.name)
            else:
                known[step.name] = kept[step.name] = found
        self._remove_links(stale & self.previous_keys.keys())
        return kept

    def _remove_links(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / "artifacts" / name).unlink(missing_ok=True)


def _find_artifact(step_runner: StepRunner, key: str) -> Artifact | None:
    """Return the artifact; None if it is missing or damaged."""
    try:
        return step_runner.store.find(key)
    except InputError:
        return None


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink()
