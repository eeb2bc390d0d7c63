"""A run's folder (recipe, links to the store, results of an earlier run), and the runs of a store.

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

from smelt.core.artifact import Artifact, broken_link_problem
from smelt.core.errors import InputError
from smelt.core.files import (
    json_hash,
    load_json,
    partial_files,
    read_hashed_json,
    write_atomically,
    write_hashed_json,
)
from smelt.core.locks import file_lock, heartbeat, is_active
from smelt.core.remote_store import RemoteStore, is_store_url, open_remote_store
from smelt.core.store import Store
from smelt.core.user_code import copy_user_code
from smelt.core.workspaces import OWNER_SUFFIX

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


def check_store(location: StorePlace | None) -> None:
    """Check that a remote store can be used; a folder is not checked.

    Raises:
        InputError: it cannot be used; as `open_remote_store`.
    """
    if isinstance(location, str):
        open_remote_store(location)


def open_store(
    location: StorePlace | None, folder: Path, cache: Path | None = None, push_checkpoints: bool = False
) -> tuple[Store, str]:
    """Return the store of a run in `folder`, and a note if it is a new one, or not that of an earlier run.

    Args:
        location: as given by the user; None: the default.
        folder: the run's folder.
        cache: local folder of a remote store; None: the default store.
        push_checkpoints: whether checkpoints are copied to the remote store.

    Raises:
        InputError: it cannot be used, or checkpoints are to be copied without a remote store.
    """
    if push_checkpoints and not isinstance(location, str):
        raise InputError(
            "--push-checkpoints: needs a bucket to copy checkpoints to. Set --store URL, such as"
            " s3://bucket/smelt.",
            code="no-remote-store",
        )
    if isinstance(location, Path):
        store = Store(location)
        return store, moved_run_text(folder, store.root)
    remote = None if location is None else open_remote_store(location)
    local_root, store_note = (cache, "") if cache else default_store(folder)
    store = _open_default_store(local_root, remote, folder)
    store.pushes_checkpoints = push_checkpoints
    return store, store_note if remote is not None else store_note or moved_run_text(folder, store.root)


def _open_default_store(local: Path, remote: RemoteStore | None, folder: Path) -> Store:
    """Return the default store `local`; an error names `--out` if the store is new, next to the run."""
    try:
        return Store(local, remote)
    except InputError as error:
        cause = error.__cause__
        if local.parent != folder.parent or local.is_dir() or not isinstance(cause, OSError):
            raise
        raise InputError(
            f"{folder.parent}: cannot be used for a run: {cause.strerror}. Choose another folder with --out.",
            code="unusable-folder",
        ) from error


def default_store(folder: Path) -> tuple[Path, str]:
    """Return the default store of a run in `folder`, and a note if that is a new one.

    The default is the nearest `.store` of the same user in a parent folder, else `.store` next to the run.
    """
    for parent in folder.parents:
        root = parent / ".store"
        if all((root / subfolder).is_dir() for subfolder in ("artifacts", "scores")) and _is_owned(root):
            return root, ""
    root = folder.parent / ".store"
    local = Path("runs", ".store").resolve()
    if not local.is_dir():
        return root, ""
    return root, (
        f"Using a new store in {root}; artifacts of runs in {local.parent} are not reused. To share them, use"
        f" --store {local}."
    )


def moved_run_text(folder: Path, store: Path) -> str:
    """Return a warning if the earlier run in `folder` links to a store that is missing, else "".

    store: of the next run, in which they may be.
    """
    for link in sorted((folder / "artifacts").glob("*")):
        stored = store / "artifacts" / Path(os.path.realpath(link)).name
        problem = broken_link_problem(link)
        if problem is not None and problem[0] == "moved-run" and not stored.is_dir():
            return f"{link}: {problem[1]}"
    return ""


def _is_owned(root: Path) -> bool:
    return not hasattr(os, "getuid") or root.stat().st_uid == os.getuid()


@contextmanager
def register_run(store: Path, folder: Path) -> Iterator[None]:
    """Register the run in `folder` with the store at `store`, as active until this context exits.

    In a store that cannot be written to no run is registered.
    """
    if not os.access(store / "tmp", os.W_OK):
        yield
        return
    record_path = store / "runs" / f"{json_hash(str(folder))[:32]}.json"
    record_path.parent.mkdir(exist_ok=True)
    with ExitStack() as stack:
        with cleaning_lock(store):  # waits until a running `smelt store clean` has finished
            if read_hashed_json(record_path) is None:
                write_hashed_json(record_path, {"folder": str(folder)})
            stack.enter_context(heartbeat(record_path.with_suffix(OWNER_SUFFIX)))
        yield


def run_folder_lock(folder: Path) -> AbstractContextManager[None]:
    """Return the lock of a run in `folder`; entering it raises `folder-in-use` if another run has it."""

    def refuse(holder: str) -> None:
        raise InputError(
            f"{folder}: {holder} is running in this folder. Choose another folder with --out, or wait.",
            code="folder-in-use",
            file=str(folder),
        )

    return file_lock(folder / ".lock", refuse)


def cleaning_lock(store: Path) -> AbstractContextManager[None]:
    """Return the lock that prevents runs from starting while the store at `store` is cleaned."""
    return file_lock(store / "locks" / "clean.lock")


def list_runs(store: Path) -> list[StoreRun]:
    """Return the known runs that use the store at `store`, sorted by folder."""
    folders = {path.parent.resolve() for path in store.parent.glob("*/artifacts") if path.is_dir()}
    active_folders = set()
    for record_path in sorted((store / "runs").glob("*.json")):
        if (record := read_hashed_json(record_path)) is None:
            continue  # see `damaged_run_records`
        folder = Path(record["folder"])
        folders.add(folder)
        marker = record_path.with_suffix(OWNER_SUFFIX)
        if marker.exists() and is_active(marker):
            active_folders.add(folder)
    runs = [StoreRun(folder, linked_keys(store, folder), folder in active_folders) for folder in folders]
    return sorted((run for run in runs if run.steps or run.busy), key=lambda run: str(run.folder))


def damaged_run_records(store: Path) -> list[Path]:
    """Return the records of runs that cannot be read, so that the folders of these runs are unknown."""
    return [note for note in sorted((store / "runs").glob("*.json")) if read_hashed_json(note) is None]


def linked_keys(store: Path, folder: Path) -> dict[str, str]:
    """Return the keys of the artifacts in `store` that a run links to, by step, including missing ones."""
    artifacts_folder = (store / "artifacts").resolve()
    keys = {}
    for link in sorted((folder / "artifacts").glob("*")):
        target = link.resolve()
        if link.is_symlink() and target.parent == artifacts_folder:
            keys[link.name] = target.name
    return keys


_LOG_FILE = "log.txt"
# Files of a run that was killed right after its start.
_INITIAL_FILES = {".lock", _LOG_FILE}


def require_run_folder(folder: Path) -> None:
    """Require that `folder` is empty or of a run, as a run removes and overwrites files in it.

    Raises:
        InputError: it is not (`not-a-run`).
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names - _INITIAL_FILES and not names >= {_LOG_FILE, "recipe.yaml"}:
        shown = ", ".join(sorted(names - _INITIAL_FILES)[:3])
        raise InputError(
            f"{folder}: not empty and not the folder of a run (contains {shown}). A run would overwrite its"
            " files. Choose another folder with --out.",
            code="not-a-run",
        )


@dataclass
class RunFolder:
    """The folder of one run. previous_keys: keys of an earlier run's artifacts that may be kept, by step."""

    path: Path
    previous_keys: dict[str, str] = field(default_factory=dict)

    @property
    def scores_folder(self) -> Path:
        """The folder of the statistics per sample, a file for each step."""
        from smelt.evaluate.report.schema import SCORES_FOLDER

        return self.path / SCORES_FOLDER

    def replaced_recipe(self, plan: Plan) -> str | None:
        """Return the name of another recipe whose report will be replaced; None if there is none."""
        try:
            name = load_json(self.path / "report.json")["recipe"]["name"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return name if isinstance(name, str) and name != plan.path.stem else None

    def prepare(self, plan: Plan, store: Path) -> None:
        """Remove an earlier run's report, unless it describes steps excluded by `--until`; write the recipe.

        The links of the earlier run are kept until this one has replaced them or has ended.

        Raises:
            OSError: the folder cannot be written to.
        """
        links = linked_keys(store, self.path) if plan.excluded_steps else {}
        self.previous_keys = {
            step.name: links[step.name] for step in plan.excluded_steps if step.name in links
        }
        for scores in self.scores_folder.glob("*.json.gz"):
            if scores.name.removesuffix(".json.gz") not in self.previous_keys:
                scores.unlink()
        if not self.previous_keys:  # else the report describes kept artifacts until this run replaces it
            from smelt.pipeline.execute.run_result import REPORT_FILES

            for name in REPORT_FILES:
                (self.path / name).unlink(missing_ok=True)
        for partial_path in partial_files(self.path):
            partial_path.unlink(missing_ok=True)  # left by a killed run; this run has the folder locked
        copy_user_code(plan.user_functions, plan.recipe.base, self.path)
        write_atomically(self.path / "recipe.yaml", plan.portable_recipe())

    def write_scores(self, name: str, score: Mapping[str, Any]) -> None:
        """Write the statistics per sample and the outputs of a scored step, for `smelt compare`."""
        values = {key: score[key] for key in ("statistics", "predictions", "labels") if key in score}
        content = gzip.compress(json.dumps(values, ensure_ascii=False).encode("utf-8"), mtime=0)
        write_atomically(self.scores_folder / f"{name}.json.gz", content)

    def link_artifact(self, name: str, artifact: Artifact) -> None:
        """Create the link `artifacts/NAME` to `artifact`, or replace it."""
        link = self.path / "artifacts" / name
        link.parent.mkdir(exist_ok=True)
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)
        new_link = link.with_name(f".{name}.part")
        new_link.unlink(missing_ok=True)
        os.symlink(os.path.relpath(artifact.path, link.parent), new_link)
        os.replace(new_link, link)

    def remove_old_links(self, names: Iterable[str]) -> None:
        """Remove the links of an earlier run except those of the steps `names` and of excluded steps."""
        linked_names = {*names, *self.previous_keys}
        artifacts = self.path / "artifacts"
        for link in artifacts.iterdir() if artifacts.is_dir() else ():
            if link.name not in linked_names:
                _remove(link)

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
        available, previous, stale_names = dict(done), dict[str, Artifact](), set[str]()
        for step in plan.excluded_steps:
            missing = [name for name in step.dependencies if name not in available]
            if missing:
                stale_names |= {step.name} if stale_names.intersection(missing) else set()
                continue
            artifact = None
            if shop.step_key(step, available) == self.previous_keys.get(step.name):
                artifact = _find_artifact(shop, self.previous_keys[step.name])
            if artifact is None:
                stale_names.add(step.name)
            else:
                available[step.name] = previous[step.name] = artifact
        for name in stale_names:
            self.previous_keys.pop(name, None)
            (self.path / "artifacts" / name).unlink(missing_ok=True)
            (self.scores_folder / f"{name}.json.gz").unlink(missing_ok=True)
        return previous


def _find_artifact(step_runner: StepRunner, key: str) -> Artifact | None:
    """Return the artifact; None if it is missing or damaged."""
    try:
        return step_runner.store.find(key)
    except InputError:
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
