"""The tasks of a run on the nodes of a Ray cluster (`ClusterRun` starts them).

A task finds its inputs in the store and leaves its result there. Its errors are part of its outcome.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from smelt.core.artifact import Artifact
from smelt.core.errors import RunError, SmeltError, rust_panics_as_errors
from smelt.core.locks import MachineTurns
from smelt.core.messages import Message
from smelt.core.store import Store
from smelt.core.system import package_versions
from smelt.data.splits import Split
from smelt.evaluate.environment import cpu_model
from smelt.pipeline.execute.display import Display, explain_step_error, unexpected_traceback
from smelt.pipeline.execute.latency_scores import LatencyScores
from smelt.pipeline.execute.ray_cluster import open_node_store
from smelt.pipeline.execute.scoring import Scorer
from smelt.pipeline.execute.step_runner import KEY_LIBRARIES, StepRunner
from smelt.pipeline.execute.training_processes import TrainingLaunch
from smelt.pipeline.inspect.machine import unscored_reason
from smelt.pipeline.plan.plan import Plan


@dataclass(frozen=True)
class ClusterJob:
    """What all tasks of a run need, with the data in Ray's object store.

    step_runner: without store, data and display. folder: the driver's current folder, to which paths may be
    relative. log: of the run, which messages name.
    """

    plan: Plan
    step_runner: StepRunner
    scorer: Scorer
    store_root: Path
    store_url: str | None
    folder: Path
    log: Path
    quiet: bool
    label: str


@dataclass
class TaskOutcome:
    """What a task did.

    key: of its artifact; None if it failed. seconds: without the time in Ray's queue. unscored: why the
    artifact cannot be scored on the node. reference: key of the artifact that the score compares with. lines:
    for the run's log. warnings: of the store. result: of a measurement. node: name and processor.
    """

    key: str | None = None
    cached: bool = False
    seconds: float = 0.0
    unscored: str | None = None
    reference: str | None = None
    error: SmeltError | None = None
    lines: list[str] = field(default_factory=list)
    warnings: list[Message] = field(default_factory=list)
    result: Any = None
    node: str = ""


def cluster_turns(store: Store) -> MachineTurns:
    """Return the turns of steps and measurements of all processes of a machine that use a store."""
    return MachineTurns(store.root / "locks" / "turns")


def require_artifact(store: Store, key: str) -> Artifact:
    """Return an artifact that another machine has made.

    Raises:
        RunError: the store does not have it (`store-not-shared`).
    """
    artifact = store.find(key)
    if artifact is None:
        source = store.root if store.remote is None else store.remote
        raise RunError(
            f"{source}: an artifact that another machine has made is not there ({key[:12]}). Use a store that"
            " all machines share; see the warnings about it.",
            code="store-not-shared",
        )
    return artifact


class _TaskDisplay(Display):
    """Prints the lines of a task, which Ray forwards to the driver, and keeps the log for the outcome."""

    def __init__(self, label: str, log: Path, quiet: bool) -> None:
        self.lines: list[str] = []
        super().__init__(quiet=quiet, label=label)
        self.log_path = log

    def _write(self, text: str) -> None:
        self.lines.append(text.rstrip("\n"))


@dataclass
class _Task:
    """A running task on a node: its store, data and display."""

    job: ClusterJob
    data: Mapping[str, Split]
    name: str

    def __post_init__(self) -> None:
        if self.job.folder.is_dir():
            os.chdir(self.job.folder)
        self.display = _TaskDisplay(self.job.label, self.job.log, self.job.quiet)
        self.display.start_work(self.name)
        self.warnings: list[Message] = []
        self.store = open_node_store(self.job.store_root, self.job.store_url, self.warnings.append)
        self.turns = cluster_turns(self.store)
        self.scorer = replace(self.job.scorer, store=self.store, reference_cache={})
        self.step_runner = replace(
            self.job.step_runner,
            store=self.store,
            data=self.data,
            display=self.display,
            validation_scorer=self.scorer,
            versions=package_versions(KEY_LIBRARIES),
        )

    def score(
        self, artifact: Artifact, split: str, limit: int | None, reference: str | None
    ) -> dict[str, Any]:
        """Score an artifact. reference: key of the artifact that it is compared with."""
        self.display.start_work(f"{self.name}, scoring")
        scorer = self.scorer
        if reference == artifact.key:
            scorer = replace(scorer, reference=artifact)
        elif reference is not None:
            scorer = replace(scorer, reference=require_artifact(self.store, reference))
        launch = cast("TrainingLaunch", self.job.step_runner.launch)
        with self.store.lock(f"{artifact.key}-score", self._report_wait):
            return launch.score(scorer, artifact, self.data, split, limit, self.display)

    def _report_wait(self, holder: str) -> None:
        self.display.print_line(f"waits for {holder}, which is measuring")


def _run_task(
    job: ClusterJob,
    data: Mapping[str, Split],
    name: str,
    work: Callable[[_Task, TaskOutcome], Any],
    measures: bool = False,
) -> tuple[TaskOutcome, Any]:
    """Run the work of a task; return its outcome, in which errors are explained, and the work's result.

    Args:
        job: of the run.
        data: the splits.
        name: of the step.
        work: gets the task and the outcome to complete.
        measures: whether the work measures latency, so that other tasks of this machine must wait.
    """
    from smelt.training.training_state import denormals_as_zero

    outcome = TaskOutcome(node=f"{_node_name()} ({cpu_model()})")
    start_time, result, task = time.monotonic(), None, None
    try:
        with ExitStack() as stack:
            stack.enter_context(rust_panics_as_errors())
            if any(step.needs & {"train", "unlabeled", "calibration"} for step in job.plan.steps):
                stack.enter_context(denormals_as_zero())
            task = _Task(job, data, name)
            report = partial(task.display.print_line, brief=True)
            stack.enter_context(task.turns.measurement(report) if measures else task.turns.step(report))
            start_time = time.monotonic()
            result = work(task, outcome)
    except Exception as error:
        outcome.error = explain_step_error(error, name, job.store_root, job.log)
        outcome.lines += unexpected_traceback(error).splitlines()
    outcome.seconds = time.monotonic() - start_time
    if task is not None:
        task.display.close()
        outcome.lines[:0] = task.display.lines
        outcome.warnings += task.warnings
    return outcome, result


def _node_name() -> str:
    import ray

    return f"node {ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]


def run_step_task(
    job: ClusterJob,
    data: Mapping[str, Split],
    name: str,
    rebuild: bool,
    split: str | None,
    limit: int | None,
    reference: TaskOutcome | None,
    is_reference: bool,
    names: list[str],
    *ancestors: TaskOutcome,
) -> tuple[TaskOutcome, dict[str, Any] | None]:
    """Build and score a step; nothing if a step that it needs has failed."""

    def work(task: _Task, outcome: TaskOutcome) -> dict[str, Any] | None:
        keys = {ancestor_name: ancestor.key for ancestor_name, ancestor in zip(names, ancestors, strict=True)}
        ancestor_artifacts = {
            ancestor_name: require_artifact(task.store, str(key)) for ancestor_name, key in keys.items()
        }
        step = job.plan.step(name)
        artifact, outcome.cached = task.step_runner.run_step(step, ancestor_artifacts, rebuild)
        outcome.key = artifact.key
        details = artifact.manifest.details
        outcome.unscored = unscored_reason(artifact.format, details.get("target"), details.get("dtype"))
        if split is None or outcome.unscored or details.get("untrained"):
            return None
        outcome.reference = artifact.key if is_reference else reference.key if reference else None
        return task.score(artifact, split, limit, outcome.reference)

    if any(ancestor.key is None for ancestor in ancestors):
        return TaskOutcome(error=RunError("a step that it needs has failed", code="step-unreached")), None
    return _run_task(job, data, name, work)


def score_task(
    job: ClusterJob,
    data: Mapping[str, Split],
    name: str,
    key: str,
    split: str,
    limit: int | None,
    reference: str | None,
) -> TaskOutcome:
    """Score an artifact of the store."""

    def work(task: _Task, outcome: TaskOutcome) -> None:
        outcome.result = task.score(require_artifact(task.store, key), split, limit, reference)

    return _run_task(job, data, name, work)[0]


def latency_task(
    job: ClusterJob,
    data: Mapping[str, Split],
    keys: Mapping[str, str],
    baseline: str,
    fresh: bool,
    known_alone: frozenset[str],
    seconds: float,
) -> TaskOutcome:
    """Measure the latency of artifacts of the store."""

    def work(task: _Task, outcome: TaskOutcome) -> None:
        artifacts = {name: require_artifact(task.store, key) for name, key in keys.items()}
        scores = LatencyScores(task.store, job.plan.recipe, data["test"])
        outcome.result = scores.measure(
            artifacts, baseline, task.display.progress, fresh, known_alone, seconds=seconds
        )

    return _run_task(job, data, "latency", work, measures=True)[0]
