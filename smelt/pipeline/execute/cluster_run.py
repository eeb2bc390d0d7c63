"""The steps of one run as tasks of a Ray cluster.

The driver plans, imports the model and writes the report. Each step is a task that builds the step's
artifact and scores it; it starts when the steps that it needs are done, so branches of the plan run at once.
The task reserves what all of its processes (`launch`) need, on one node.
Scores of other artifacts and the latency of all artifacts are tasks too. A task finds its inputs in the store
and leaves its result there: if a node dies, Ray runs the task again elsewhere, and a driver that is started
again finds what is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smelt.core.artifact import Artifact
from smelt.core.errors import RunError
from smelt.core.files import json_hash, read_json_object, resolve_path
from smelt.core.messages import Message, info
from smelt.core.user_code import recorded_source
from smelt.data.splits import Split
from smelt.evaluate.metrics.registry import is_custom_metric
from smelt.models.model_size import INTERPRETER_BYTES
from smelt.pipeline.execute.cluster_tasks import (
    ClusterJob,
    TaskOutcome,
    cluster_turns,
    latency_task,
    require_artifact,
    run_step_task,
    score_task,
)
from smelt.pipeline.execute.display import Display
from smelt.pipeline.execute.ray_cluster import RayCluster, TaskNeeds
from smelt.pipeline.execute.scoring import Scorer
from smelt.pipeline.execute.step_runner import StepRunner
from smelt.pipeline.execute.training_processes import TrainingLaunch
from smelt.pipeline.plan.plan import Plan, PlanStep
from smelt.pipeline.recipe.stages import MODEL_STEP

if TYPE_CHECKING:
    from smelt.pipeline.execute.latency_scores import MeasuredLatency

_POLL_S = 5.0
_RETRIES = 3  # of a task whose node or process died


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
        self._count = recipe.launch.num_processes
        self._needs, self._launch_needs = (
            cluster.task_needs(recipe.resources, recipe.threads, recipe.device, count)
            for count in (1, self._count)
        )
        self._launch = cast("TrainingLaunch", step_runner.launch or TrainingLaunch(plan))
        launch = replace(
            self._launch,
            plan=replace(plan, splits={}),
            threads=recipe.threads or max(1, int(self._launch_needs.cpus) // self._count),
        )
        nothing = cast("Any", None)
        scorer = replace(scorer, store=nothing, reference=None, reference_cache={})
        job = ClusterJob(
            replace(plan, splits={}),
            replace(
                step_runner, store=nothing, data={}, display=nothing, validation_scorer=scorer,
                log_metrics=_no_metrics, launch=launch,
            ),
            scorer,
            self._store.root,
            None if self._store.remote is None else self._store.remote.url,
            Path.cwd(),
            display.log_path,
            quiet,
            label,
        )  # fmt: skip
        self._estimates = step_runner.estimates
        self._reserved: dict[Any, TaskNeeds] = {}  # by reference
        self._job = ray.put(job)
        self._data = cluster.put_data(json_hash({n: s.fingerprint for n, s in data.items()}), dict(data))
        self._reference = MODEL_STEP if recipe.traits.modality == "arrays" else recipe.baseline
        self._needs_reference = scorer.needs_reference
        self._briefs: dict[str, Any] = {}
        self._scores: dict[str, Any] = {}
        self._outcomes: dict[str, TaskOutcome] = {}
        self._started: list[Any] = []
        self.turns = cluster_turns(self._store)

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
        self._briefs[MODEL_STEP] = TaskOutcome(key=model.key)
        for step in self._plan.steps:
            names = self._plan.ancestor_names(step)
            if step.unavailable or not self._briefs.keys() >= set(names):
                continue
            # a baseline that needs this step is scored after it
            has_reference = self._reference in self._briefs and self._needs_reference
            reference = self._briefs[self._reference] if has_reference else None
            is_reference = self._needs_reference and step.name == self._reference
            brief, score = self._submit(
                run_step_task, step.name, step.name, rebuilt(step.name), split(step.name), limit, reference,
                is_reference, names,
                *(self._briefs[name] for name in names), num_returns=2, needs=self._step_needs(step),
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
        outcome = self._outcomes.get(name)
        if (
            split == self._plan.judged_on
            and outcome is not None
            and outcome.reference == key
            and name in self._scores
        ):
            result = self._get_value(self._scores[name])
            if result is not None:
                return cast("dict[str, Any]", result)
        needs = self._launch_needs if self._launch.scores else self._needs
        task = self._submit(score_task, f"{name} scores", name, artifact.key, split, limit, key, needs=needs)
        return cast("dict[str, Any]", self._get(task).result)

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
            self._submit(latency_task, "latency", keys, baseline, fresh, known_alone, seconds, **options)
        )
        self._warn(info("latency-on-node", f"Latency was measured on {outcome.node}."))
        return cast("MeasuredLatency", outcome.result)

    def cancel(self) -> None:
        """Cancel all tasks that have not ended."""
        self._cluster.cancel_tasks(self._started)

    def _step_needs(self, step: PlanStep) -> TaskNeeds:
        """Return what the task of a step reserves, with all of its processes.

        Its estimated memory, unless the recipe has a setting. Where nodes train on GPUs and this machine has
        none, the estimate is that of a CPU, and not used.
        """
        is_launched = self._launch.applies_to(step) or self._launch.scores
        needs = self._launch_needs if is_launched else self._needs
        estimate, resources = self._estimates.get(step.name), self._plan.recipe.resources
        if resources.memory_gb is not None or estimate is None or estimate.memory_bytes is None:
            return needs
        if step.trains and needs.gpus and not estimate.is_gpu:
            return needs
        memory = estimate.memory_bytes
        if estimate.scoring_bytes is not None:
            scoring = self._count if self._launch.scores else 1
            memory = max(memory, scoring * (estimate.scoring_bytes + INTERPRETER_BYTES))
        return self._cluster.with_memory(needs, memory)

    def _submit(
        self,
        work: Callable[..., Any],
        name: str,
        *arguments: Any,
        needs: TaskNeeds | None = None,
        **options: Any,
    ) -> Any:
        needs = needs or self._needs
        task_options = {**needs.options(), "max_retries": _RETRIES, "name": f"smelt {name}", **options}
        submitted = self._cluster.start(work, (self._job, self._data, *arguments), task_options)
        references = submitted if isinstance(submitted, list) else [submitted]
        self._started.append(references[0])
        self._reserved |= dict.fromkeys(references, needs)
        return submitted

    def _get(self, reference: Any) -> TaskOutcome:
        """Return the outcome of a task, once it has ended; log what it did.

        Raises:
            SmeltError, KeyboardInterrupt: as `wait`.
        """
        outcome: TaskOutcome = self._get_value(reference)
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

        reported, needs = False, self._reserved[reference]
        while not ray.wait([reference], timeout=_POLL_S)[0]:
            if not reported and not self._cluster.slots(needs):
                reported = True
                self._display.print_line(f"waits for a node with {needs}; none is left", brief=True)
        self._cluster.mark_ended(reference)
        try:
            return ray.get(reference)
        except exceptions.TaskCancelledError as error:
            raise KeyboardInterrupt from error
        except (
            exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError,
            exceptions.ObjectLostError, exceptions.TaskUnschedulableError,
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
        return require_artifact(self._store, key)


def paths_on_nodes(plan: Plan) -> list[Path]:
    """Return the files and folders that tasks read apart from the store: teachers and a user's own code.

    The model is imported by the driver. The processes of a training read the whole recipe.
    """
    from smelt.evaluate.custom_metric import load_custom_metric

    paths = [Path(path).absolute() for step in plan.steps for path in step.settings.paths().values()]
    for name in filter(is_custom_metric, plan.recipe.score.quality):
        file = load_custom_metric(name, plan.recipe.base).file
        paths += [file.absolute()] if file else []
    if plan.recipe.module is not None and plan.local_model is not None:
        config = read_json_object(plan.local_model / "config.json")
        paths.append(recorded_source(config["module"], config["source_hash"]))
    if plan.recipe.launch.num_processes > 1:
        files = (
            resolve_path(plan.recipe.base, data_file) for data_file in plan.recipe.data.split_files().values()
        )
        paths += [
            path.absolute() for path in (plan.local_model, *files) if path is not None and path.exists()
        ]
    return paths


def _no_metrics(step: str, metrics: Mapping[str, float], update: int) -> None:
    """Log no training curve: the driver reads it from the artifact."""
