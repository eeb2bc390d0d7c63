"""A run's folder (recipe, links to the store, results of an earlier run), and the runs that use a store.

A run with `--until` runs a part of the recipe. Artifacts of the other steps from an earlier run in the same
folder are kept if they still match the recipe, and are marked in the report. Their links protect them from
`smelt store clean`.

A run uses the artifacts that its `artifacts` folder links to. So that `smelt store` can identify unused
files, runs next to the store are found by their folders, all others by a record in the store,
`runs/HASH.json`; a marker next to it shows an active run.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import json_hash, load_json, partial_files, write_atomically, write_json
from smelt.core.locks import file_lock, heartbeat, is_active
from smelt.core.remote_store import is_store_url, open_remote_store
from smelt.core.store import OWNER_SUFFIX, Store
from smelt.evaluate.report.chart import CHART_FILES
from smelt.evaluate.report.schema import SCORES_FOLDER

if TYPE_CHECKING:
    from smelt.pipeline.execute.step_runner import StepRunner
    from smelt.pipeline.plan.plan import Plan


@dataclass(frozen=True)
class StoreRun:
    """A run that uses the store.

    folder: the run's folder. steps: keys of its linked artifacts by step name. busy: whether it is active.
    """

    folder: Path
    steps: dict[str, str]
    busy: bool


StorePlace = Path | str
"""A folder, or the URL of a remote store as text."""


def store_place(text: str | Path) -> StorePlace:
    """Return the value of `--store` as a folder or URL."""
    return text if isinstance(text, str) and is_store_url(text) else Path(text)


def check_store(place: StorePlace | None) -> None:
    """Check that a remote store can be used; a folder is not checked.

    Raises:
        InputError: it cannot be used; as `open_remote_store`.
    """
    if isinstance(place, str):
        open_remote_store(place)


def open_store(place: StorePlace | None, folder: Path, cache: Path | None = None) -> tuple[Store, str]:
    """Return the store of a run in `folder`, and a note if it is a new one.

    Args:
        place: as given by the user; None: the default.
        folder: the run's folder.
        cache: local folder of a remote store; None: the default store.

    Raises:
        InputError: it cannot be used.
    """
    if isinstance(place, Path):
        return Store(place), ""
    remote = None if place is None else open_remote_store(place)
    local, note = (cache, "") if cache else default_store(folder)
    return Store(local, remote), note


def default_store(folder: Path) -> tuple[Path, str]:
    """Return the default store of a run in `folder`, and a note if that is a new one.

    The default is the nearest `.store` of the same user in a parent folder, else `.store` next to the run.
    """
    for above in folder.parents:
        root = above / ".store"
        if all((root / part).is_dir() for part in ("artifacts", "scores")) and _is_owned(root):
            return root, ""
    root = folder.parent / ".store"
    usual = Path("runs", ".store").resolve()
    if not usual.is_dir():
        return root, ""
    return root, (
        f"Using a new store in {root}; artifacts of runs in {usual.parent} are not reused. To share them, use"
        f" --store {usual}."
    )


def _is_owned(root: Path) -> bool:
    return not hasattr(os, "getuid") or root.stat().st_uid == os.getuid()


@contextmanager
def register_run(store: Path, folder: Path) -> Iterator[None]:
    """Register the run in `folder` with the store at `store`, as active until this context exits."""
    note = _run_record(store, folder)
    note.parent.mkdir(exist_ok=True)
    with ExitStack() as stack:
        with cleaning_lock(store):  # waits until a running `smelt store clean` has finished
            if not note.is_file():
                write_json(note, {"folder": str(folder)})
            stack.enter_context(heartbeat(note.with_suffix(OWNER_SUFFIX)))
        yield


def cleaning_lock(store: Path) -> AbstractContextManager[None]:
    """Return the lock that prevents runs from starting while the store at `store` is cleaned."""
    return file_lock(store / "locks" / "clean.lock")


def list_runs(store: Path) -> list[StoreRun]:
    """Return the known runs that use the store at `store`, sorted by folder."""
    folders = {path.parent.resolve() for path in store.parent.glob("*/artifacts") if path.is_dir()}
    busy = set()
    for note in sorted((store / "runs").glob("*.json")):
        folder = _recorded_folder(note)
        if folder is None:
            continue
        folders.add(folder)
        marker = note.with_suffix(OWNER_SUFFIX)
        if marker.exists() and is_active(marker):
            busy.add(folder)
    runs = [StoreRun(folder, linked_keys(store, folder), folder in busy) for folder in folders]
    return sorted((run for run in runs if run.steps or run.busy), key=lambda run: str(run.folder))


def _run_record(store: Path, folder: Path) -> Path:
    return store / "runs" / f"{json_hash(str(folder))[:32]}.json"


def _recorded_folder(note: Path) -> Path | None:
    try:
        value = load_json(note)
        return Path(value["folder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def linked_keys(store: Path, folder: Path) -> dict[str, str]:
    """Return the keys of the artifacts in `store` that a run links to, by step, including missing ones."""
    place = (store / "artifacts").resolve()
    found = {}
    for link in sorted((folder / "artifacts").glob("*")):
        target = link.resolve()
        if link.is_symlink() and target.parent == place:
            found[link.name] = target.name
    return found


_LOG_FILE = "log.txt"
# Files of a run that was killed right after its start.
_INITIAL_FILES = {".lock", _LOG_FILE}
_REPORT_FILES = ("report.json", "report.md", "report.html", "report.csv", *CHART_FILES)


def require_run_folder(folder: Path) -> None:
    """Require that `folder` is empty or of a run, as a run removes and overwrites files in it.

    Raises:
        InputError: it is not (`not-a-run`).
    """
    names = {place.name for place in folder.iterdir()} if folder.is_dir() else set()
    if names - _INITIAL_FILES and not names >= {_LOG_FILE, "recipe.yaml"}:
        some = ", ".join(sorted(names - _INITIAL_FILES)[:3])
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
        for scores in (self.path / SCORES_FOLDER).glob("*.json.gz"):
            if scores.name.removesuffix(".json.gz") not in self.previous_keys:
                scores.unlink()
        if not self.previous_keys:  # else the report describes kept artifacts until this run replaces it
            for name in _REPORT_FILES:
                (self.path / name).unlink(missing_ok=True)
        for part in partial_files(self.path):
            part.unlink(missing_ok=True)  # left by a killed run; this run has the folder locked
        write_atomically(self.path / "recipe.yaml", plan.text)

    def write_scores(self, name: str, score: Mapping[str, Any]) -> None:
        """Write the statistics per sample and the outputs of a scored step, for `smelt compare`."""
        kept = {key: score[key] for key in ("statistics", "predictions", "labels") if key in score}
        content = gzip.compress(json.dumps(kept, ensure_ascii=False).encode("utf-8"), mtime=0)
        write_atomically(self.path / SCORES_FOLDER / f"{name}.json.gz", content)

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
        for name in stale:
            (self.path / SCORES_FOLDER / f"{name}.json.gz").unlink(missing_ok=True)
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
