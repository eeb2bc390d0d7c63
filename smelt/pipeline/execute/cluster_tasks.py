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
from smelt.core.errors import RunError, SmeltError
from smelt.core.locks import MachineTurns, current_owner
from smelt.core.messages import Message
from smelt.core.process_group import ShardEnd, in_shard
from smelt.core.store import Store
from smelt.core.system import package_versions
from smelt.data.split_division import limit_split
from smelt.data.splits import Split
from smelt.evaluate.environment import cpu_model
from smelt.pipeline.execute.display import Display, explain_step_error, unexpected_traceback
from smelt.pipeline.execute.latency_scores import LatencyScores
from smelt.pipeline.execute.ray_cluster import TaskNeeds, open_node_store
from smelt.pipeline.execute.reserved_nodes import (
    LOST,
    RETRIES,
    ReservedNodes,
    crash_errors,
    lost_error,
    reserve_nodes,
)
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
        place = store.root if store.remote is None else store.remote
        raise RunError(
            f"{place}: an artifact that another machine has made is not there ({key[:12]}). Use a store that"
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
    """A running task on a node: its store, data and display. nodes: of a step in several processes."""

    job: ClusterJob
    data: Mapping[str, Split]
    name: str
    nodes: ReservedNodes | None = None

    def __post_init__(self) -> None:
        if self.job.folder.is_dir():
            os.chdir(self.job.folder)
        self.display = _TaskDisplay(self.job.label, self.job.log, self.job.quiet)
        self.display.start_work(self.name)
        self.warnings: list[Message] = []
        self.store = open_node_store(self.job.store_root, self.job.store_url, self.warnings.append)
        self.turns = cluster_turns(self.store)
        self.scorer = replace(self.job.scorer, store=self.store, reference_cache={})
        launch = cast(TrainingLaunch, self.job.step_runner.launch)
        self.step_runner = replace(
            self.job.step_runner,
            store=self.store,
            data=self.data,
            display=self.display,
            validation_scorer=self.scorer,
            versions=package_versions(KEY_LIBRARIES),
            launch=replace(launch, start=None if self.nodes is None else self.nodes.start_ranks),
        )

    def score(
        self, artifact: Artifact, split: str, limit: int | None, reference: str | None
    ) -> dict[str, Any]:
        """Score an artifact, with `launch.scoring` on all nodes. reference: key of the compared one."""
        self.display.start_work(f"{self.name}, scoring")
        compute = partial(self.compute_score, artifact, split, limit, reference)
        with self.store.lock(f"{artifact.key}-score", self._report_wait):
            if self.nodes is None or not self.job.plan.recipe.launch.scoring:
                return compute()
            shard = (self.name, artifact.key, split, limit, reference, current_owner().kernel)
            return cast(dict[str, Any], self.nodes.score(compute, _score_shard, *shard))

    def compute_score(
        self, artifact: Artifact, split: str, limit: int | None, reference: str | None
    ) -> dict[str, Any]:
        """Compute the score of an artifact, or the share of a shard; see `score`."""
        scorer = self.scorer
        if reference == artifact.key:
            scorer = replace(scorer, reference=artifact)
        elif reference is not None:
            scorer = replace(scorer, reference=require_artifact(self.store, reference))
        return scorer.score(artifact, limit_split(self.data[split], limit), self.display.progress)

    def _report_wait(self, holder: str) -> None:
        self.display.print_line(f"waits for {holder}, which is measuring")


def _run_task(
    job: ClusterJob,
    data: Mapping[str, Split],
    name: str,
    work: Callable[[_Task, TaskOutcome], Any],
    measures: bool = False,
    nodes: ReservedNodes | None = None,
    part_of: str | None = None,
) -> tuple[TaskOutcome, Any]:
    """Run the work of a task; return its outcome, in which errors are explained, and the work's result.

    Args:
        job: of the run.
        data: the splits.
        name: of the step.
        work: gets the task and the outcome to complete.
        measures: whether the work measures latency, so that other tasks of this machine must wait.
        nodes: of a step in several processes.
        part_of: the machine (`current_owner().kernel`) whose task waits for this one. There it takes no turn:
            a measurement may keep it from starting, and waits for that task.
    """
    from smelt.core.errors import rust_panics_as_errors
    from smelt.training.training_state import denormals_as_zero

    outcome = TaskOutcome(node=f"{_node_name()} ({cpu_model()})")
    started, result, task = time.monotonic(), None, None
    try:
        with ExitStack() as stack:
            stack.enter_context(rust_panics_as_errors())
            if any(step.needs & {"train", "unlabeled", "calibration"} for step in job.plan.steps):
                stack.enter_context(denormals_as_zero())
            task = _Task(job, data, name, nodes)
            report = partial(task.display.print_line, brief=True)
            if part_of is None or part_of != current_owner().kernel:
                stack.enter_context(task.turns.measurement(report) if measures else task.turns.step(report))
            started = time.monotonic()
            result = work(task, outcome)
    except Exception as error:
        outcome.error = explain_step_error(error, name, job.store_root, job.log)
        outcome.lines += unexpected_traceback(error).splitlines()
    outcome.seconds = time.monotonic() - started
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
    nodes: ReservedNodes | None = None,
) -> tuple[TaskOutcome, dict[str, Any] | None]:
    """Build and score a step; nothing if a step that it needs has failed."""

    def work(task: _Task, outcome: TaskOutcome) -> dict[str, Any] | None:
        keys = {each: found.key for each, found in zip(names, ancestors, strict=True)}
        above = {each: require_artifact(task.store, str(key)) for each, key in keys.items()}
        step = job.plan.step(name)
        artifact, outcome.cached = task.step_runner.run_step(step, above, rebuild)
        outcome.key = artifact.key
        details = artifact.manifest.details
        outcome.unscored = unscored_reason(artifact.format, details.get("target"), details.get("dtype"))
        if split is None or outcome.unscored or details.get("untrained"):
            return None
        outcome.reference = artifact.key if is_reference else reference.key if reference else None
        return task.score(artifact, split, limit, outcome.reference)

    if any(each.key is None for each in ancestors):
        return TaskOutcome(error=RunError("a step that it needs has failed", code="step-unreached")), None
    return _run_task(job, data, name, work, nodes=nodes)


def run_on_reserved_nodes(
    references: list[Any], work: Callable[..., Any], needs: TaskNeeds, group: str, *arguments: Any
) -> Any:
    """Return the result of `work` in a task that has reserved nodes; with others if one dies.

    Args:
        references: of the run's job and data, the first arguments of `work`.
        work: called with them, `arguments` and the nodes.
        needs: of each process.
        group: name of what is reserved.
        arguments: of `work`.
    """
    import ray

    job: ClusterJob = ray.get(references[0])
    found: Any = None
    for attempt in range(RETRIES + 1):
        count = job.plan.recipe.launch.num_processes
        with reserve_nodes(f"{group}-{attempt}", count, needs, references) as nodes:
            task = ray.remote(work).options(**nodes.options(0), max_retries=0)
            try:
                found = ray.get(task.remote(*references, *arguments, nodes=nodes))
            except crash_errors() as error:
                failed = TaskOutcome(error=lost_error(error))
                found = failed if work is score_task else (failed, None)
        outcome: TaskOutcome = found[0] if isinstance(found, tuple) else found
        if outcome.error is None or outcome.error.code != LOST:
            break
    return found


def score_task(
    job: ClusterJob,
    data: Mapping[str, Split],
    name: str,
    key: str,
    split: str,
    limit: int | None,
    reference: str | None,
    nodes: ReservedNodes | None = None,
) -> TaskOutcome:
    """Score an artifact of the store."""

    def work(task: _Task, outcome: TaskOutcome) -> None:
        outcome.result = task.score(require_artifact(task.store, key), split, limit, reference)

    return _run_task(job, data, name, work, nodes=nodes)[0]


def _score_shard(
    job: ClusterJob,
    data: Mapping[str, Split],
    name: str,
    key: str,
    split: str,
    limit: int | None,
    reference: str | None,
    machine: str,
    *shard: Any,
) -> tuple[list[Any] | None, SmeltError | None]:
    """Return the parts of a shard of a score (arguments of `in_shard`), or its error.

    machine: of the task that waits for the shard.
    """

    def work(task: _Task, outcome: TaskOutcome) -> list[Any] | None:
        artifact = require_artifact(task.store, key)
        try:
            with in_shard(*shard):
                task.compute_score(artifact, split, limit, reference)
        except ShardEnd as end:
            return end.parts
        return None

    outcome, parts = _run_task(job, data, name, work, part_of=machine)
    return parts, outcome.error


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
