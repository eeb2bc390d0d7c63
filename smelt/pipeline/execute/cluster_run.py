"""The steps of one run as tasks of a Ray cluster.

The driver plans, imports the model and writes the report. Each step is a task that builds the step's
artifact and scores it; it starts when the steps that it needs are done, so branches of the plan run at once.
Scores of other artifacts and the latency of all artifacts are tasks too. A task finds its inputs in the store
and leaves its result there: if a node dies, Ray runs the task again elsewhere, and a driver that is started
again finds what is finished.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smelt.core.artifact import Artifact
from smelt.core.errors import RunError, SmeltError
from smelt.core.files import json_hash
from smelt.core.messages import Message, info
from smelt.core.store import Store
from smelt.data.split_division import limit_split
from smelt.data.splits import CUSTOM_TASK, Split
from smelt.evaluate.environment import cpu_model
from smelt.evaluate.metrics import is_own_metric
from smelt.pipeline.execute.display import Display
from smelt.pipeline.execute.failures import explain_step_error, unexpected_traceback
from smelt.pipeline.execute.latency_scores import LatencyScores
from smelt.pipeline.execute.machine_turns import MachineTurns
from smelt.pipeline.execute.ray_cluster import RayCluster, open_node_store
from smelt.pipeline.execute.scoring import Scorer, library_versions
from smelt.pipeline.execute.step_runner import KEY_LIBRARIES, StepRunner
from smelt.pipeline.inspect.machine import unscored_reason
from smelt.pipeline.plan.plan import Plan, PlanStep
from smelt.pipeline.recipe.stages import MODEL_STEP

if TYPE_CHECKING:
    from smelt.pipeline.execute.latency_scores import MeasuredLatency

_RETRIES = 3  # of a task whose node or process died
_POLL_S = 5.0


@dataclass(frozen=True)
class _Job:
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
class _Outcome:
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


class ClusterRun:
    """The tasks of one run.

    Args:
        cluster: where they run.
        plan: plan of the run.
        data: the splits of the run.
        step_runner: of the run, once the model is imported.
        scorer: of the run.
        display: of the run; gets the log of each task.
        warn: called with warnings.
        quiet: whether tasks print nothing.
        label: of a run that is part of a search, as of `Display`.
    """

    def __init__(
        self,
        cluster: RayCluster,
        plan: Plan,
        data: Mapping[str, Split],
        step_runner: StepRunner,
        scorer: Scorer,
        display: Display,
        warn: Callable[[Message], None],
        quiet: bool,
        label: str = "",
    ) -> None:
        import ray

        self._cluster, self._plan, self._display, self._warn = cluster, plan, display, warn
        self._store = step_runner.store
        recipe = plan.recipe
        self._needs = cluster.task_needs(recipe.resources, recipe.threads, recipe.device)
        nothing = cast(Any, None)
        scorer = replace(scorer, store=nothing, reference=None, reference_cache={})
        job = _Job(
            replace(plan, splits={}),
            replace(
                step_runner, store=nothing, data={}, display=nothing, validation_scorer=scorer,
                log_metrics=_no_metrics,
            ),
            scorer,
            self._store.root,
            None if self._store.remote is None else self._store.remote.url,
            Path.cwd(),
            display.log_path,
            quiet,
            label,
        )  # fmt: skip
        self._job = ray.put(job)
        self._data = cluster.put_data(json_hash({n: s.fingerprint for n, s in data.items()}), dict(data))
        self._reference = MODEL_STEP if recipe.task == CUSTOM_TASK else recipe.baseline
        self._needs_reference = scorer.needs_reference
        self._briefs: dict[str, Any] = {}
        self._scores: dict[str, Any] = {}
        self._outcomes: dict[str, _Outcome] = {}
        self._started: list[Any] = []
        self.turns = _turns(self._store)

    def start(
        self,
        model: Artifact,
        rebuilt: Callable[[str], bool],
        split: Callable[[str], str | None],
        limit: int | None,
    ) -> None:
        """Start the tasks of all steps.

        Args:
            model: the artifact of the model.
            rebuilt: whether a step is built again.
            split: name of the split that a step is scored on; None: not scored.
            limit: score at most this many samples.
        """
        self._briefs[MODEL_STEP] = _Outcome(key=model.key)
        for step in self._plan.steps:
            names = self._plan.ancestor_names(step)
            if step.unavailable or not self._briefs.keys() >= set(names):
                continue
            # a baseline that needs this step is scored after it
            known = self._reference in self._briefs and self._needs_reference
            reference = self._briefs[self._reference] if known else None
            is_reference = self._needs_reference and step.name == self._reference
            brief, score = self._submit(
                _run_step, step.name, step.name, rebuilt(step.name), split(step.name), limit, reference,
                is_reference, names,
                *(self._briefs[name] for name in names), num_returns=2,
            )  # fmt: skip
            self._briefs[step.name], self._scores[step.name] = brief, score

    def wait(self, step: PlanStep) -> tuple[Artifact, bool, float]:
        """Wait for the task of a step; return its artifact, whether the store had it, and its seconds.

        Raises:
            SmeltError: the step failed, or its node died repeatedly (`task-lost`).
            KeyboardInterrupt: it was cancelled.
        """
        outcome = self._get(self._briefs[step.name])
        self._outcomes[step.name] = outcome
        assert outcome.key is not None
        return self._find(outcome.key), outcome.cached, outcome.seconds

    def unscored_reason(self, name: str) -> str | None:
        """Return why the artifact of a finished step cannot be scored on the node that built it, or None."""
        return self._outcomes[name].unscored

    def score(
        self, name: str, artifact: Artifact, split: str, limit: int | None, reference: Artifact | None
    ) -> dict[str, Any]:
        """Return the score of a step's artifact: that of the step's task, or of a new task.

        Args:
            name: of the step.
            artifact: its artifact.
            split: name of the split.
            limit: score at most this many samples.
            reference: as of `Scorer`.
        """
        key = reference.key if reference is not None and self._needs_reference else None
        done = self._outcomes.get(name)
        if (
            split == self._plan.judged_on
            and done is not None
            and done.reference == key
            and name in self._scores
        ):
            found = self._get_value(self._scores[name])
            if found is not None:
                return cast(dict[str, Any], found)
        outcome = self._get(
            self._submit(_score_artifact, f"{name} scores", name, artifact.key, split, limit, key)
        )
        return cast(dict[str, Any], outcome.result)

    def measure_latency(
        self,
        artifacts: Mapping[str, Artifact],
        baseline: str,
        fresh: bool,
        known_alone: frozenset[str],
        seconds: float,
    ) -> MeasuredLatency | None:
        """Measure on a node that is marked for it, next to the baseline; None if no node is marked.

        Arguments are those of `LatencyScores.measure`.
        """
        options = self._cluster.latency_options()
        if options is None:
            return None
        keys = {name: artifact.key for name, artifact in artifacts.items()}
        outcome = self._get(
            self._submit(_measure_latency, "latency", keys, baseline, fresh, known_alone, seconds, **options)
        )
        self._warn(info("latency-on-node", f"Latency was measured on {outcome.node}."))
        return cast("MeasuredLatency", outcome.result)

    def cancel(self) -> None:
        """Cancel all tasks that have not ended."""
        self._cluster.cancel_tasks(self._started)

    def _submit(self, work: Callable[..., Any], name: str, *arguments: Any, **options: Any) -> Any:
        chosen = {**self._needs.options(), "max_retries": _RETRIES, "name": f"smelt {name}", **options}
        started = self._cluster.start(work, (self._job, self._data, *arguments), chosen)
        self._started.append(started[0] if isinstance(started, list) else started)
        return started

    def _get(self, reference: Any) -> _Outcome:
        """Return the outcome of a task, once it has ended; log what it did.

        Raises:
            SmeltError, KeyboardInterrupt: as `wait`.
        """
        outcome: _Outcome = self._get_value(reference)
        for line in outcome.lines:
            self._display.log_line(line)
        for message in outcome.warnings:
            self._warn(message)
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def _get_value(self, reference: Any) -> Any:
        import ray
        from ray import exceptions

        reported = False
        while not ray.wait([reference], timeout=_POLL_S)[0]:
            if not reported and not self._cluster.slots(self._needs):
                reported = True
                self._display.print_line(f"waits for a node with {self._needs}; none is left", brief=True)
        self._cluster.mark_ended(reference)
        try:
            return ray.get(reference)
        except exceptions.TaskCancelledError as error:
            raise KeyboardInterrupt from error
        except (
            exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError,
            exceptions.ObjectLostError,
        ) as error:  # fmt: skip
            text = " ".join(str(error).split())[:300]
            raise RunError(
                f"the process or the node of this task died {_RETRIES + 1} times: {text} If it was out of"
                " memory, set resources: {memory_gb: ...} in the recipe.",
                code="task-lost",
            ) from error

    def _find(self, key: str) -> Artifact:
        """Return an artifact that a task has left in the store.

        Raises:
            RunError: the store does not have it (`store-not-shared`).
        """
        return _require_artifact(self._store, key)


def paths_on_nodes(plan: Plan) -> list[Path]:
    """Return the files and folders that tasks read apart from the store: teachers and a user's metrics.

    The model is imported by the driver.
    """
    from smelt.evaluate.own_metric import load_own_metric

    found = [Path(path).absolute() for step in plan.steps for path in step.settings.paths().values()]
    for name in filter(is_own_metric, plan.recipe.score.quality):
        module = sys.modules[load_own_metric(name, plan.recipe.base).function.__module__]
        found += [Path(module.__file__).absolute()] if module.__file__ else []
    return found


def _turns(store: Store) -> MachineTurns:
    """Return the turns of steps and measurements of all processes of a machine that use a store."""
    return MachineTurns(store.root / "locks" / "turns")


def _no_metrics(step: str, metrics: Mapping[str, float], update: int) -> None:
    """Log no training curve: the driver reads it from the artifact."""


def _require_artifact(store: Store, key: str) -> Artifact:
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
    """A running task on a node: its store, data and display."""

    job: _Job
    data: Mapping[str, Split]
    name: str

    def __post_init__(self) -> None:
        if self.job.folder.is_dir():
            os.chdir(self.job.folder)
        self.display = _TaskDisplay(self.job.label, self.job.log, self.job.quiet)
        self.display.start_work(self.name)
        self.warnings: list[Message] = []
        self.store = open_node_store(self.job.store_root, self.job.store_url, self.warnings.append)
        self.turns = _turns(self.store)
        self.scorer = replace(self.job.scorer, store=self.store, reference_cache={})
        self.step_runner = replace(
            self.job.step_runner,
            store=self.store,
            data=self.data,
            display=self.display,
            validation_scorer=self.scorer,
            versions=library_versions(KEY_LIBRARIES),
        )

    def score(
        self, artifact: Artifact, split: str, limit: int | None, reference: str | None
    ) -> dict[str, Any]:
        """Score an artifact. reference: key of the artifact to compare with."""
        scorer = self.scorer
        if reference == artifact.key:
            scorer = replace(scorer, reference=artifact)
        elif reference is not None:
            scorer = replace(scorer, reference=_require_artifact(self.store, reference))
        self.display.start_work(f"{self.name}, scoring")
        with self.store.lock(f"{artifact.key}-score", self._report_wait):
            return scorer.score(artifact, limit_split(self.data[split], limit), self.display.progress)

    def _report_wait(self, holder: str) -> None:
        self.display.print_line(f"waits for {holder}, which is measuring")


def _run_task(
    job: _Job,
    data: Mapping[str, Split],
    name: str,
    work: Callable[[_Task, _Outcome], Any],
    measures: bool = False,
) -> tuple[_Outcome, Any]:
    """Run the work of a task; return its outcome, in which errors are explained, and the work's result.

    Args:
        job: of the run.
        data: the splits.
        name: of the step.
        work: gets the task and the outcome to complete.
        measures: whether the work measures latency, so that other tasks of this machine must wait.
    """
    from smelt.core.errors import rust_panics_as_errors
    from smelt.training.training_state import denormals_as_zero

    outcome = _Outcome(node=f"{_node_name()} ({cpu_model()})")
    started, result, task = time.monotonic(), None, None
    try:
        with ExitStack() as stack:
            stack.enter_context(rust_panics_as_errors())
            if any(step.needs & {"train", "unlabelled", "calibration"} for step in job.plan.steps):
                stack.enter_context(denormals_as_zero())
            task = _Task(job, data, name)
            report = partial(task.display.print_line, brief=True)
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


def _run_step(
    job: _Job,
    data: Mapping[str, Split],
    name: str,
    rebuild: bool,
    split: str | None,
    limit: int | None,
    reference: _Outcome | None,
    is_reference: bool,
    names: list[str],
    *ancestors: _Outcome,
) -> tuple[_Outcome, dict[str, Any] | None]:
    """Build and score a step; nothing if a step that it needs has failed."""

    def work(task: _Task, outcome: _Outcome) -> dict[str, Any] | None:
        keys = {each: found.key for each, found in zip(names, ancestors, strict=True)}
        above = {each: _require_artifact(task.store, str(key)) for each, key in keys.items()}
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
        return _Outcome(error=RunError("a step that it needs has failed", code="step-unreached")), None
    return _run_task(job, data, name, work)


def _score_artifact(
    job: _Job,
    data: Mapping[str, Split],
    name: str,
    key: str,
    split: str,
    limit: int | None,
    reference: str | None,
) -> _Outcome:
    """Score an artifact of the store."""

    def work(task: _Task, outcome: _Outcome) -> None:
        outcome.result = task.score(_require_artifact(task.store, key), split, limit, reference)

    return _run_task(job, data, name, work)[0]


def _measure_latency(
    job: _Job,
    data: Mapping[str, Split],
    keys: Mapping[str, str],
    baseline: str,
    fresh: bool,
    known_alone: frozenset[str],
    seconds: float,
) -> _Outcome:
    """Measure the latency of artifacts of the store."""

    def work(task: _Task, outcome: _Outcome) -> None:
        artifacts = {name: _require_artifact(task.store, key) for name, key in keys.items()}
        scores = LatencyScores(task.store, job.plan.recipe, data["test"])
        outcome.result = scores.measure(
            artifacts, baseline, task.display.progress, fresh, known_alone, seconds=seconds
        )

    return _run_task(job, data, "latency", work, measures=True)[0]
