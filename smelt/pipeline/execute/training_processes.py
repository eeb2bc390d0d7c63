"""Train a stage in several processes: `TrainingLaunch` starts them.

The run stays one process. For a stage that trains it starts torch's launcher (torch.distributed.elastic, as
torchrun and accelerate do; this module is its program), which starts the processes
(smelt.pipeline.execute.training_worker). Process 0 writes the artifact, and reports progress in a file of
JSON lines.

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
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, RunError, SmeltError
from smelt.core.files import json_hash, read_json_object, write_json
from smelt.core.messages import Message
from smelt.core.store import Store
from smelt.core.system import child_environment, python_command
from smelt.core.workspaces import temporary_workspace
from smelt.data.split_division import limit_split
from smelt.pipeline.execute import training_worker
from smelt.pipeline.execute.training_worker import (
    ERROR_FILE,
    EVENTS_FILE,
    JOB_FILE,
    POLL_SECONDS,
    RESULT_FILE,
    UNEXPECTED,
)
from smelt.stage import Context
from smelt.training.processes import (
    external_processes,
    external_rank,
    launcher_number,
    slurm_tasks_on_node,
)

if TYPE_CHECKING:
    from smelt.data.splits import Split
    from smelt.pipeline.execute.display import Display
    from smelt.pipeline.execute.scoring import Scorer
    from smelt.pipeline.plan.plan import Plan, PlanStep

_MODULE = "smelt.pipeline.execute.training_processes"
_WORKER_MODULE = training_worker.__name__
_STOP_SECONDS = 30.0  # for processes to end before they are killed
_LOG_LINES = 40  # of a process that died
_DIED = "died.json"  # exit codes of processes by their number


@dataclass(frozen=True)
class TrainingLaunch:
    """How the training stages of a run are started in several processes.

    plan: of the run. limit: of the run's samples. fold: number and count, of a run of a cross-validation.
    threads: of each process that this machine starts; None: those of the recipe, else a share of its cores.
    """

    plan: Plan
    limit: int | None = None
    fold: tuple[int, int] | None = None
    threads: int | None = None

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
        ctx.warnings.extend(Message(**message) for message in result["warnings"])

    def score(
        self,
        scorer: Scorer,
        artifact: Artifact,
        data: Mapping[str, Split],
        split_name: str,
        limit: int | None,
        display: Display,
    ) -> dict[str, Any]:
        """Return the score of an artifact, computed in several processes with `launch.scoring`.

        Args:
            scorer: of the run, with the reference that the artifact is compared with.
            artifact: what is scored.
            data: the splits of the run.
            split_name: name of the split.
            limit: score at most this many samples.
            display: shows the progress.

        Raises:
            SmeltError: as `train`.
        """
        split = limit_split(data[split_name], limit)
        if self.scores and scorer.cached_score(artifact, split) is None:
            job = {
                "artifact": str(artifact.path),
                "split": split_name,
                "score_limit": limit,
                "reference": None if scorer.reference is None else str(scorer.reference.path),
            }
            with scorer.store.workspace() as space:
                self._run(job, space, scorer.store, display, display.log_line)
        return scorer.score(artifact, split, display.progress)

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
        launch_config = {
            "recipe": self.plan.recipe_dict(),
            "path": str(self.plan.path.resolve()),
            "store": str(store.root),
            "checkpoint_store": store.remote.url if store.pushes_checkpoints and store.remote else None,
            "limit": self.limit,
            "fold": self.fold,
            "device": recipe.device,
            "strategy": recipe.launch.strategy,
            "threads": recipe.threads,
            "pid": os.getpid(),
        }
        write_json(space / JOB_FILE, launch_config | dict(job))
        external = external_processes()
        start = _start_external if external > 1 else _start_launcher
        threads = self.threads or recipe.threads
        with start(space, external or recipe.launch.num_processes, threads) as poll:
            _follow(space, poll, events)
        if not (space / RESULT_FILE).is_file():
            for name, tail in _log_tails(space).items():
                log_line(f"{name}:\n{tail}")
            raise _first_error(space, str(job.get("step", "score")))
        return read_json_object(space / RESULT_FILE)


def use_all_cores() -> None:
    """Remove torchrun's limit of one thread, before torch is imported: process 0 also does all other work.

    The processes that train get their share (`_environment`).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]


def _follow(space: Path, poll: Callable[[], bool], target: Context | Display) -> None:
    """Pass the events of process 0 on to `target` until `poll` returns true: the processes have ended."""
    handlers: dict[str, Callable[..., None]] = {"progress": target.progress}
    if isinstance(target, Context):
        handlers |= {"log": target.log, "metrics": target.log_metrics}
    else:
        handlers["log"] = target.print_line
    path = space / EVENTS_FILE
    path.touch()
    with path.open(encoding="utf-8") as file:
        is_finished, partial_line = False, ""
        while not is_finished:
            is_finished = poll()
            partial_line += file.read()
            *lines, partial_line = partial_line.split("\n")
            for line in lines:
                kind, *values = json.loads(line)
                handlers[kind](*values)
            if not is_finished:
                time.sleep(POLL_SECONDS)


def _first_error(space: Path, step: str) -> SmeltError:
    """Return the error that ended the processes: one of smelt's, else that one was killed, else any other."""
    errors = [read_json_object(path) for path in space.glob(ERROR_FILE.format("*"))]
    errors.sort(key=lambda error: (error["code"] == UNEXPECTED, float(error["time"])))
    died = read_json_object(space / _DIED) if (space / _DIED).is_file() else {}
    # the launcher ends the others with SIGTERM, and they fail when one is gone
    killed = {rank: code for rank, code in died.items() if code < 0 and code != -signal.SIGTERM}
    if errors and (errors[0]["code"] != UNEXPECTED or not killed):
        first_error = errors[0]
        kind = InputError if first_error["exit_code"] == InputError.exit_code else RunError
        return kind(first_error["message"], code=first_error["code"], setting=first_error["setting"])
    exits = ", ".join(f"process {rank} ended with {code}" for rank, code in (killed or died).items())
    return RunError(
        f"{step}: the processes of the training ended without a result ({exits or 'their launcher failed'})."
        " -9 is usually a lack of memory: lower batch_size or num_processes. The run's log.txt has their"
        " output; the next run continues from the last checkpoint.",
        code="training-process-died",
    )


def _log_tails(space: Path) -> dict[str, str]:
    """Return the last lines that each process, and the launcher, wrote to standard error."""
    tails = {}
    for path in sorted(space.rglob("*stderr*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LOG_LINES:]
        if lines:
            tails[path.parent.name if path.parent != space else "launcher"] = "\n".join(lines)
    return tails


def _environment(count: int, threads: int | None) -> dict[str, str]:
    """Return the environment of one of `count` processes on this machine."""
    share = max(1, len(os.sched_getaffinity(0)) // count) if hasattr(os, "sched_getaffinity") else 1
    if (
        limit := os.environ.get("OMP_NUM_THREADS", "")
    ).isdecimal() and "TORCHELASTIC_RUN_ID" not in os.environ:
        share = max(1, min(share, int(limit)))  # torchrun sets 1 itself
    return child_environment(OMP_NUM_THREADS=str(threads or share))


@contextlib.contextmanager
def _start_launcher(space: Path, count: int, threads: int | None) -> Iterator[Callable[[], bool]]:
    """Start `count` processes on this machine; yield a function that returns whether they have ended."""
    with (space / "stderr.log").open("wb") as log:
        process = subprocess.Popen(
            python_command("-m", _MODULE, str(space), str(count)),
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
    """Run `count` processes of the job in `space` with torch's launcher."""
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
        local_addr="localhost",  # the name of this machine may not resolve
        max_restarts=0,
        monitor_interval=POLL_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(space / "logs"), redirects=Std.ALL),
    )
    command = python_command("-m", _WORKER_MODULE, str(space))
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        write_json(space / _DIED, {str(r): failure.exitcode for r, failure in error.failures.items()})
        sys.exit(1)


# One key of the store for each job; the other processes wait for it.
_JOB_KEY, _FAILED_KEY, _END_KEY = "smelt/job/{}", "smelt/failed/{}/{}", "smelt/end/{}"
_SETTLE_SECONDS = 2.0  # after the first failure: a process that lost its connection reports before the cause
_COUNT_KEY, _LEFT_KEY, _FINISHED_KEY = "smelt/jobs", "smelt/left", "smelt/finished"
_HELLO_SECONDS, _CONNECT_SECONDS, _SILENT_SECONDS = 600.0, 600.0, 20.0


@cache
def _key_value_store() -> Any:
    """Return the key-value store of all processes; torchrun hosts it, else process 0 does.

    Raises:
        InputError: the address does not answer.
    """
    import torch

    host, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT") or "29500"
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return torch.distributed.TCPStore(
            host,
            int(port),
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
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    variables = {name: str(launcher_number(name, slurm)) for name, slurm in names.items()}
    local = launcher_number("LOCAL_WORLD_SIZE") or slurm_tasks_on_node()
    if "RANK" not in os.environ:  # srun gives each process its own processors
        threads = threads or launcher_number("SLURM_CPUS_PER_TASK") or None
    return _environment(local, threads) | {
        **variables,
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_PORT": str(job["port"]),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


@contextlib.contextmanager
def _start_external(space: Path, count: int, threads: int | None) -> Iterator[Callable[[], bool]]:
    """Start process 0 of a job here, and have the other ranks start theirs; yield as `_start_launcher`."""
    store = _key_value_store()
    number = store.add(_COUNT_KEY, 1) - 1
    job = read_json_object(space / JOB_FILE) | {"port": _free_port()}
    write_json(space / JOB_FILE, job)
    store.set(_JOB_KEY.format(number), json.dumps(job))
    with _rank_process(space, external_rank(), _environment_of_rank(job, threads)) as process:
        keys = {rank: _FAILED_KEY.format(number, rank) for rank in range(1, count)}

        def failed() -> list[int]:
            return [rank for rank, key in keys.items() if store.check([key])]

        try:
            yield lambda: process.poll() is not None or bool(failed())
            if process.poll() or failed():
                time.sleep(_SETTLE_SECONDS)
                _write_failures(
                    space, process.poll(), {rank: json.loads(store.get(keys[rank])) for rank in failed()}
                )
        finally:
            store.set(_END_KEY.format(number), "ended")


def _write_failures(space: Path, own_exit: int | None, failures: Mapping[int, Mapping[str, Any]]) -> None:
    """Write the failures of the processes of a job as their launcher would."""
    exit_codes = {str(rank): failure["exit"] for rank, failure in failures.items()}
    write_json(space / _DIED, exit_codes | ({"0": own_exit} if own_exit else {}))
    for rank, failure in failures.items():
        if failure["code"]:
            write_json(space / ERROR_FILE.format(rank), failure)
        folder = space / "logs" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stderr.log").write_text(failure["output"], encoding="utf-8")


@contextlib.contextmanager
def _rank_process(
    space: Path, rank: int, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start process `rank` of the job in `space`; it is stopped at the end of the context."""
    folder = space / "logs" / str(rank)
    folder.mkdir(parents=True)
    with (folder / "stderr.log").open("wb") as log:
        process = subprocess.Popen(
            python_command("-m", _WORKER_MODULE, str(space)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
        try:
            yield process
        finally:
            _stop(process)


def _run_rank(
    space: Path,
    job: Mapping[str, Any],
    rank: int,
    environment: Mapping[str, str],
    has_ended: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Run process `rank` of a job in the folder `space`, until it ends or `has_ended` returns true.

    Returns:
        How it failed: its error, `exit` code and `output`; None if it did not, or the job has ended.
    """
    write_json(space / JOB_FILE, job)
    with _rank_process(space, rank, environment) as process:
        while process.poll() is None and not has_ended():
            time.sleep(POLL_SECONDS)
        code = process.returncode
    if not code or has_ended():
        return None
    path = space / ERROR_FILE.format(rank)
    error = read_json_object(path) if path.is_file() else {"code": None}
    return error | {"exit": code, "output": "\n".join(_log_tails(space).values())}


def _free_port() -> int:
    """Return a port of this machine on which nothing listens."""
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
                time.sleep(POLL_SECONDS)
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
    with temporary_workspace() as folder:
        failure = _run_rank(
            folder,
            job,
            external_rank(),
            _environment_of_rank(job, job["threads"]),
            lambda: bool(store.check([_END_KEY.format(number)])),
        )
        if failure is not None:
            store.set(_FAILED_KEY.format(number, external_rank()), json.dumps(failure))


@contextlib.contextmanager
def external_run(plan: Plan, log: Callable[[str], None]) -> Iterator[None]:
    """Run a recipe as process 0 of several: the others are released at the end.

    log: prints a line, where a process is waited for.

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
    store, recipe_hash = _key_value_store(), json_hash(plan.recipe_dict())
    try:
        deadline = time.monotonic() + _HELLO_SECONDS
        for rank in range(1, external_processes()):
            key, next_notice = f"smelt/recipe/{rank}", time.monotonic() + _SILENT_SECONDS
            while not store.check([key]):
                if time.monotonic() > next_notice:
                    log(f"waiting for process {rank} of {external_processes()} (torchrun or srun)")
                    next_notice = deadline
                if time.monotonic() > deadline:
                    raise InputError(
                        f"Process {rank} has not started within {_HELLO_SECONDS / 60:.0f} minutes. Start the"
                        " same command on all machines.",
                        code="no-connection",
                    )
                time.sleep(POLL_SECONDS)
            if store.get(key).decode() != recipe_hash:
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
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    _launch(Path(sys.argv[1]), int(sys.argv[2]))
