"""Train a stage in several processes: `train_in_processes` starts them, and this module is their program.

The run stays one process. For a stage that trains it starts torch's launcher (torch.distributed.elastic, as
torchrun and accelerate do), which starts the processes. Each reads the recipe and the data again, checks that
it has the same step (by its key, which also contains the versions of libraries), and runs the stage with its
part of every batch. Process 0 writes the artifact and reports progress, in a file of JSON lines.

Started by torchrun or srun, process 0 runs the recipe, and the others serve its training stages
(`serve_training`): each starts one process per stage, on its own machine. The folders of recipe, data and
store must be the same on all machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smelt.core.artifact import Artifact, read_manifest
from smelt.core.errors import DEFAULT_CODE, InputError, RunError, SmeltError
from smelt.core.files import json_hash, read_json_object, write_json
from smelt.core.messages import Message, messages_to_json
from smelt.core.stage import Context
from smelt.core.store import StageCache, StepCheckpoints, Store, commit_cached_files, find_cached_files
from smelt.core.system import child_environment, python_command

if TYPE_CHECKING:
    from smelt.pipeline.execute.display import Display
    from smelt.pipeline.execute.step_runner import StepRunner
    from smelt.pipeline.plan.plan import Plan, PlanStep

_MODULE = "smelt.pipeline.execute.training_processes"
_POLL_SECONDS = 0.1
_STOP_SECONDS = 30.0  # for processes to end before they are killed
_LOG_LINES = 40  # of a process that died
_JOB, _EVENTS, _RESULT, _ERROR = "job.json", "events.jsonl", "result.json", "error-{}.json"
_DIED = "died.json"  # exit codes of processes by their number
_UNEXPECTED = "unexpected"  # the code of an error that is not smelt's


@dataclass(frozen=True)
class TrainingLaunch:
    """How the training stages of a run are started in several processes.

    plan: of the run. limit: of the run's samples. fold: number and count, of a run of a cross-validation.
    """

    plan: Plan
    limit: int | None = None
    fold: tuple[int, int] | None = None

    @property
    def several(self) -> bool:
        """Whether there are several processes."""
        return self.plan.recipe.launch.num_processes > 1 or external_processes() > 1

    @property
    def scores(self) -> bool:
        """Whether they also score quality."""
        return self.several and self.plan.recipe.launch.scoring

    def applies_to(self, step: PlanStep) -> bool:
        """Return whether `step` is trained in several processes."""
        from smelt.training.settings import TrainingSettings

        return self.several and isinstance(step.settings, TrainingSettings)

    def train(
        self,
        step: PlanStep,
        key: str,
        ancestors: Mapping[str, Artifact],
        store: Store,
        ctx: Context,
        log_line: Callable[[str], None],
    ) -> None:
        """Run the stage of `step` in several processes, as the stage itself would with `ctx`.

        Raises:
            SmeltError: the error of the process that failed first; `training-process-died` if it was killed.
        """
        job = {
            "step": step.name,
            "key": key,
            "ancestors": {name: str(artifact.path) for name, artifact in ancestors.items()},
            "out": str(ctx.out),
        }
        result = self._run(job, ctx.out.parent, store, ctx, log_line)
        ctx.details.update(result["details"])
        ctx.warnings.extend(Message(**found) for found in result["warnings"])

    def score(
        self,
        artifact: Artifact,
        split: str,
        score_limit: int | None,
        reference: Artifact | None,
        store: Store,
        display: Display,
    ) -> None:
        """Score `artifact` in several processes; its score is in the store afterwards.

        Raises:
            SmeltError: as `train`.
        """
        job = {
            "artifact": str(artifact.path),
            "split": split,
            "score_limit": score_limit,
            "reference": None if reference is None else str(reference.path),
        }
        with store.workspace() as space:
            self._run(job, space, store, display, display.log_line)

    def _run(
        self,
        job: Mapping[str, Any],
        space: Path,
        store: Store,
        events: Context | Display,
        log_line: Callable[[str], None],
    ) -> dict[str, Any]:
        """Start the processes of a job in the folder `space`, follow them, and return their result."""
        recipe = self.plan.recipe
        whole = {
            "recipe": self.plan.recipe_dict(),
            "path": str(self.plan.path.resolve()),
            "store": str(store.root),
            "limit": self.limit,
            "fold": self.fold,
            "device": recipe.device,
            "threads": recipe.threads,
            "pid": os.getpid(),
        }
        write_json(space / _JOB, whole | dict(job))
        external = external_processes()
        start = _start_external if external > 1 else _start_launcher
        with start(space, external or recipe.launch.num_processes, recipe.threads) as poll:
            _follow(space, poll, events)
        if not (space / _RESULT).is_file():
            for name, tail in _log_tails(space).items():
                log_line(f"{name}:\n{tail}")
            raise _first_error(space, str(job.get("step", "score")))
        return read_json_object(space / _RESULT)


def external_processes() -> int:
    """Return the number of processes if torchrun or srun started this one with others, else 0."""
    count = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 0)
    started = "MASTER_ADDR" in os.environ and ("RANK" in os.environ or "SLURM_PROCID" in os.environ)
    return count if started and count > 1 else 0


def external_rank() -> int:
    """Return the number of this process among those of torchrun or srun; 0 without others."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) if external_processes() else 0


def _follow(space: Path, poll: Callable[[], bool], target: Context | Display) -> None:
    """Pass the events of process 0 on to `target` until `poll` returns true: the processes have ended."""
    handlers: dict[str, Callable[..., None]] = {"progress": target.progress}
    if isinstance(target, Context):
        handlers |= {"log": target.log, "metrics": target.log_metrics}
    else:
        handlers["log"] = target.print_line
    path = space / _EVENTS
    path.touch()
    with path.open(encoding="utf-8") as file:
        ended, rest = False, ""
        while not ended:
            ended = poll()
            rest += file.read()
            *lines, rest = rest.split("\n")
            for line in lines:
                kind, *values = json.loads(line)
                handlers[kind](*values)
            if not ended:
                time.sleep(_POLL_SECONDS)


def _first_error(space: Path, step: str) -> SmeltError:
    """Return the error that ended the processes: one of smelt's, else that one was killed, else any other."""
    found = [read_json_object(path) for path in space.glob(_ERROR.format("*"))]
    found.sort(key=lambda error: (error["code"] == _UNEXPECTED, float(error["time"])))
    died = read_json_object(space / _DIED) if (space / _DIED).is_file() else {}
    # the launcher ends the others with SIGTERM, and they fail when one is gone
    killed = {rank: code for rank, code in died.items() if code < 0 and code != -signal.SIGTERM}
    if found and (found[0]["code"] != _UNEXPECTED or not killed):
        first = found[0]
        kind = InputError if first["exit_code"] == InputError.exit_code else RunError
        return kind(first["message"], code=first["code"], setting=first["setting"])
    how = ", ".join(f"process {rank} ended with {code}" for rank, code in (killed or died).items())
    return RunError(
        f"{step}: the processes of the training ended without a result ({how or 'their launcher failed'})."
        " -9 is usually a lack of memory: lower batch_size or num_processes. The run's log.txt has their"
        " output; the next run continues from the last checkpoint.",
        code="training-process-died",
    )


def _log_tails(space: Path) -> dict[str, str]:
    """Return the last lines that each process, and the launcher, wrote to standard error."""
    found = {}
    for path in sorted(space.rglob("*stderr*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LOG_LINES:]
        if lines:
            found[path.parent.name if path.parent != space else "launcher"] = "\n".join(lines)
    return found


def _environment(count: int, threads: int | None) -> dict[str, str]:
    share = max(1, len(os.sched_getaffinity(0)) // count) if hasattr(os, "sched_getaffinity") else 1
    return child_environment(OMP_NUM_THREADS=str(threads or share))


@contextlib.contextmanager
def _start_launcher(space: Path, count: int, threads: int | None) -> Iterator[Callable[[], bool]]:
    """Start `count` processes on this machine; yield a function that returns whether they have ended."""
    with (space / "stderr.log").open("wb") as log:
        process = subprocess.Popen(
            python_command("-m", _MODULE, "launch", str(space), str(count)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(count, threads),
        )
        try:
            yield lambda: process.poll() is not None
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _launch(space: Path, count: int) -> None:
    """Run `count` processes of the job in `space` with torch's launcher (the program `launch`)."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=space.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=_POLL_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(space / "logs"), redirects=Std.ALL),
    )
    command = python_command("-m", _MODULE, "train", str(space))
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        write_json(space / _DIED, {str(r): failure.exitcode for r, failure in error.failures.items()})
        sys.exit(1)


# One key of the store for each job; the other processes wait for it.
_JOB_KEY, _FAILED_KEY, _END_KEY = "smelt/job/{}", "smelt/failed/{}", "smelt/end/{}"
_COUNT_KEY, _LEFT_KEY, _FINISHED_KEY = "smelt/jobs", "smelt/left", "smelt/finished"
_HELLO_SECONDS, _CONNECT_SECONDS = 600.0, 600.0


@cache
def _key_value_store() -> Any:
    """Return the key-value store of all processes; torchrun hosts it, else process 0 does.

    Raises:
        InputError: the address does not answer.
    """
    import torch

    host, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT") or 29500)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return torch.distributed.TCPStore(
            host,
            port,
            is_master=external_rank() == 0 and not hosted,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT_SECONDS),
        )
    except (torch.distributed.DistError, OSError, ValueError) as error:
        raise InputError(
            f"MASTER_ADDR={host}, MASTER_PORT={port}: process 0 cannot be reached there"
            f" ({str(error).splitlines()[0]}). Set the address of its machine and a free port.",
            code="no-connection",
        ) from error


def _environment_of_rank(job: Mapping[str, Any], threads: int | None) -> dict[str, str]:
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    found = {name: os.environ.get(name) or os.environ.get(slurm, "0") for name, slurm in names.items()}
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or "1"
    return _environment(int(local), threads) | {
        **found,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_PORT": str(job["port"]),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


@contextlib.contextmanager
def _start_external(space: Path, count: int, threads: int | None) -> Iterator[Callable[[], bool]]:
    """Start process 0 of a job here, and have the other ranks start theirs; yield as `_start_launcher`."""
    store = _key_value_store()
    number = store.add(_COUNT_KEY, 1) - 1
    job = read_json_object(space / _JOB) | {"port": _free_port()}
    write_json(space / _JOB, job)
    store.set(_JOB_KEY.format(number), json.dumps(job))
    with _rank_process(space, job, threads) as process:

        def ended() -> bool:
            if store.check([_FAILED_KEY.format(number)]):
                error = json.loads(store.get(_FAILED_KEY.format(number)))
                write_json(space / _DIED, {str(error["rank"]): error["exit"]})
                if error["code"]:
                    write_json(space / _ERROR.format(error["rank"]), error)
                return True
            return process.poll() is not None

        try:
            yield ended
            if process.poll() and not (space / _DIED).is_file():
                write_json(space / _DIED, {"0": process.returncode})
        finally:
            store.set(_END_KEY.format(number), "ended")


@contextlib.contextmanager
def _rank_process(
    space: Path, job: Mapping[str, Any], threads: int | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start this rank's process of a job; it is stopped at the end of the context."""
    folder = space / "logs" / os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    folder.mkdir(parents=True)
    with (folder / "stderr.log").open("wb") as log:
        process = subprocess.Popen(
            python_command("-m", _MODULE, "train", str(space)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment_of_rank(job, threads),
        )
        try:
            yield process
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def serve_training(plan: Plan) -> None:
    """Train the stages of the run of process 0, until it ends (all other processes of torchrun or srun).

    Raises:
        InputError: process 0 cannot be reached.
    """
    from torch.distributed import DistError

    store, number = _key_value_store(), 0
    try:
        store.set(f"smelt/recipe/{external_rank()}", json_hash(plan.recipe_dict()))
        while True:
            while not store.check([_JOB_KEY.format(number)]):
                if store.check([_FINISHED_KEY]):
                    store.add(_LEFT_KEY, 1)
                    return
                time.sleep(_POLL_SECONDS)
            _serve_job(store, number)
            number += 1
    except DistError as error:
        raise RunError(
            "The connection to process 0 was lost: its run has ended, or was killed. See its log.txt.",
            code="no-connection",
        ) from error


def _serve_job(store: Any, number: int) -> None:
    """Start this rank's process of a job, and report if it fails."""
    job = json.loads(store.get(_JOB_KEY.format(number)))
    with tempfile.TemporaryDirectory(prefix="smelt-train-") as folder:
        space = Path(folder)
        write_json(space / _JOB, job)
        with _rank_process(space, job, job["threads"]) as process:
            while process.poll() is None and not store.check([_END_KEY.format(number)]):
                time.sleep(_POLL_SECONDS)
            ended = process.returncode
        if ended and not store.check([_END_KEY.format(number)]):
            path = space / _ERROR.format(external_rank())
            error = read_json_object(path) if path.is_file() else {"code": None}
            store.set(
                _FAILED_KEY.format(number), json.dumps(error | {"rank": external_rank(), "exit": ended})
            )


@contextlib.contextmanager
def external_run(plan: Plan) -> Iterator[None]:
    """Run a recipe as process 0 of several: the others are released at the end.

    Raises:
        InputError: a process does not answer, runs another recipe (`ranks-differ`), or was started in Python
            (`smelt.run` in each process).
    """
    if external_rank():
        raise InputError(
            "Several processes were started by torchrun or srun. Start `smelt run RECIPE` with it, or set"
            " launch: {num_processes: N}.",
            code="started-by-launcher",
        )
    store, own = _key_value_store(), json_hash(plan.recipe_dict())
    try:
        deadline = time.monotonic() + _HELLO_SECONDS
        for rank in range(1, external_processes()):
            key = f"smelt/recipe/{rank}"
            while not store.check([key]):
                if time.monotonic() > deadline:
                    raise InputError(
                        f"Process {rank} has not started within {_HELLO_SECONDS / 60:.0f} minutes. Start the"
                        " same command on all machines.",
                        code="no-connection",
                    )
                time.sleep(_POLL_SECONDS)
            if store.get(key).decode() != own:
                raise InputError(
                    f"Process {rank} runs another recipe than process 0. Give all the same recipe and"
                    " options.",
                    code="ranks-differ",
                )
        yield
    finally:
        store.set(_FINISHED_KEY, "yes")
        deadline = time.monotonic() + _STOP_SECONDS  # this process may host the key-value store
        while store.add(_LEFT_KEY, 0) < external_processes() - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


class _Events:
    """Writes the progress and the log of process 0 as JSON lines; the others write nothing."""

    def __init__(self, space: Path, writes: bool, pid: int) -> None:
        self._file = (space / _EVENTS).open("a", encoding="utf-8") if writes else None
        self._pid, self.log_path, self._last = pid, space / "log.txt", 0.0

    def progress(self, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if now - self._last >= _POLL_SECONDS or done == total:
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
    """Run one process of the job in `space` (the program `train`)."""
    from smelt.core.process_group import process_rank
    from smelt.training.processes import join_processes, leave_processes

    job = read_json_object(space / _JOB)
    rank = int(os.environ["RANK"])
    try:
        from smelt.runtimes.device import torch_device

        join_processes(torch_device(job["device"]))
        result = _run_job(job, space, rank)
        if process_rank() == 0:
            write_json(space / _RESULT, result)
        leave_processes()
    except Exception as error:
        traceback.print_exc()
        known = isinstance(error, SmeltError)
        write_json(
            space / _ERROR.format(rank),
            {
                "message": str(error) if known else f"process {rank}: {type(error).__name__}: {error}",
                "code": (getattr(error, "code", "") if known else _UNEXPECTED) or DEFAULT_CODE,
                "setting": getattr(error, "setting", None),
                "exit_code": getattr(error, "exit_code", 1),
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
    whole = plan.read_data()
    data = {name: limit_split(split, job["limit"]) for name, split in whole.items()}
    if job["fold"]:
        number, count = job["fold"]
        rest, held = divide_folds(data["train"], count, plan.recipe.seed)[number - 1]
        whole = data = data | {"train": rest, "test": held}
    events = _Events(space, rank == 0, job["pid"])
    store = Store(Path(job["store"]))
    scorer = recipe_scorer(plan.recipe, store)
    scorer = replace(scorer, metrics=resolve_task(plan, whole, scorer.metrics).metrics)
    if "artifact" in job:
        reference = None if job["reference"] is None else _artifact(job["reference"])
        split = limit_split(data[job["split"]], job["score_limit"])
        replace(scorer, reference=reference).score(_artifact(job["artifact"]), split, events.progress)
        return {}
    runner = recipe_step_runner(plan.recipe, store, data, scorer, cast(Any, events))
    ctx = _train_step(runner, plan, job, events, space)
    return {"details": ctx.details, "warnings": messages_to_json(ctx.warnings)}


def _artifact(folder: str) -> Artifact:
    return Artifact(Path(folder), read_manifest(Path(folder)))


def _train_step(
    runner: StepRunner, plan: Plan, job: Mapping[str, Any], events: _Events, space: Path
) -> Context:
    """Run the stage of `job`; return its context with details and warnings."""
    from smelt.core.process_group import gather_parts, process_rank
    from smelt.training.training_state import denormals_as_zero

    ancestors = {name: _artifact(folder) for name, folder in job["ancestors"].items()}
    step, rank, store = plan.step(job["step"]), process_rank(), runner.store
    keys = gather_parts(runner.step_key(step, ancestors))
    if wrong := [number for number, key in enumerate(keys) if key != job["key"]]:
        raise InputError(
            f"launch: process {wrong[0]} has another step '{step.name}' than the run: its recipe, data,"
            " device or versions of libraries differ. Give all machines the same files and packages.",
            code="ranks-differ",
        )
    out = Path(job["out"]) if rank == 0 else space / f"out-{rank}"
    out.mkdir(parents=True, exist_ok=True)
    cache = SharedStageCache(StageCache(store, runner.versions, events.print_line))
    ctx = replace(
        runner.context(step, ancestors, out, StepCheckpoints(store.root, job["key"])),
        launch=plan.recipe.launch,
        cached_value=cache.cached_value,
        cached_files=cache.cached_files,
        log_metrics=lambda metrics, update: events.write("metrics", metrics, update),
    )
    with denormals_as_zero():
        step.stage_class()(ancestors[step.parent], step.settings, ctx)
    return ctx


@dataclass(frozen=True)
class SharedStageCache:
    """The cache of a stage in several processes: process 0 reads and writes it, all compute."""

    cache: StageCache

    def cached_value(self, what: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which all processes compute, from the store if it is cached."""
        from smelt.core.process_group import from_first, process_rank

        store, key = self.cache.store, self.cache.value_key(what)
        found = from_first(lambda: store.read_score(key))
        if found is None:
            found = {"artifact": what.get("artifact"), "made": make()}
            if process_rank() == 0:
                store.write_score(key, found)
        return found["made"]

    @contextlib.contextmanager
    def cached_files(
        self, what: Mapping[str, Any], make: Callable[[Path], None]
    ) -> Iterator[tuple[Path, bool]]:
        """Yield the folder with the files of `make`, into which every process writes its part."""
        from smelt.core.process_group import from_first, process_rank, wait_for_all

        store, key = self.cache.store, self.cache.files_key(what)
        words, artifacts = str(what["what"]), list(what["artifacts"])
        intact = from_first(lambda: self.cache.find_intact(key, words) is not None)
        if not intact:
            with store.workspace() if process_rank() == 0 else contextlib.nullcontext(Path()) as space:
                folder = from_first(lambda: _made(space / "out"))
                make(folder)
                wait_for_all()  # all have written their part
                if process_rank() == 0:
                    commit_cached_files(store, folder, key, words, artifacts)
            wait_for_all()
        found = find_cached_files(store, key)
        assert found is not None
        yield found.path, intact


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    program, folder, *more = sys.argv[1:]
    if program == "launch":
        _launch(Path(folder), int(more[0]))
    else:
        _train(Path(folder))
