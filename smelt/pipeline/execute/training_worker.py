"""The program of one process of a training stage, or of a scoring, in several processes.

It reads the recipe and the data again, checks that it has the same step as the run (by its key, which also
contains the versions of libraries), and runs the stage with its part of every batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smelt.core.artifact import Artifact, read_manifest
from smelt.core.errors import DEFAULT_CODE, InputError, SmeltError
from smelt.core.files import read_json_object, write_json
from smelt.core.messages import messages_to_json
from smelt.core.process_group import from_first, gather_parts, process_rank, wait_for_all
from smelt.core.remote_store import open_remote_store
from smelt.core.stage_cache import StageCache, commit_cached_files, find_cached_files
from smelt.core.store import StepCheckpoints, Store
from smelt.core.system import TERMINATED_EXIT_CODE, TerminatedError, sigterm_as_error
from smelt.pipeline.execute.display import explain_step_error
from smelt.stage import Context

if TYPE_CHECKING:
    from smelt.pipeline.execute.step_runner import StepRunner
    from smelt.pipeline.plan.plan import Plan

POLL_SECONDS = 0.1
JOB_FILE, EVENTS_FILE, RESULT_FILE, ERROR_FILE = "job.json", "events.jsonl", "result.json", "error-{}.json"
UNEXPECTED = "unexpected"  # the code of an error that is not smelt's
_SHORTAGES = {"out-of-memory", "disk-full", "file-too-large"}


class _Events:
    """Writes the progress and the log of process 0 as JSON lines; the others write nothing."""

    def __init__(self, space: Path, writes: bool, pid: int) -> None:
        self._file = (space / EVENTS_FILE).open("a", encoding="utf-8") if writes else None
        self._pid, self.log_path, self._last = pid, space / "log.txt", 0.0

    def progress(self, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if now - self._last >= POLL_SECONDS or done == total:
            self._last = now
            self._require_run()
            self.write("progress", done, total, note)

    def print_line(self, text: str, brief: bool = False) -> None:
        self.write("log", text)

    def write(self, *event: Any) -> None:
        if self._file is not None:
            self._file.write(f"{json.dumps(event)}\n")
            self._file.flush()

    def _require_run(self) -> None:
        """End if the run was killed: another one may train the same stage again."""
        if self._file is not None:
            try:
                os.kill(self._pid, 0)
            except ProcessLookupError:
                os.kill(os.getpid(), signal.SIGKILL)


def _train(space: Path) -> None:
    """Run one process of the job in `space`."""
    from smelt.training.processes import join_processes, leave_processes

    job = read_json_object(space / JOB_FILE)
    rank = int(os.environ["RANK"])
    try:
        from smelt.runtimes.device import torch_device

        with sigterm_as_error():
            join_processes(torch_device(job["device"]), job["strategy"])
            result = _run_job(job, space, rank)
            if process_rank() == 0:
                write_json(space / RESULT_FILE, result)
            leave_processes()
    except TerminatedError:
        os._exit(TERMINATED_EXIT_CODE)
    except Exception as error:
        traceback.print_exc()
        failure = explain_step_error(error, str(job.get("step", "score")), space, space / "log.txt")
        is_explained = isinstance(error, SmeltError) or failure.code in _SHORTAGES
        write_json(
            space / ERROR_FILE.format(rank),
            {
                "message": str(failure)
                if is_explained
                else f"process {rank}: {type(error).__name__}: {error}",
                "code": (failure.code if is_explained else UNEXPECTED) or DEFAULT_CODE,
                "setting": failure.setting if is_explained else None,
                "exit_code": failure.exit_code if is_explained else 1,
                "time": time.time(),
            },
        )
        sys.stderr.flush()
        os._exit(1)  # the library may wait for the other processes


def _run_job(job: Mapping[str, Any], space: Path, rank: int) -> dict[str, Any]:
    """Run the stage of `job` and return its details and warnings, or score its artifact."""
    from smelt.data.split_division import divide_folds, limit_split
    from smelt.pipeline.execute.step_runner import recipe_scorer, recipe_step_runner, resolve_task
    from smelt.pipeline.plan.load_plan import make_plan
    from smelt.pipeline.recipe.yaml_file import YamlDocument

    path = Path(job["path"])
    plan = make_plan(YamlDocument(str(path), job["recipe"]), path)
    full_data = plan.read_data()
    data = {name: limit_split(split, job["limit"]) for name, split in full_data.items()}
    if job["fold"]:
        number, count = job["fold"]
        train_split, test_split = divide_folds(data["train"], count, plan.recipe.seed)[number - 1]
        full_data = data = data | {"train": train_split, "test": test_split}
    events = _Events(space, rank == 0, job["pid"])
    url = job["checkpoint_store"]
    store = Store(Path(job["store"]), None if url is None or rank else open_remote_store(url))
    store.pushes_checkpoints = url is not None
    scorer = recipe_scorer(plan.recipe, store)
    scorer = replace(scorer, metrics=resolve_task(plan, full_data, scorer.metrics).metrics)
    if "artifact" in job:
        reference = None if job["reference"] is None else _artifact(job["reference"])
        split = limit_split(data[job["split"]], job["score_limit"])
        replace(scorer, reference=reference).score(_artifact(job["artifact"]), split, events.progress)
        return {}
    runner = recipe_step_runner(plan.recipe, store, data, scorer, cast("Any", events))
    ctx = _train_step(runner, plan, job, events, space)
    return {"details": ctx.details, "warnings": messages_to_json(ctx.warnings)}


def _artifact(folder: str) -> Artifact:
    return Artifact(Path(folder), read_manifest(Path(folder)))


def _train_step(
    runner: StepRunner, plan: Plan, job: Mapping[str, Any], events: _Events, space: Path
) -> Context:
    """Run the stage of `job`; return its context with details and warnings."""
    from smelt.training.training_state import denormals_as_zero

    ancestors = {name: _artifact(folder) for name, folder in job["ancestors"].items()}
    step, rank, store = plan.step(job["step"]), process_rank(), runner.store
    keys = gather_parts(runner.step_key(step, ancestors))
    if ranks := [number for number, key in enumerate(keys) if key != job["key"]]:
        raise InputError(
            f"launch: process {ranks[0]} has another step '{step.name}' than the run: its recipe, data,"
            " device or versions of libraries differ. Give all machines the same files and packages.",
            code="ranks-differ",
        )
    out = Path(job["out"]) if rank == 0 else space / f"out-{rank}"
    out.mkdir(parents=True, exist_ok=True)
    cache = SharedStageCache(StageCache(store, runner.versions, events.print_line))
    ctx = replace(
        runner.context(step, ancestors, out, StepCheckpoints(store, job["key"])),
        launch=plan.recipe.launch,
        cached_value=cache.cached_value,
        cached_files=cache.cached_files,
        log_metrics=lambda metrics, update: events.write("metrics", metrics, update),
    )
    if store.pushes_checkpoints:  # process 0 copies them, then all read them
        ctx = replace(ctx, next_checkpoint_folder=partial(_after_first, ctx.next_checkpoint_folder))
    with denormals_as_zero():
        step.stage_class()(ancestors[step.parent], step.settings, ctx)
    return ctx


@dataclass(frozen=True)
class SharedStageCache:
    """The cache of a stage in several processes: process 0 reads and writes it, all compute."""

    cache: StageCache

    def cached_value(self, what: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which all processes compute, from the store if it is cached."""
        store, key = self.cache.store, self.cache.value_key(what)
        entry = from_first(lambda: store.read_score(key))
        if entry is None:
            entry = {"artifact": what.get("artifact"), "made": make()}
            if process_rank() == 0:
                store.write_score(key, entry)
        return entry["made"]

    @contextlib.contextmanager
    def cached_files(
        self, what: Mapping[str, Any], make: Callable[[Path], None]
    ) -> Iterator[tuple[Path, bool]]:
        """Yield the folder with the files of `make`, into which every process writes its part."""
        store, key = self.cache.store, self.cache.files_key(what)
        description, artifacts = str(what["what"]), list(what["artifacts"])
        intact = from_first(lambda: self.cache.find_intact(key, description) is not None)
        if not intact:
            with store.workspace() if process_rank() == 0 else contextlib.nullcontext(Path()) as space:
                folder = from_first(lambda: _made(space / "out"))
                make(folder)
                wait_for_all()  # all have written their part
                if process_rank() == 0:
                    commit_cached_files(store, folder, key, description, artifacts)
            wait_for_all()
        cached = find_cached_files(store, key)
        assert cached is not None
        yield cached.path, intact


def _after_first(next_folder: Callable[[], Path | None]) -> Path | None:

    folder = next_folder()
    wait_for_all()
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
