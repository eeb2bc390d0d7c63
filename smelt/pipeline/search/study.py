"""Search the space of a recipe with Optuna: trials, constraints, early stopping, several workers, resuming.

A trial is a run of the recipe at one point, in a folder of its own. Artifacts and scores are in one store, so
a trial costs only what no other trial has done. It is checked from cheap to expensive: size, quality on
growing parts of the validation samples, quality on all of them, latency. A trial that cannot meet the
constraints ends at the first of these that shows it.

A study lives in its storage (a database in the search's folder, or by URL), so it goes on
after an interruption, and several workers share it: the same command, started again in the same folder, or
anywhere with the same database. The trials of dead workers are done again.

The sampler is seeded for each trial by the study's seed and the number of trials before it: equal studies
sample equal trials, also after interruptions, as far as the values are equal. Times never are.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError, RunError, SmeltError
from smelt.core.files import json_hash
from smelt.core.locks import MachineTurns
from smelt.core.messages import Message, warning, with_count
from smelt.pipeline.execute.ray_cluster import RayCluster, open_cluster
from smelt.pipeline.execute.run import RunOptions, run_plan
from smelt.pipeline.execute.run_folder import StorePlace, check_store, default_store
from smelt.pipeline.execute.time_limit import TimeLimit
from smelt.pipeline.recipe.recipe import SPEED_METRICS
from smelt.pipeline.search.space import COSTS, Sampler, SearchSpace, grid_points
from smelt.pipeline.search.storage import GRACE_S, StudyStorage, lost_trials
from smelt.pipeline.search.trials import (
    Trial,
    TrialQueue,
    TrialResult,
    finished_trials,
    objective_text,
    parameter_text,
)
from smelt.training.processes import require_single_process

if TYPE_CHECKING:
    import optuna

DEFAULT_TRIALS = 50
_MAX_FIRST_FAILURES = 5  # a search whose first trials all fail has an error that no trial will avoid
_RUNG_FACTOR = 4  # each part of the samples is this many times as large as the one before
_MIN_RUNG = 32  # samples; intervals of fewer stop no trial
_MAX_POINTS = 12  # of the front, scored on test


class TimeOverError(Exception):
    """The time limit of a search ended a trial before it was measured."""


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search from the command line.

    out: the search's folder (default: runs/NAME-search). store: as for a run. trials, time_limit_minutes,
    sampler: instead of the recipe's. storage: URL of a database (default: one in `out`). limit: use at most
    this many samples of every split. executor: the Ray cluster that runs several trials at once.
    """

    out: Path | None = None
    store: StorePlace | None = None
    trials: int | None = None
    time_limit_minutes: float | None = None
    storage: str | None = None
    sampler: Sampler | None = None
    limit: int | None = None
    executor: str | None = None


class Search:
    """A study of a search space in a folder."""

    def __init__(self, space: SearchSpace, options: SearchOptions) -> None:
        self.options = options
        if options.sampler is not None:
            settings = space.settings.model_copy(update={"sampler": options.sampler})
            space = replace(space, settings=settings)
        self.space = space
        self.folder = (options.out or Path("runs") / f"{space.path.stem}-search").resolve()
        self._store_cache = default_store(self.folder / "trials")[0]
        self.store = options.store or self._store_cache
        self.trials = options.trials or space.settings.trials or DEFAULT_TRIALS
        self.time_limit_minutes = options.time_limit_minutes or space.settings.time_limit_minutes
        assert space.plan is not None
        self.seed = space.plan.recipe.seed
        self.baseline = space.plan.recipe.baseline
        self.storage = StudyStorage(options.storage, self.folder, space.path.stem, self._warn)
        self.queue = TrialQueue(space, self.storage, self.trials, self.seed)
        self.clock = time.monotonic  # seconds
        self._deadline: float | None = None  # of `clock`, once `run` has begun
        self._turns = MachineTurns(self.folder / "running")
        self._report: Callable[[str], None] | None = None

    def run(self, report: Callable[[str], None] | None = None) -> str:
        """Run trials until their number, the time limit or the end of the space; return why it ended.

        Trials of all workers count. Codes: `trials`, `time`, `exhausted`, `interrupted`.

        Args:
            report: called with lines about the trials: at the start, after each score, and at the end. With
                it, the steps of trials are shown on standard error as in a run.

        Raises:
            InputError: the folder or the storage cannot be used, or belongs to another search.
            RunError: all of the first trials failed.
        """
        self._report = report
        self._prepare()
        minutes = self.time_limit_minutes
        self._deadline = None if minutes is None else self.clock() + 60 * minutes
        if self.options.executor is None:
            return self._run_trials(threading.Event())
        return self._run_on_cluster(open_cluster(self.options.executor))

    def _run_on_cluster(self, cluster: RayCluster) -> str:
        """Run as many trials at once as the cluster has room for their steps, each in a thread."""
        assert self.space.plan is not None
        recipe = self.space.plan.recipe
        count = min(
            self.trials, cluster.slots(cluster.task_needs(recipe.resources, recipe.threads, recipe.device))
        )
        self.print_line(f"{with_count(count, 'trial')} at once on {with_count(len(cluster.nodes()), 'node')}")
        stop_event = threading.Event()
        with ThreadPoolExecutor(count, thread_name_prefix="smelt-trial") as pool:
            workers = [pool.submit(self._run_trials, stop_event) for _ in range(count)]
            try:
                end_reasons = [worker.result() for worker in as_completed(workers)]
            except BaseException as error:
                stop_event.set()
                cluster.cancel_tasks()
                if isinstance(error, KeyboardInterrupt):
                    return "interrupted"
                raise
        return "interrupted" if "interrupted" in end_reasons else end_reasons[0]

    def _run_trials(self, stopped: threading.Event) -> str:
        """Run trials one after the other, until `stopped`; return why it ended."""
        from optuna.exceptions import UpdateFinishedTrialError

        study = self.open_study()
        repeated: list[int] = []
        while True:
            if stopped.is_set():
                return "interrupted"
            if self._deadline is not None and self.clock() >= self._deadline:
                return "time"
            with ExitStack() as stack:
                trial = self.queue.ask(study, stack)
                if isinstance(trial, str):
                    return trial
                known_trial = self.queue.known_trial(study, trial)
                if known_trial is not None:
                    self.queue.repeat(study, trial, known_trial)
                    repeated.append(trial.number)
                    continue
                if repeated:  # else their numbers would be missing without a reason
                    numbers = ", ".join(map(str, repeated))
                    self.print_line(f"repeats of earlier trials, not counted: {numbers}")
                    repeated.clear()
                self.print_line(f"trial {trial.number}: {self._chosen_text(trial.params)}: starts")
                try:
                    result = self._run_trial(trial)
                    self.queue.tell(study, trial, result)
                except TimeOverError:
                    self.queue.abandon(study, trial.number)
                    self.print_line(f"trial {trial.number}: not finished: the time limit ended it")
                    return "time"
                except KeyboardInterrupt:
                    self.queue.abandon(study, trial.number)
                    return "interrupted"
                except UpdateFinishedTrialError:
                    self._warn(_taken_over(trial.number))
                    continue
                self.print_line(self.trial_text(Trial(trial.number, trial.params, result)))
                self._require_success(study)

    def _trial_limit(self) -> TimeLimit | None:
        """Return the time limit of a trial that starts; the first one has none, so that there is a result."""
        if self._deadline is None or not self.finished_trials():
            return None
        return TimeLimit(self._deadline, self.clock)

    def try_first(self, point: Mapping[str, Any]) -> None:
        """Try `point`, the value of each parameter, before all others; nothing if the search has begun."""
        self._prepare()
        study = self.open_study()
        if not study.get_trials(deepcopy=False):
            study.enqueue_trial(dict(point))

    def print_line(self, text: str) -> None:
        """Report a line about the search."""
        if self._report is not None:
            self._report(text)

    def _warn(self, message: Message) -> None:
        self.print_line(f"{message.severity}: {message}")

    def finished_trials(self) -> list[Trial]:
        """Return the finished trials in the order of their numbers, without repeated ones."""
        return finished_trials(self.open_study())

    def untried(self) -> dict[str, int | None]:
        """Return the numbers of trials and of points that are left; None: too many points to count."""
        points = self.queue.untried_points(self.open_study().get_trials(deepcopy=False))
        return {
            "trials": max(0, self.trials - len(self.finished_trials())),
            "points": None if points is None else len(points),
        }

    def warnings(self) -> list[Message]:
        """Return the warnings about the study: trials that dead workers have lost."""
        return lost_trials(self.open_study())

    def front(self) -> list[Trial]:
        """Return the Pareto-optimal trials that meet the constraints, the best in the first objective first.

        At most `_MAX_POINTS`, spread over the first objective.
        """
        best = {trial.number for trial in self.open_study().best_trials}
        front = [trial for trial in self.finished_trials() if trial.number in best]
        return spread(sorted(front, key=self._first_objective), _MAX_POINTS)

    def nearest(self) -> Trial | None:
        """Return the trial that violates the constraints least, relative to their limits, or None.

        Trials of which all constraints were measured on all samples come first.
        """
        candidates = [t for t in self.finished_trials() if t.result.violations]
        limits = {
            metric: abs(gate.max_degradation or gate.min or gate.max or 1.0)
            for metric, gate in self.space.constraints.items()
        }

        def distance(trial: Trial) -> float:
            return sum(max(0.0, v) / limits[m] for m, v in trial.result.violations.items())

        def is_partial(trial: Trial) -> bool:
            return trial.result.status == "stopped" or not limits.keys() <= trial.result.violations.keys()

        return min(candidates, key=lambda trial: (is_partial(trial), distance(trial)), default=None)

    def score_on_test(self, trial: Trial) -> dict[str, Any]:
        """Score a trial's last step and the baseline on test, once; return the report of that run.

        The run's folder is points/NAME in the search's folder, its recipe is recipes/NAME.yaml.

        Raises:
            KeyboardInterrupt: the user stopped the run.
        """
        recipe = self.folder / "recipes" / f"{trial.name}.yaml"
        self.space.write_recipe(trial.parameters, recipe)
        plan = self.space.plan_at(trial.parameters)
        options = self._run_options(
            self.folder / "points" / trial.name, frozenset({self.space.leaf}), f"{trial.name} on test"
        )
        report = dict(run_plan(plan, replace(options, on_test=True, pages=True)).report)
        if report["status"] == "interrupted":
            raise KeyboardInterrupt
        return report

    def trial_text(self, trial: Trial) -> str:
        """Return a line about a trial: parameters, values and cost."""
        parameters_text, result = self._chosen_text(trial.parameters), trial.result
        if result.error is not None:
            failure = f"error[{result.error['code']}]: {result.error['message']}"
            return f"trial {trial.number}: {parameters_text}: failed: {failure}"
        values_text = ", ".join(
            f"{name} {objective_text(name, value)}" for name, value in result.values.items()
        )
        status_text = "" if result.status == "feasible" else f" {result.status}"
        if result.status in ("infeasible", "stopped"):
            violated = ", ".join(name for name, violation in result.violations.items() if violation > 0)
            status_text += (
                f" ({violated or 'quality'}{f', {result.samples} samples' if result.samples else ''})"
            )
        return (
            f"trial {trial.number}: {parameters_text}:{status_text} {values_text}; {result.seconds:.0f} s,"
            f" {result.cached_steps} of {result.steps} steps from the store"
        )

    def _chosen_text(self, parameters: Mapping[str, Any]) -> str:
        used_values = self.space.used_values(parameters)
        return " ".join(f"{name}={parameter_text(value)}" for name, value in used_values.items())

    def signs(self) -> dict[str, int]:
        """Return 1 for each objective that is minimized, -1 for each that is maximized."""
        return {objective.name: -1 if objective.maximize else 1 for objective in self.space.objectives}

    def _first_objective(self, trial: Trial) -> tuple[float, int]:
        name, sign = next(iter(self.signs().items()))
        return sign * trial.result.values[name], trial.result.size_bytes or 0

    def _prepare(self) -> None:
        for path in (self.folder, self.folder / "running", self.folder / "trials"):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"{path}: cannot use this folder for the search: {error.strerror}. Choose another folder"
                    " with --out.",
                    code="unusable-folder",
                ) from error

    def open_study(self) -> optuna.Study:
        """Return the study, created if it is new.

        Raises:
            InputError: the storage cannot be opened, is damaged, or has a study of another search.
            RunError: a server that was reached before does not answer.
        """
        import optuna

        pruner = optuna.pruners.SuccessiveHalvingPruner(
            min_resource=next(iter(self._rungs()), 1), reduction_factor=_RUNG_FACTOR
        )
        goals = [objective.maximize for objective in self.space.objectives]
        grid = self.space.parameters if self.space.sampler == "grid" else ()
        return self.storage.open_study(self._identity, goals, pruner, grid, self.queue.validate)

    @property
    def _identity(self) -> str:
        # with --limit the same point has other values
        return json_hash([self.space.identity, self.options.limit])

    def check(self) -> None:
        """Check what `run` needs apart from the recipe: the points of a grid, and the storage.

        Raises:
            InputError: as `run`.
        """
        require_single_process("smelt search")
        if self.space.sampler == "grid":
            next(grid_points(self.space.parameters))
        check_store(self.options.store)
        if self.options.executor is not None:
            open_cluster(self.options.executor)
        self.storage.check(self._identity, self.queue.validate)

    def _require_success(self, study: optuna.Study) -> None:
        """Require that not all of the first trials failed.

        Raises:
            RunError: they did, with the code of the last one.
        """
        results = [trial.result for trial in self.storage.retry(lambda: finished_trials(study))]
        if len(results) >= _MAX_FIRST_FAILURES and all(result.status == "failed" for result in results):
            last = results[-1].error or {}
            raise RunError(
                f"All of the first {_MAX_FIRST_FAILURES} trials failed; the search ends. The last one:"
                f" {last.get('message')}",
                code=str(last.get("code")),
            )

    def _run_trial(self, trial: optuna.Trial) -> TrialResult:
        start_time = time.monotonic()
        try:
            result = self._measure(trial)
        except SmeltError as error:
            message = error.messages[0] if error.messages else error.as_message()
            result = TrialResult("failed", error={"code": message.code, "message": message.message})
        return replace(result, seconds=time.monotonic() - start_time)

    def _measure(self, trial: optuna.Trial) -> TrialResult:
        """Build the trial's artifacts and measure them, cheap things first.

        Raises:
            TimeOverError: the time limit ended it; what was built is stored.
        """
        plan = self.space.plan_at(trial.params)
        name = f"trial {trial.number}"
        options = self._run_options(self.folder / "trials" / f"trial-{trial.number:04d}", label=name)
        options = replace(options, time_limit=self._trial_limit())
        report = self._run(plan, replace(options, scored=False))
        steps = [step for step in report["steps"] if step["name"] != "model"]
        result = TrialResult(
            "infeasible",
            steps=len(steps),
            cached_steps=sum(step["status"] == "cached" for step in steps),
            saved_seconds=sum(step["seconds"] or 0 for step in steps if step["status"] == "cached"),
            size_bytes=self._leaf_of(report)["size_bytes"],
            values=self._values(self._leaf_of(report)),
        )
        size_gate = self.space.constraints.get("size_bytes")
        max_size = None if size_gate is None else size_gate.max
        if max_size is not None and result.size_bytes and result.size_bytes > max_size:
            return replace(result, violations={"size_bytes": result.size_bytes - max_size})
        options = replace(options, only=frozenset({self.space.leaf}), timed=False)
        for num_samples in self._rungs():
            leaf = self._leaf_of(self._run(plan, replace(options, score_limit=num_samples)))
            self.print_line(f"{name}: {_scores_text(leaf)} on {num_samples} samples")
            violations = {m: v for m, v in self._optimistic_violations(leaf).items() if v > 0}
            if violations or self._is_outclassed(trial, leaf, num_samples):
                return replace(result, status="stopped", violations=violations, samples=num_samples)
        leaf = self._leaf_of(self._run(plan, options))
        self.print_line(f"{name}: {_scores_text(leaf)} on all samples")
        result = replace(
            result,
            quality=leaf["quality"],
            differences=leaf["against_baseline"] or {},
            values=self._values(leaf),
            violations=_violations(leaf, self.space.constraints),
        )
        speed_metrics = {*SPEED_METRICS} & set(self.space.constraints)
        timed_values = speed_metrics or {"latency", "memory"} & {
            objective.name for objective in self.space.objectives
        }
        if any(violations > 0 for violations in result.violations.values()):
            return result
        if timed_values:
            leaf = self._leaf_of(self._run(plan, replace(options, timed=True)))
            result = replace(
                result,
                values=self._values(leaf),
                violations=_violations(leaf, self.space.constraints),
                memory_bytes=leaf["peak_memory_bytes"],
                latency=_smallest_batch(leaf),
            )
        if any(violations > 0 for violations in result.violations.values()):
            return result
        missing = [
            objective.name for objective in self.space.objectives if objective.name not in result.values
        ]
        missing += [name for name in self.space.constraints if name not in result.violations]
        if missing:
            raise RunError(
                f"{', '.join(missing)} of {self.space.leaf} was not measured; see {options.out}/log.txt.",
                code="not-measured",
            )
        return replace(result, status="feasible")

    def _run_options(self, out: Path, only: frozenset[str] | None = None, label: str = "") -> RunOptions:
        return RunOptions(
            out, self.store, limit=self.options.limit, quiet=self._report is None, label=label, only=only,
            on_test=False, pages=False, store_cache=self._store_cache, executor=self.options.executor,
            turns=None if self.options.executor else self._turns,
        )  # fmt: skip

    def _run(self, plan: Any, options: RunOptions) -> Mapping[str, Any]:
        """Run the plan and return its report.

        Raises:
            RunError: a step failed.
            TimeOverError: the time limit ended the run.
            KeyboardInterrupt: the user stopped the run.
        """
        report = run_plan(plan, options).report
        if report["status"] == "interrupted":
            if options.time_limit is not None and options.time_limit.ended_run:
                raise TimeOverError
            raise KeyboardInterrupt
        if report["status"] == "error":
            step = next(step for step in report["steps"] if step["error"])
            raise RunError(f"{step['name']}: {step['error']['message']}", code=step["error"]["code"])
        return report

    def _leaf_of(self, report: Mapping[str, Any]) -> dict[str, Any]:
        return dict(next(step for step in report["steps"] if step["name"] == self.space.leaf))

    def _rungs(self) -> list[int]:
        """Return the numbers of samples that a trial is scored on before all of them."""
        assert self.space.plan is not None
        split = self.space.plan.splits.get(self.space.plan.judged_on)
        num_samples = len(split) if split is not None else 0
        num_samples = min(num_samples, self.options.limit or num_samples)
        sizes = itertools.takewhile(
            lambda n: n >= _MIN_RUNG, (num_samples // _RUNG_FACTOR**k for k in (1, 2))
        )
        return sorted(sizes)

    def _values(self, leaf: Mapping[str, Any]) -> dict[str, float]:
        """Return the values of the objectives that were measured.

        Latency is the share of the baseline's time, by paired rounds at the smallest batch size, so that
        trials hours apart are comparable. It is by processor time where other work disturbed the rounds.
        """
        objective_values: dict[str, float] = {}
        for objective in self.space.objectives:
            value: float | None = None
            if objective.name == "size":
                value = leaf["size_bytes"]
            elif objective.name == "memory":
                value = leaf["peak_memory_bytes"]
            elif objective.name == "latency":
                latency = _smallest_batch(leaf) or {}
                ratio = (
                    latency.get("cpu_speedup") if latency.get("stable") is False else latency.get("speedup")
                )
                value = 1 / ratio if ratio else None
            elif objective.name in (leaf["quality"] or {}):
                value = leaf["quality"][objective.name]["value"]
            if value is not None:
                objective_values[objective.name] = float(value)
        return objective_values

    def _optimistic_violations(self, leaf: Mapping[str, Any]) -> dict[str, float]:
        """Return by how much each constraint is violated at the better end of the 95 % interval."""
        violations = {}
        for metric, gate in self.space.constraints.items():
            score, test = leaf["quality"].get(metric), (leaf["against_baseline"] or {}).get(metric)
            if score is None:
                continue
            sign = 1 if score["higher_is_better"] else -1
            if gate.max_degradation is not None and test and test["ci95"]:
                violations[metric] = min(-sign * end for end in test["ci95"]) - gate.max_degradation
            elif score["ci95"] and gate.min is not None:
                violations[metric] = gate.min - score["ci95"][1]
            elif score["ci95"] and gate.max is not None:
                violations[metric] = score["ci95"][0] - gate.max
        return violations

    def _is_outclassed(self, trial: optuna.Trial, leaf: Mapping[str, Any], rows: int) -> bool:
        """Return whether successive halving stops the trial: only where a metric is the single objective.

        Trials are compared by their paired difference from the baseline on the same samples.
        """
        [first_objective, *other_objectives] = self.space.objectives
        if other_objectives or first_objective.name in COSTS:
            return False
        test = (leaf["against_baseline"] or {}).get(first_objective.name)
        value = test["difference"] if test else leaf["quality"][first_objective.name]["value"]

        def prune() -> bool:
            trial.report(value, rows)
            return trial.should_prune()

        return self.storage.retry(prune)


def _taken_over(number: int) -> Message:
    return warning(
        "trial-taken-over",
        f"Trial {number} was ended by another worker, to which this one seemed dead (no heartbeat for"
        f" {GRACE_S / 60:.0f} minutes). Its result is not recorded; the point is queued again.",
    )


def _scores_text(leaf: Mapping[str, Any]) -> str:
    return f"{leaf['name']}: " + ", ".join(
        f"{metric} {score['value']:.4g}" for metric, score in leaf["quality"].items()
    )


def _smallest_batch(leaf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the times of a step at its smallest batch size; None if not measured."""
    return min(leaf["latency"] or [], key=lambda row: row["batch_size"], default=None)


def _violations(leaf: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much each gate of the constraints is violated; negative within the limit.

    The speed-up is by processor time where other work disturbed the rounds, as in the objective.
    """
    violations: dict[str, float] = {}
    latency = _smallest_batch(leaf) or {}
    for gate in leaf["gates"] or []:
        value = gate["value"] if gate["bound"] is None else gate["bound"]
        if gate["metric"] == "speedup" and latency.get("stable") is False:
            value = latency.get("cpu_speedup") or value
        if gate["metric"] in limits and value is not None:
            amount = gate["limit"] - value if gate["kind"] == "min" else value - gate["limit"]
            violations[gate["metric"]] = max(amount, violations.get(gate["metric"], amount))
    return violations


def spread(trials: Sequence[Trial], most: int) -> list[Trial]:
    """Return at most `most` of `trials`, with the first and the last, evenly spread."""
    if len(trials) <= most:
        return list(trials)
    return [trials[round(index * (len(trials) - 1) / (most - 1))] for index in range(most)]
