"""Search the space of a recipe with Optuna: trials, constraints, early stopping, several workers, resuming.

A trial is a run of the recipe at one point, in a folder of its own. Artifacts and scores are in one store, so
a trial costs only what no other trial has done. It is checked from cheap to expensive: size, quality on
growing parts of the validation samples, quality on all of them, latency. A trial that cannot meet the
constraints ends at the first of these that shows it.

A study lives in its storage (a journal file in the search's folder, or any database of Optuna by URL), so it
goes on after an interruption, and several workers share it: the same command, started again or elsewhere with
the same folders. A lock shows which trials still have a worker; the trials of dead workers are done again.

The sampler is seeded for each trial by the study's seed and the number of trials before it: equal studies
sample equal trials, also after interruptions, as far as the values are equal. Times never are.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError, RunError, SmeltError
from smelt.core.files import json_hash, write_atomically
from smelt.core.locks import file_lock, is_file_lock_held
from smelt.pipeline.execute.run import RunOptions, run_plan
from smelt.pipeline.execute.run_folder import default_store
from smelt.pipeline.recipe.recipe import SPEED_METRICS
from smelt.pipeline.search.sampling import (
    distribution_of,
    make_sampler,
    open_study,
)
from smelt.pipeline.search.space import COSTS, Sampler, SearchSpace, objective_text, parameter_text

if TYPE_CHECKING:
    import optuna

DEFAULT_TRIALS = 50
_RESULT, _REPEATS = "result", "repeats"
_MAX_REPEATS = 50  # sampled points in a row that are known already: the space is exhausted
_MAX_FIRST_FAILURES = 5  # a search whose first trials all fail has a mistake that no trial will avoid
_RUNG_FACTOR = 4  # each part of the samples is this many times as large as the one before
_MIN_RUNG = 32  # samples; intervals of fewer stop no trial
_MAX_POINTS = 12  # of the front, scored on test


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search from the command line.

    out: the search's folder (default: runs/NAME-search). store: as for a run. trials, max_minutes, sampler:
    instead of the recipe's. storage: URL of a database (default: a journal file in `out`). limit: use at most
    this many samples of every split.
    """

    out: Path | None = None
    store: Path | None = None
    trials: int | None = None
    max_minutes: float | None = None
    storage: str | None = None
    sampler: Sampler | None = None
    limit: int | None = None


@dataclass(frozen=True)
class TrialResult:
    """What a trial measured.

    status: feasible; infeasible (violates a constraint); stopped (on a part of the samples it was clear that
    it cannot win); failed (see `error`). values: of the objectives that were measured. violations: by
    constraint, positive if violated. seconds: wall-clock time of the trial; saved_seconds: building time of
    the artifacts that the store had. steps, cached_steps: number of steps, and of those from the store.
    latency: the last step's row of the report at the smallest batch size.
    """

    status: str
    values: Mapping[str, float] = field(default_factory=dict)
    violations: Mapping[str, float] = field(default_factory=dict)
    quality: Mapping[str, Any] = field(default_factory=dict)
    differences: Mapping[str, Any] = field(default_factory=dict)
    size_bytes: int | None = None
    memory_bytes: int | None = None
    latency: Mapping[str, Any] | None = None
    seconds: float = 0.0
    saved_seconds: float = 0.0
    steps: int = 0
    cached_steps: int = 0
    samples: int | None = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Trial:
    """A finished trial: its number in the study, parameters and result."""

    number: int
    parameters: Mapping[str, Any]
    result: TrialResult

    @property
    def name(self) -> str:
        """The name of its folder and recipe."""
        return f"trial-{self.number:04d}"


class Search:
    """A study of a search space in a folder."""

    def __init__(self, space: SearchSpace, options: SearchOptions) -> None:
        self.options = options
        if options.sampler is not None:
            settings = space.settings.model_copy(update={"sampler": options.sampler})
            space = replace(space, settings=settings)
        self.space = space
        self.folder = (options.out or Path("runs") / f"{space.path.stem}-search").resolve()
        self.store = options.store or default_store(self.folder / "trials")[0]
        self.trials = options.trials or space.settings.trials or DEFAULT_TRIALS
        self.max_minutes = options.max_minutes or space.settings.max_minutes
        assert space.plan is not None
        self.seed = space.plan.recipe.seed
        self.baseline = space.plan.recipe.baseline
        self._distributions = {each.name: distribution_of(each) for each in space.parameters}

    def run(self, report: Any = lambda text: None) -> str:
        """Run trials until their number, the time limit or the end of the space; return why it ended.

        Trials of all workers count. Codes: `trials`, `time`, `exhausted`, `interrupted`.

        Args:
            report: called with a line about each trial.

        Raises:
            InputError: the folder or the storage cannot be used, or belongs to another search.
            RunError: all of the first trials failed.
        """
        self._prepare()
        study = self.open_study()
        ends = None if self.max_minutes is None else time.monotonic() + 60 * self.max_minutes
        repeats = 0
        while True:
            if ends is not None and time.monotonic() >= ends:
                return "time"
            with ExitStack() as stack:
                trial = self._ask(study, stack)
                if trial is None:
                    return "trials" if not self._is_grid_done(study) else "exhausted"
                known = self._same_trial(study, trial)
                if known is not None:
                    repeats += 1
                    self._repeat(study, trial, known)
                    if repeats >= _MAX_REPEATS and self.space.sampler != "grid":
                        return "exhausted"
                    continue
                repeats = 0
                try:
                    result = self._run_trial(trial)
                except KeyboardInterrupt:
                    self._abandon(study, trial.number)
                    return "interrupted"
                self._tell(study, trial, result)
                report(self.trial_text(Trial(trial.number, trial.params, result)))
                self._require_success(study)

    def try_first(self, point: Mapping[str, Any]) -> None:
        """Try `point`, the value of each parameter, before all others; nothing if the search has begun."""
        self._prepare()
        study = self.open_study()
        if not study.get_trials(deepcopy=False):
            study.enqueue_trial(dict(point))

    def finished_trials(self) -> list[Trial]:
        """Return the finished trials in the order of their numbers, without repeated ones."""
        return _finished(self.open_study())

    def front(self) -> list[Trial]:
        """Return the Pareto-optimal trials that meet the constraints, the best in the first objective first.

        At most `_MAX_POINTS`, spread over the first objective.
        """
        able = [trial for trial in self.finished_trials() if trial.result.status == "feasible"]
        return spread(sorted(pareto_optimal(able, self.signs()), key=self._first_objective), _MAX_POINTS)

    def nearest(self) -> Trial | None:
        """Return the trial that violates the constraints least, relative to their limits, or None."""
        measured = [t for t in self.finished_trials() if t.result.violations]
        limits = {
            metric: abs(gate.max_drop or gate.min or gate.max or 1.0)
            for metric, gate in self.space.settings.subject_to.items()
        }

        def distance(trial: Trial) -> float:
            return sum(max(0.0, v) / limits[m] for m, v in trial.result.violations.items())

        return min(measured, key=distance, default=None)

    def score_on_test(self, trial: Trial) -> dict[str, Any]:
        """Score a trial's last step and the baseline on test, once; return the report of that run.

        The run's folder is points/NAME in the search's folder, its recipe is recipes/NAME.yaml.

        Raises:
            KeyboardInterrupt: the user stopped the run.
        """
        recipe = self.folder / "recipes" / f"{trial.name}.yaml"
        recipe.parent.mkdir(exist_ok=True)
        write_atomically(recipe, self.space.portable_recipe(trial.parameters))
        plan = self.space.plan_at(trial.parameters)
        options = self._run_options(self.folder / "points" / trial.name, only=frozenset({self.space.leaf}))
        report = dict(run_plan(plan, replace(options, on_test=True, pages=True)).report)
        if report["status"] == "interrupted":
            raise KeyboardInterrupt
        return report

    def trial_text(self, trial: Trial) -> str:
        """Return a line about a trial: parameters, values and cost."""
        used = self.space.used_values(trial.parameters)
        chosen = " ".join(f"{name}={parameter_text(value)}" for name, value in used.items())
        result = trial.result
        if result.error is not None:
            failure = f"error[{result.error['code']}]: {result.error['message']}"
            return f"trial {trial.number}: {chosen}: failed: {failure}"
        shown = ", ".join(f"{name} {objective_text(name, value)}" for name, value in result.values.items())
        note = "" if result.status == "feasible" else f" {result.status}"
        if result.status in ("infeasible", "stopped"):
            worst = ", ".join(name for name, over in result.violations.items() if over > 0)
            note += f" ({worst or 'quality'}{f', {result.samples} samples' if result.samples else ''})"
        return (
            f"trial {trial.number}: {chosen}:{note} {shown}; {result.seconds:.0f} s,"
            f" {result.cached_steps} of {result.steps} steps from the store"
        )

    def signs(self) -> dict[str, int]:
        """Return 1 for each objective that is minimized, -1 for each that is maximized."""
        return {each.name: -1 if each.maximize else 1 for each in self.space.objectives}

    def _first_objective(self, trial: Trial) -> tuple[float, int]:
        name, sign = next(iter(self.signs().items()))
        return sign * trial.result.values[name], trial.result.size_bytes or 0

    def _prepare(self) -> None:
        for place in (self.folder, self.folder / "running", self.folder / "trials"):
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"{place}: cannot use this folder for the search: {error.strerror}. Choose another folder"
                    " with --out.",
                    code="unusable-folder",
                ) from error

    def open_study(self) -> optuna.Study:
        """Return the study, created if it is new.

        Raises:
            InputError: the storage cannot be opened, or has a study of another search.
        """
        import optuna

        pruner = optuna.pruners.SuccessiveHalvingPruner(
            min_resource=next(iter(self._rungs()), 1), reduction_factor=_RUNG_FACTOR
        )
        goals = [each.maximize for each in self.space.objectives]
        grid = self.space.parameters if self.space.sampler == "grid" else ()
        # with --limit the same point has other values
        identity = json_hash([self.space.identity, self.options.limit])
        with file_lock(self.folder / "study.lock"):
            return open_study(
                self.options.storage, self.folder, self.space.path.stem, identity, goals, pruner, grid
            )

    def _ask(self, study: optuna.Study, stack: ExitStack) -> optuna.Trial | None:
        """Return the next trial, locked as running until `stack` is closed; None if there are enough."""
        from optuna.trial import TrialState

        with file_lock(self.folder / "ask.lock"):
            self._reclaim(study)
            trials = study.get_trials(deepcopy=False)
            waiting = any(trial.state == TrialState.WAITING for trial in trials)
            begun = [
                trial for trial in trials if not _is_abandoned(trial) and trial.state != TrialState.WAITING
            ]
            counted = [trial for trial in begun if _REPEATS not in trial.user_attrs]
            if len(counted) >= self.trials or (self.space.sampler == "grid" and not waiting):
                return None
            study.sampler = make_sampler(self.space.sampler, self.seed + len(begun))
            trial = study.ask(self._distributions)
            stack.enter_context(file_lock(self._running_lock(trial.number)))
            return trial

    def _is_grid_done(self, study: optuna.Study) -> bool:
        trials = study.get_trials(deepcopy=False)
        return self.space.sampler == "grid" and not any(t.state.name == "WAITING" for t in trials)

    def _running_lock(self, number: int) -> Path:
        return self.folder / "running" / f"{number}.lock"

    def _reclaim(self, study: optuna.Study) -> None:
        """End the running trials whose worker has died, and queue those without a result again."""
        from optuna.trial import TrialState

        running = (TrialState.RUNNING,)
        numbers = [trial.number for trial in study.get_trials(deepcopy=False, states=running)]
        free = [number for number in numbers if not is_file_lock_held(self._running_lock(number))]
        # read again: a worker may have finished its trial, and unlocked it, since the first reading
        for trial in study.get_trials(deepcopy=False, states=running) if free else ():
            if trial.number not in free:
                continue
            if _RESULT in trial.user_attrs:  # its worker died before `tell`
                self._finish(study, trial.number, TrialResult(**trial.user_attrs[_RESULT]))
            else:
                self._abandon(study, trial.number)

    def _abandon(self, study: optuna.Study, number: int) -> None:
        """End a trial without a result, and queue its point again, if all of it was sampled."""
        import optuna

        point = study.get_trials(deepcopy=False)[number].params
        # queued first: a worker that dies in between leaves the point twice, not lost
        if len(point) == len(self._distributions):  # else the next trial, with the same seed, samples it
            study.enqueue_trial(point)
        study.tell(number, state=optuna.trial.TrialState.FAIL)

    def _same_trial(self, study: optuna.Study, trial: optuna.Trial) -> optuna.trial.FrozenTrial | None:
        """Return an earlier trial of the same recipe, finished or still running; None if there is none.

        Parameters of stages that are not used make no difference.
        """
        from optuna.trial import TrialState

        own = self.space.value_at(trial.params)
        for other in study.get_trials(deepcopy=False)[: trial.number]:
            known = _RESULT in other.user_attrs or other.state == TrialState.RUNNING
            if known and self.space.value_at(other.params) == own:
                return other
        return None

    def _repeat(self, study: optuna.Study, trial: optuna.Trial, known: optuna.trial.FrozenTrial) -> None:
        """End a trial that repeats the trial `known`, with the same result if that is finished."""
        from optuna.trial import TrialState

        if _RESULT in known.user_attrs:
            self._tell(study, trial, TrialResult(**known.user_attrs[_RESULT]), repeated=known.number)
        else:
            trial.set_user_attr(_REPEATS, known.number)
            study.tell(trial, state=TrialState.FAIL)

    def _tell(
        self, study: optuna.Study, trial: optuna.Trial, result: TrialResult, repeated: int | None = None
    ) -> None:
        for name, over in result.violations.items():
            trial.set_constraint(name, over)
        if repeated is not None:
            trial.set_user_attr(_REPEATS, repeated)
        trial.set_user_attr(_RESULT, json.loads(json.dumps(asdict(result))))  # last: it is complete now
        self._finish(study, trial.number, result)

    def _finish(self, study: optuna.Study, number: int, result: TrialResult) -> None:
        from optuna.trial import TrialState

        values = [result.values[name] for name in self.signs() if name in result.values]
        if result.status == "failed":
            study.tell(number, state=TrialState.FAIL)
        elif len(values) < len(self.space.objectives) or result.status == "stopped":
            study.tell(number, state=TrialState.PRUNED)
        else:
            study.tell(number, values)

    def _require_success(self, study: optuna.Study) -> None:
        """Require that not all of the first trials failed.

        Raises:
            RunError: they did, with the code of the last one.
        """
        results = [trial.result for trial in _finished(study)]
        if len(results) == _MAX_FIRST_FAILURES and all(each.status == "failed" for each in results):
            last = results[-1].error or {}
            raise RunError(
                f"All of the first {_MAX_FIRST_FAILURES} trials failed; the search ends. The last one:"
                f" {last.get('message')}",
                code=str(last.get("code")),
            )

    def _run_trial(self, trial: optuna.Trial) -> TrialResult:
        started = time.monotonic()
        try:
            result = self._measure(trial)
        except SmeltError as error:
            found = error.found[0] if error.found else error.as_message()
            result = TrialResult("failed", error={"code": found.code, "message": found.message})
        return replace(result, seconds=time.monotonic() - started)

    def _measure(self, trial: optuna.Trial) -> TrialResult:
        """Build the trial's artifacts and measure them, cheap things first."""
        plan = self.space.plan_at(trial.params)
        options = self._run_options(self.folder / "trials" / f"trial-{trial.number:04d}")
        built = self._run(plan, replace(options, scored=False))
        steps = [step for step in built["steps"] if step["name"] != "model"]
        result = TrialResult(
            "infeasible",
            steps=len(steps),
            cached_steps=sum(step["status"] == "cached" for step in steps),
            saved_seconds=sum(step["seconds"] or 0 for step in steps if step["status"] == "cached"),
            size_bytes=self._leaf_of(built)["size_bytes"],
            values=self._values(self._leaf_of(built)),
        )
        limit = self.space.settings.subject_to.get("size_bytes")
        if (
            limit is not None
            and limit.max is not None
            and result.size_bytes
            and result.size_bytes > limit.max
        ):
            return replace(result, violations={"size_bytes": result.size_bytes - limit.max})
        options = replace(options, only=frozenset({self.space.leaf}), timed=False)
        for rows in self._rungs():
            leaf = self._leaf_of(self._run(plan, replace(options, score_limit=rows)))
            over = {m: v for m, v in self._optimistic_violations(leaf).items() if v > 0}
            if over or self._is_outclassed(trial, leaf, rows):
                return replace(result, status="stopped", violations=over, samples=rows)
        leaf = self._leaf_of(self._run(plan, options))
        result = replace(
            result,
            quality=leaf["quality"],
            differences=leaf["against_baseline"] or {},
            values=self._values(leaf),
            violations=_violations(leaf, self.space.settings.subject_to),
        )
        slow = {*SPEED_METRICS} & set(self.space.settings.subject_to)
        timed = slow or {"latency", "memory"} & {each.name for each in self.space.objectives}
        if any(over > 0 for over in result.violations.values()):
            return result
        if timed:
            leaf = self._leaf_of(self._run(plan, replace(options, timed=True)))
            result = replace(
                result,
                values=self._values(leaf),
                violations=_violations(leaf, self.space.settings.subject_to),
                memory_bytes=leaf["peak_memory_bytes"],
                latency=_smallest_batch(leaf),
            )
        if any(over > 0 for over in result.violations.values()):
            return result
        missing = [each.name for each in self.space.objectives if each.name not in result.values]
        missing += [name for name in self.space.settings.subject_to if name not in result.violations]
        if missing:
            raise RunError(
                f"{', '.join(missing)} of {self.space.leaf} was not measured; see {options.out}/log.txt.",
                code="not-measured",
            )
        return replace(result, status="feasible")

    def _run_options(self, out: Path, only: frozenset[str] | None = None) -> RunOptions:
        return RunOptions(
            out, self.store, limit=self.options.limit, quiet=True, only=only, on_test=False, pages=False
        )

    def _run(self, plan: Any, options: RunOptions) -> Mapping[str, Any]:
        """Run the plan and return its report.

        Raises:
            RunError: a step failed.
            KeyboardInterrupt: the user stopped the run.
        """
        report = run_plan(plan, options).report
        if report["status"] == "interrupted":
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
        rows = len(split) if split is not None else 0
        rows = min(rows, self.options.limit or rows)
        sizes = itertools.takewhile(lambda n: n >= _MIN_RUNG, (rows // _RUNG_FACTOR**k for k in (1, 2)))
        return sorted(sizes)

    def _values(self, leaf: Mapping[str, Any]) -> dict[str, float]:
        """Return the values of the objectives that were measured.

        Latency is the share of the baseline's time, by paired rounds at the smallest batch size, so that
        trials hours apart are comparable. It is by processor time where other work disturbed the rounds.
        """
        found: dict[str, float] = {}
        for objective in self.space.objectives:
            value: float | None = None
            if objective.name == "size":
                value = leaf["size_bytes"]
            elif objective.name == "memory":
                value = leaf["peak_memory_bytes"]
            elif objective.name == "latency":
                row = _smallest_batch(leaf) or {}
                ratio = row.get("cpu_speedup") if row.get("stable") is False else row.get("speedup")
                value = 1 / ratio if ratio else None
            elif objective.name in (leaf["quality"] or {}):
                value = leaf["quality"][objective.name]["value"]
            if value is not None:
                found[objective.name] = float(value)
        return found

    def _optimistic_violations(self, leaf: Mapping[str, Any]) -> dict[str, float]:
        """Return by how much each constraint is violated at the better end of the 95 % interval."""
        over = {}
        for metric, gate in self.space.settings.subject_to.items():
            score, test = leaf["quality"].get(metric), (leaf["against_baseline"] or {}).get(metric)
            if score is None:
                continue
            sign = 1 if score["higher_is_better"] else -1
            if gate.max_drop is not None and test and test["ci95"]:
                over[metric] = min(-sign * end for end in test["ci95"]) - gate.max_drop
            elif score["ci95"] and gate.min is not None:
                over[metric] = gate.min - score["ci95"][1]
            elif score["ci95"] and gate.max is not None:
                over[metric] = score["ci95"][0] - gate.max
        return over

    def _is_outclassed(self, trial: optuna.Trial, leaf: Mapping[str, Any], rows: int) -> bool:
        """Return whether successive halving stops the trial: only where a metric is the single objective.

        Trials are compared by their paired difference from the baseline on the same samples.
        """
        [first, *more] = self.space.objectives
        if more or first.name in COSTS:
            return False
        test = (leaf["against_baseline"] or {}).get(first.name)
        trial.report(test["difference"] if test else leaf["quality"][first.name]["value"], rows)
        return trial.should_prune()


def _smallest_batch(leaf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the times of a step at its smallest batch size; None if not measured."""
    return min(leaf["latency"] or [], key=lambda row: row["batch_size"], default=None)


def _violations(leaf: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much each gate of the constraints is violated; negative within the limit.

    The speed-up is by processor time where other work disturbed the rounds, as in the objective.
    """
    over: dict[str, float] = {}
    row = _smallest_batch(leaf) or {}
    for gate in leaf["gates"] or []:
        value = gate["value"] if gate["bound"] is None else gate["bound"]
        if gate["metric"] == "speedup" and row.get("stable") is False:
            value = row.get("cpu_speedup") or value
        if gate["metric"] in limits and value is not None:
            amount = gate["limit"] - value if gate["kind"] == "min" else value - gate["limit"]
            over[gate["metric"]] = max(amount, over.get(gate["metric"], amount))
    return over


def pareto_optimal(trials: Sequence[Trial], signs: Mapping[str, int]) -> list[Trial]:
    """Return the trials that no other one dominates. signs: 1 to minimize a value, -1 to maximize it."""
    points = [tuple(sign * trial.result.values[name] for name, sign in signs.items()) for trial in trials]
    return [
        trial
        for trial, point in zip(trials, points, strict=True)
        if not any(
            other != point and all(o <= p for o, p in zip(other, point, strict=True)) for other in points
        )
    ]


def spread(trials: Sequence[Trial], most: int) -> list[Trial]:
    """Return at most `most` of `trials`, with the first and the last, evenly spread."""
    if len(trials) <= most:
        return list(trials)
    return [trials[round(at * (len(trials) - 1) / (most - 1))] for at in range(most)]


def _finished(study: optuna.Study) -> list[Trial]:
    return [
        Trial(trial.number, trial.params, TrialResult(**trial.user_attrs[_RESULT]))
        for trial in study.get_trials(deepcopy=False)
        if _RESULT in trial.user_attrs and _REPEATS not in trial.user_attrs
    ]


def _is_abandoned(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether the trial ended without a result, so that its point was queued again."""
    from optuna.trial import TrialState

    return trial.state == TrialState.FAIL and not {_RESULT, _REPEATS} & trial.user_attrs.keys()
