"""Run a plan and write a folder with report and artifacts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact
from smelt.core.errors import DEFAULT_CODE, InputError, RunError, SmeltError, rust_panics_as_errors
from smelt.core.locks import MachineTurns
from smelt.core.messages import Message, duration_text, warning
from smelt.core.store import Store
from smelt.data.split_division import checked_limit, divide_folds, limit_split
from smelt.data.splits import Split
from smelt.evaluate.report.view import size_text
from smelt.evaluate.step_agreement import cached_agreement
from smelt.pipeline.execute.baseline_comparisons import RunComparisons
from smelt.pipeline.execute.cluster_run import ClusterRun, paths_on_nodes
from smelt.pipeline.execute.display import (
    Display,
    explain_step_error,
    unexpected_traceback,
    with_user_paths,
)
from smelt.pipeline.execute.latency_scores import LatencyScores
from smelt.pipeline.execute.operation_counts import step_operations
from smelt.pipeline.execute.ray_cluster import open_cluster
from smelt.pipeline.execute.report_builder import CANNOT_RUN_HERE, ReportBuilder
from smelt.pipeline.execute.run_costs import estimate_run
from smelt.pipeline.execute.run_folder import (
    RunFolder,
    StorePlace,
    check_store,
    open_store,
    register_run,
    require_run_folder,
    run_folder_lock,
)
from smelt.pipeline.execute.run_result import Report, Result, write_report
from smelt.pipeline.execute.sources import make_first_artifact
from smelt.pipeline.execute.step_runner import recipe_scorer, recipe_step_runner
from smelt.pipeline.execute.time_limit import TimeLimit
from smelt.pipeline.execute.trackers import RunTrackers
from smelt.pipeline.execute.training_processes import TrainingLaunch, external_run
from smelt.pipeline.inspect.machine import unscored_reason
from smelt.pipeline.plan.costs import COMPARISONS
from smelt.pipeline.plan.untrained_checks import UNTRAINED_NOT_SCORED
from smelt.pipeline.plan.warnings import data_warnings, few_windows_warnings
from smelt.pipeline.recipe.recipe import SPEED_METRICS
from smelt.pipeline.recipe.stages import MODEL_STEP
from smelt.training.processes import external_processes, require_gpus, require_single_process

if TYPE_CHECKING:
    from smelt.evaluate.latency import LatencySettings
    from smelt.pipeline.plan.costs import StepEstimate
    from smelt.pipeline.plan.plan import Plan, PlanStep

_SCORING_DISABLED = "scoring is disabled"
# Minimum time limit in seconds for latency measurements, if the stages were faster.
_MIN_LATENCY_SECONDS = 60.0


@dataclass(frozen=True)
class RunOptions:
    """Options of a run from the command line.

    out: the run's folder (default: runs/NAME in the current folder). store: folder for artifacts and scores
    (default: the nearest .store in a parent folder, else one next to the run's folder), or the URL of a
    remote store as text, of which `store_cache` is the local folder (default: as for `store`). rebuild:
    steps to build again, {"*"} for all. limit: use at most this many samples of every split. scored: whether
    quality and latency are measured. only: the steps to score, with the baseline; None for all. score_limit:
    score at most this many samples. timed: whether latency is measured. on_test: whether the steps that were
    chosen on validation, or those of `only`, are scored on test. pages: whether layers and next tokens are
    compared with the baseline's, and report.md, .html and charts are written besides report.json. fold:
    number and count, of a run of a cross-validation. label: of a run that is part of a search; it is printed
    briefly, each line with the label. turns: of the workers of a search on this machine. executor: the Ray
    cluster on which steps run, as in `open_cluster`. push_checkpoints: to the remote store. time_limit:
    checked before each step and before latency is measured; the run then ends as if it was interrupted.
    """

    out: Path | None = None
    store: StorePlace | None = None
    rebuild: frozenset[str] = frozenset()
    limit: int | None = None
    quiet: bool = False
    scored: bool = True
    only: frozenset[str] | None = None
    score_limit: int | None = None
    timed: bool = True
    on_test: bool = True
    pages: bool = True
    fold: tuple[int, int] | None = None
    label: str = ""
    turns: MachineTurns | None = None
    store_cache: Path | None = None
    executor: str | None = None
    push_checkpoints: bool = False
    time_limit: TimeLimit | None = None


def run_plan(plan: Plan, options: RunOptions) -> Result:
    """Run `plan` and return its result; the report is written after every step.

    Raises:
        InputError: the plan, the data or the folders are not suitable; nothing was written.
    """
    plan.require_runnable()
    if options.executor is None:
        require_gpus(plan.recipe.launch, plan.recipe.device)
    else:
        require_single_process("smelt run --executor")
    unknown = options.rebuild - {"*", MODEL_STEP} - {s.name for s in plan.steps}
    if unknown:
        step_list = ", ".join(s.name for s in plan.steps)
        raise InputError(
            f"--rebuild {', '.join(sorted(unknown))}: unknown step. Known steps: {step_list}.",
            code="unknown-step",
        )
    options = replace(options, limit=checked_limit(options.limit))
    check_store(options.store)
    cluster = None if options.executor is None else open_cluster(options.executor)
    full_data = plan.read_data()
    data = {name: limit_split(split, options.limit) for name, split in full_data.items()}
    folder = (options.out or Path("runs") / plan.path.stem).resolve()
    require_run_folder(folder)
    store, new_store = open_store(options.store, folder, options.store_cache, options.push_checkpoints)
    if cluster is not None:
        cluster.check_nodes(store, paths_on_nodes(plan))
    node_bytes = None if cluster is None else cluster.node_bytes
    is_compared = options.scored and options.pages
    estimates, cost_warnings = estimate_run(plan, data, store, bool(options.rebuild), node_bytes, is_compared)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(run_folder_lock(folder))
            stack.enter_context(register_run(store.root, folder))
            display = Display(folder / "log.txt", quiet=options.quiet, label=options.label)
        except OSError as error:
            raise InputError(
                f"{error.filename or folder}: cannot use this folder for the run: {error.strerror}."
                " Choose another folder with --out.",
                code="unusable-folder",
            ) from error
        stack.callback(display.close)
        if any(step.needs & {"train", "unlabeled", "calibration"} for step in plan.steps):
            from smelt.training.training_state import denormals_as_zero

            stack.enter_context(denormals_as_zero())
        if new_store:
            display.print_line(f"note: {new_store}")
        if external_processes():
            stack.enter_context(external_run(plan, display.print_line))
        run = _PlanRunner(plan, options, full_data, data, folder, store, display, estimates)
        store.warn = lambda message: run.add_warnings([message])
        run.add_warnings(data_warnings(plan.recipe, any(step.trains for step in plan.steps), full_data))
        run.add_warnings(cost_warnings)
        return run.execute()


def _log_text(failure: SmeltError) -> str:
    """Return an error as a line of the log."""
    return f"error[{failure.code or DEFAULT_CODE}]: {failure}"


class _PlanRunner:
    """Runs one plan and holds the state of the run."""

    def __init__(
        self,
        plan: Plan,
        options: RunOptions,
        all_data: dict[str, Split],
        data: dict[str, Split],
        folder: Path,
        store: Store,
        display: Display,
        estimates: Mapping[str, StepEstimate] | None = None,
    ) -> None:
        self.plan, self.options, self.all_data, self.data = plan, options, all_data, data
        self.folder, self.store, self.display = folder, store, display
        self.run_folder = RunFolder(folder)
        self.estimates = estimates or {}
        self.scorer = recipe_scorer(plan.recipe, store)
        self.launch = TrainingLaunch(plan, options.limit, options.fold)
        self.step_runner = recipe_step_runner(
            plan.recipe, store, data, self.scorer, display, self.launch, estimates
        )
        self.cluster_run: ClusterRun | None = None  # with `executor`, once the model is imported
        self.artifacts: dict[str, Artifact] = {}
        self.previous_artifacts: dict[str, Artifact] = {}
        self.report = ReportBuilder(plan, data, options.limit, partial(cached_agreement, store))

    def add_warnings(self, warnings: Sequence[Message]) -> None:
        """Add warnings to the report, and print those that the plan did not have."""
        for message in warnings:
            if self.report.add_warning(message):
                self.display.print_line(f"{message.severity}: {message}")

    def execute(self) -> Result:
        """Run all steps, measure and write the report; errors of steps are recorded in the report."""
        start_time = time.monotonic()
        self._prepare_folder()
        self.trackers = RunTrackers(self.plan, self.folder, self.display, self.add_warnings)
        self.step_runner = replace(self.step_runner, log_metrics=self.trackers.log)
        try:
            with rust_panics_as_errors(), self._step_turn():
                self._import_model()
            for step in self.plan.steps:
                self._check_time_limit()
                self._run_step(step)
            self._report_previous_steps()
            if self.options.fold is None:
                self._count_operations()
            if self.options.scored:
                if self.options.pages:
                    self._compare_with_baseline()
                if self.options.timed:
                    self._check_time_limit()
                    self._measure_latency()
                self.report.judge_gates()
                if self.options.on_test:
                    self._score_on_test()
                if self.plan.recipe.score.folds and not self.options.fold and self.options.only is None:
                    self._cross_validate(self.plan.recipe.score.folds)
            self.report.mark_finished()
        except KeyboardInterrupt:
            self.report.mark_interrupted()
            self.display.print_line(
                "Interrupted. Finished steps are stored; run the same command to continue."
            )
        except Exception as error:
            failure = self._explain_error(error, MODEL_STEP)
            if isinstance(failure, InputError) and not self.artifacts:
                self.trackers.finish("error")
                raise  # before any work, so an error of the input, not of the run
            self.report.add_failure(failure)
            self.display.print_line(_log_text(failure))
        if self.cluster_run is not None:
            self.cluster_run.cancel()
        not_copied = 0
        if self.report.status != "interrupted":
            self.run_folder.remove_old_links(self.artifacts)
            not_copied = self.store.push_pending()
        self._write_report(last=True)
        self._finish_trackers()
        status_text = "" if self.report.status == "passed" else f": {self.report.status}"
        self.display.print_line(f"Finished in {duration_text(time.monotonic() - start_time)}{status_text}")
        return Result(Report(self.report.data), self.folder, not_copied)

    def _check_time_limit(self) -> None:
        limit = self.options.time_limit
        if limit is not None and limit.is_over():
            raise KeyboardInterrupt

    def _finish_trackers(self) -> None:
        """Log the report to the trackers; if one fails, the report gets the warning."""
        num_warnings = len(self.report.data["warnings"])
        self.trackers.summarize(self.report.data)
        self.trackers.finish(self.report.status)
        if len(self.report.data["warnings"]) > num_warnings:
            self._write_report(last=True)

    def _prepare_folder(self) -> None:
        if name := self.run_folder.replaced_recipe(self.plan):
            self.display.print_line(
                f"note: replacing the report of '{name}' in {self.folder}; its artifacts are kept in the"
                " store."
            )
        try:
            self.run_folder.prepare(self.plan, self.store.root)
        except OSError as error:
            raise explain_step_error(error, "recipe.yaml", self.folder, self.display.log_path) from error

    def _import_model(self) -> None:
        self.display.start_work(MODEL_STEP)
        imported = make_first_artifact(
            self.plan,
            self.all_data,
            self.data,
            self.step_runner,
            self.scorer,
            self.add_warnings,
            self._is_rebuilt(MODEL_STEP),
        )
        self.step_runner, self.scorer = imported.step_runner, imported.scorer
        if self.options.executor is not None:
            self._start_tasks(self.options.executor, imported.artifact)
        self._score_and_report(MODEL_STEP, imported.artifact, imported.cached, 0.0)
        self.trackers.summarize(self.report.data)
        self._write_report()  # the first step may be a long training run

    def _start_tasks(self, executor: str, model: Artifact) -> None:
        """Start the steps on a cluster; they are reported in the recipe's order."""
        self.cluster_run = ClusterRun(
            open_cluster(executor), self.plan, self.data, self.step_runner, self.scorer, self.display,
            self.store.warn, self.options.quiet, self.options.label,
        )  # fmt: skip
        self.cluster_run.start(
            model,
            self._is_rebuilt,
            lambda name: self.plan.judged_on if self._is_scored(name) else None,
            self.options.score_limit,
        )

    def _run_step(self, step: PlanStep) -> None:
        if step.unavailable:
            self.report.add_skipped_step(step.name, step.unavailable)
            self.display.print_line(f"{step.name}: skipped: {step.unavailable}")
            return
        missing = [name for name in step.dependencies if name not in self.artifacts]
        if missing:
            self.report.add_unreached_step(step.name, f"the required step '{missing[0]}' has no artifact")
            return
        self.display.start_work(step.name)
        start_time = time.monotonic()
        try:
            with rust_panics_as_errors(), self._step_turn():
                seconds = None
                if self.cluster_run is not None:
                    artifact, cached, seconds = self.cluster_run.wait(step)
                else:
                    ancestors = {name: self.artifacts[name] for name in self.plan.ancestor_names(step)}
                    artifact, cached = self.step_runner.run_step(step, ancestors, self._is_rebuilt(step.name))
                self.trackers.log_cached(step.name, artifact)
                seconds = time.monotonic() - start_time if seconds is None else seconds
                self._score_and_report(step.name, artifact, cached, seconds)
                self.trackers.summarize(self.report.data)
        except Exception as error:
            failure = self._explain_error(error, step.name)
            self.report.add_failure(failure, step.name)
            self.display.print_line(f"{step.name}: {_log_text(failure)}", brief=True)
        self._write_report()

    def _step_turn(self) -> AbstractContextManager[None]:
        """Return a context in which no other worker of this machine measures latency."""
        turns = self.options.turns
        return nullcontext() if turns is None else turns.step(self._report_waiting("next step"))

    def _explain_error(self, error: Exception, step: str) -> SmeltError:
        """Return an error with a message for the user; log the traceback of unexpected errors."""
        failure = explain_step_error(error, step, self.store.root, self.display.log_path)
        try:
            self.store.require_present()
        except RunError as removed:  # the cause of whatever failed
            failure = removed
        model_path = self.plan.local_model if step == MODEL_STEP else None
        failure = with_user_paths(failure, self.store.root, model_path, self.artifacts)
        for line in unexpected_traceback(error).splitlines():
            self.display.log_line(line)
        return failure

    def _score_and_report(self, name: str, artifact: Artifact, cached: bool, seconds: float) -> None:
        """Link, score and report a finished artifact."""
        self.run_folder.link_artifact(name, artifact)
        reasons = {
            "untrained": UNTRAINED_NOT_SCORED if artifact.manifest.details.get("untrained") else None,
            CANNOT_RUN_HERE: self._unscored_reason(name, artifact),
            "scoring-disabled": None if self._is_scored(name) else _SCORING_DISABLED,
        }
        if why := next(((code, reason) for code, reason in reasons.items() if reason), None):
            self.artifacts[name] = artifact
            self.report.add_unscored_step(name, artifact, why, cached)
            # a search scores after all steps are built
            note = "" if self.options.label and why[0] == "scoring-disabled" else f"not scored: {why[1]}"
            self._print_step(name, artifact, cached, seconds, note)
            return
        if name == (
            MODEL_STEP if self.plan.recipe.traits.modality == "arrays" else self.plan.recipe.baseline
        ):
            self.scorer = replace(self.scorer, reference=artifact)
        score = self._score(name, artifact)
        self.artifacts[name] = artifact
        self.report.add_step(name, artifact, score, cached)
        self.run_folder.write_scores(name, score)
        if name == self.plan.recipe.baseline and self.options.limit is None:
            self.add_warnings(few_windows_warnings(score["statistics"], self.plan.judged_on))
        if name == self.plan.recipe.baseline and self.scorer.needs_reference:
            for other in [n for n in self.report.statistics if n != name]:  # scored before the baseline
                completed = self._score(other, self.artifacts[other])
                self.report.update_scores(other, self.artifacts[other], completed)
                self.run_folder.write_scores(other, completed)
        self._print_step(name, artifact, cached, seconds, "  ".join(self.report.score_texts(name)))

    def _print_step(self, name: str, artifact: Artifact, cached: bool, seconds: float, scores: str) -> None:
        """Print a finished step in columns: its name, how long it took, its size and its scores."""
        width = max(map(len, (MODEL_STEP, *(step.name for step in self.plan.steps))))
        took = "" if name == MODEL_STEP else "stored" if cached else duration_text(seconds)
        size = size_text(artifact.size_bytes)
        self.display.print_line(
            f"{name:<{width}}  {took:>12}  {size:>10}  {scores}".rstrip(), brief=not cached
        )

    def _unscored_reason(self, name: str, artifact: Artifact) -> str | None:
        """Return why the machine that built an artifact cannot score it, or None."""
        if self.cluster_run is not None and name != MODEL_STEP:
            return self.cluster_run.unscored_reason(name)
        return _unscored_reason(artifact)

    def _is_scored(self, name: str) -> bool:
        selected = self.options.only
        return self.options.scored and (
            selected is None or name in selected or name == self.plan.recipe.baseline
        )

    def _score(self, name: str, artifact: Artifact, on_test: bool = False) -> dict[str, Any]:
        self.display.start_work(f"{name}, scoring{' on test' if on_test else ''}")
        split_name, limit = "test" if on_test else self.plan.judged_on, self.options.score_limit
        if self.cluster_run is not None:
            return self.cluster_run.score(name, artifact, split_name, limit, self.scorer.reference)
        with self.store.lock(f"{artifact.key}-score", self._report_waiting(name)):
            return self.launch.score(self.scorer, artifact, self.data, split_name, limit, self.display)

    def _score_on_test(self) -> None:
        """Score the steps that were chosen on validation, and the baseline, on test."""
        if self.plan.judged_on == "test":
            return
        every = self.artifacts | self.previous_artifacts
        only = self.options.only
        chosen = self.report.shortlisted_steps() if only is None else [self.plan.recipe.baseline, *only]
        for name in (name for name in chosen if name in self.report.statistics):
            try:
                with rust_panics_as_errors(), self._step_turn():
                    score = self._score(name, every[name], on_test=True)
            except Exception as error:
                failure = self._explain_error(error, name)
                self.report.add_test_failure(name, failure)
                self.display.print_line(f"{name}: on test: {_log_text(failure)}")
                continue
            self.report.add_test_scores(name, score)
            texts = self.report.score_texts(name, on_test=True)
            self.display.print_line("  ".join([f"{name} on test", *texts]))
        self.report.judge_test_gates()

    def _cross_validate(self, count: int) -> None:
        """Run the recipe once for each fold of the training samples, scored on what the fold leaves out."""
        from smelt.evaluate.significance import summarize_folds

        recipe = self.plan.recipe.model_copy(update={"trackers": ()})
        plan = replace(self.plan, judged_on="test", recipe=recipe)
        options = replace(self.options, timed=False, on_test=False, pages=False, quiet=True, only=None)
        fold_statistics = []
        for number, (train_split, test_split) in enumerate(
            divide_folds(self.data["train"], count, self.plan.recipe.seed), 1
        ):
            self.display.start_work(f"fold {number} of {count}")
            folder = self.folder / "folds" / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            data = self.data | {"train": train_split, "test": test_split}
            with (
                register_run(self.store.root, folder),
                closing(Display(folder / "log.txt", quiet=True)) as display,
            ):
                fold_options = replace(options, fold=(number, count))
                fold = _PlanRunner(plan, fold_options, data, data, folder, self.store, display)
                fold.execute()
            if fold.report.status == "interrupted":
                raise KeyboardInterrupt
            for step in fold.report.data["steps"]:
                if step["error"]:
                    text = f"fold {number}: {step['name']}: {step['error']['message']}"
                    self.add_warnings([warning(step["error"]["code"], text)])
            fold_statistics.append(fold.report.statistics)
            scored = [f"{n} {self._first_value(fold, n)}" for n in fold.report.statistics]
            self.display.print_line(f"fold {number} of {count}: {', '.join(scored)}")
        self.report.add_folds(summarize_folds(fold_statistics, self.plan.recipe.baseline))

    @staticmethod
    def _first_value(run: _PlanRunner, name: str) -> str:
        """Return the first metric of a scored step, and its value."""
        step = next(step for step in run.report.data["steps"] if step["name"] == name)
        return "".join(f"{metric} {s['value']:.2f}" for metric, s in [*step["quality"].items()][:1])

    def _report_previous_steps(self) -> None:
        """Report artifacts of an earlier run in this folder for steps that `--until` excludes."""
        self.previous_artifacts = self.run_folder.keep_previous(self.plan, self.step_runner, self.artifacts)
        if self.scorer.reference is None:
            self.scorer = replace(
                self.scorer, reference=self.previous_artifacts.get(self.plan.recipe.baseline)
            )
        for step in self.plan.excluded_steps:
            if artifact := self.previous_artifacts.get(step.name):
                reason = _unscored_reason(artifact)
                score = None if reason else self.scorer.cached_score(artifact, self.data[self.plan.judged_on])
                self.report.add_previous_step(step, artifact, score, reason)
                if score is not None:
                    self.run_folder.write_scores(step.name, score)
                self.display.print_line(f"{step.name}: kept from an earlier run in this folder")

    def _count_operations(self) -> None:
        """Report the operations of each step; graphs have those of the torch model that they come from."""
        split, counts = self.data[self.plan.judged_on], dict[str, int]()
        failed: dict[str, list[str]] = {}  # a user's module fails alike in all steps
        for name, artifact in (self.artifacts | self.previous_artifacts).items():
            if artifact.format != "torch":
                continue
            try:
                counts[name] = step_operations(artifact, split, self.plan.recipe.task, self.store)
            except Exception as error:  # of transformers' code for a model; all results are there already
                failure = self._explain_error(error, name)
                failed.setdefault(str(failure), []).append(name)
        for text, names in failed.items():
            message = f"{', '.join(names)}: operations were not counted: {text}"
            self.add_warnings([warning("operations-not-counted", message)])
        self.report.add_operations(counts)

    def _report_waiting(self, what: str) -> Callable[[str], None]:
        return lambda holder: self.display.print_line(
            f"{what}: waits for {holder}, which is measuring", brief=True
        )

    def _is_rebuilt(self, name: str) -> bool:
        return bool(self.options.rebuild & {"*", name})

    def _compare_with_baseline(self) -> None:
        """Compare layers and next tokens of the scored steps with the baseline's."""
        every = self.artifacts | self.previous_artifacts
        comparisons = RunComparisons(
            self.plan, self.data, self.store, self.display, self.report, self.estimates.get(COMPARISONS),
            self._step_turn, self._explain_error,
        )  # fmt: skip
        scored = {name: artifact for name, artifact in every.items() if name in self.report.statistics}
        self.add_warnings(comparisons.compare(scored))

    def _measure_latency(self) -> None:
        settings = self.plan.recipe.score.latency
        every = self.artifacts | self.previous_artifacts
        scored = {name: a for name, a in every.items() if name in self.report.statistics}
        if not settings or self.plan.recipe.baseline not in scored:
            return
        timed = {name: a for name, a in scored.items() if self._is_timed(name, settings)}
        self.display.start_work("latency")
        scores = LatencyScores(self.store, self.plan.recipe, self.data["test"])
        fresh, known_alone = self._is_rebuilt("*"), frozenset(self.previous_artifacts)
        seconds = max(_MIN_LATENCY_SECONDS, sum(a.manifest.seconds for a in self.artifacts.values()))
        baseline, turns, run = self.plan.recipe.baseline, self.options.turns, self.cluster_run
        try:
            if run is not None and (
                report := run.measure_latency(timed, baseline, fresh, known_alone, seconds)
            ):
                self._report_latency(report)
                return
            turns = run.turns if run is not None else turns
            # concurrent measurements disturb each other, and so does other work
            with ExitStack() as stack:
                stack.enter_context(self.store.lock("latency", self._report_waiting("latency")))
                if turns is not None:
                    stack.enter_context(turns.measurement(partial(self.display.print_line, brief=True)))
                scores.measure(
                    timed, baseline, self.display.progress, fresh, known_alone, self._report_latency, seconds
                )
        except Exception as error:
            failure = self._explain_error(error, "latency")
            self.report.add_latency_failure(failure)
            self.display.print_line(_log_text(failure))

    def _is_timed(self, name: str, settings: LatencySettings) -> bool:
        gates = (gate.metric for gate in self.plan.gates_of(name))
        is_required = (
            name
            in {self.plan.recipe.baseline, *(self.options.only or ())}  # a search judges what it asks for
            or any(metric in SPEED_METRICS for metric in gates)
        )
        return is_required or settings.is_timed(name, self.report.is_deployable(name))

    def _report_latency(self, measured: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the latencies measured so far to the report, so that an interrupted run keeps them."""
        self.report.add_latency(measured)
        self._write_report()

    def _write_report(self, last: bool = False) -> None:
        """Write the report; only the last one has charts, and only its failure stops the run.

        Raises:
            RunError: the last report cannot be written.
        """
        try:
            write_report(self.folder, self.report.snapshot(), with_charts=last, with_pages=self.options.pages)
        except OSError as error:
            failure = explain_step_error(error, "report", self.folder, self.display.log_path)
            if last:
                raise failure from error
            self.display.print_line(f"warning: {failure}")


def _unscored_reason(artifact: Artifact) -> str | None:
    """Return why this machine cannot score an artifact, or None."""
    details = artifact.manifest.details
    return unscored_reason(artifact.format, details.get("target"), details.get("dtype"))
