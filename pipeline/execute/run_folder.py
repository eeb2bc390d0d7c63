"""A run's folder: its recipe, its links into the store, and what an earlier run left there.

A run with `--until` does a part of the recipe. What an earlier run in the same folder did of the rest stays,
as long as it is what the recipe still asks for, and is marked in the report: its link keeps `smelt store
clean` from removing it.
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
from smelt.core.files import load_json, unfinished_in, write_atomically
from smelt.execute.store_runs import linked_keys

if TYPE_CHECKING:
    from smelt.execute.steps import Workshop
    from smelt.planning.plan import Plan

_LOG = "log.txt"
# What a run that was killed at its very beginning leaves.
_AT_FIRST = {".lock", _LOG}
_REPORTS = ("report.json", "report.md", "report.html")


def require_runs_folder(folder: Path) -> None:
    """Require that `folder` is a run's, or new: a run removes and overwrites files in it.

    Raises:
        InputError: `not-a-run`.
    """
    there = {place.name for place in folder.iterdir()} if folder.is_dir() else set()
    if there - _AT_FIRST and not there >= {_LOG, "recipe.yaml"}:
        some = ", ".join(sorted(there - _AT_FIRST)[:3])
        raise InputError(
            f"{folder}: not the folder of a run, and not empty (it has {some}): a run would write over what"
            " is there. Give another one with --out.",
            code="not-a-run",
        )


@dataclass
class RunFolder:
    """The folder of one run. earlier: key of what an earlier run left, by step, that may stay."""

    path: Path
    earlier: dict[str, str] = field(default_factory=dict)

    def replaced(self, plan: Plan) -> str | None:
        """Return the name of the recipe whose report is to be replaced; None of none, and of the same."""
        try:
            name = load_json(self.path / "report.json")["recipe"]["name"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return name if isinstance(name, str) and name != plan.path.stem else None

    def begin(self, plan: Plan, store: Path) -> None:
        """Remove what earlier runs left, but what `--until` leaves out; write the recipe.

        Raises:
            OSError: the folder cannot be written to.
        """
        links = linked_keys(store, self.path) if plan.rest else {}
        self.earlier = {step.name: links[step.name] for step in plan.rest if step.name in links}
        artifacts = self.path / "artifacts"
        for place in artifacts.iterdir() if artifacts.is_dir() else ():
            if place.name not in self.earlier:
                _remove(place)
        if not self.earlier:  # otherwise it tells of what stays, until this run's takes its place
            for name in _REPORTS:
                (self.path / name).unlink(missing_ok=True)
        for part in unfinished_in(self.path):
            part.unlink(missing_ok=True)  # of a run that was killed: this one has the folder alone
        write_atomically(self.path / "recipe.yaml", plan.text)

    def link(self, name: str, artifact: Artifact) -> None:
        """Make `artifacts/NAME` lead to `artifact`."""
        link = self.path / "artifacts" / name
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        os.symlink(os.path.relpath(artifact.path, link.parent), link)

    def keep(self, plan: Plan, shop: Workshop, done: Mapping[str, Artifact]) -> dict[str, Artifact]:
        """Return what an earlier run did of the steps that are left out and the recipe still asks for.

        Links to what it does not ask for any more are removed; what cannot be told stays, because a step
        that it stands on has failed in this run.

        Args:
            plan: what this run does.
            shop: computes keys and knows the store.
            done: the artifacts of this run, by step.
        """
        known, kept, stale = dict(done), dict[str, Artifact](), set[str]()
        for step in plan.rest:
            missing = [name for name in step.stands_on if name not in known]
            if missing:
                stale |= {step.name} if stale.intersection(missing) else set()
                continue
            found = None
            if shop.key(step, known) == self.earlier.get(step.name):
                found = _find(shop, self.earlier[step.name])
            if found is None:
                stale.add(step.name)
            else:
                known[step.name] = kept[step.name] = found
        self._unlink(stale & self.earlier.keys())
        return kept

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / "artifacts" / name).unlink(missing_ok=True)


def _find(shop: Workshop, key: str) -> Artifact | None:
    """Return the artifact; None where it is gone or damaged, which is no matter of this run."""
    try:
        return shop.store.find(key)
    except InputError:
        return None


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink()
