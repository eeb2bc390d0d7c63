"""The trials of a study: their results, and the queue from which several workers take them.

The next worker that asks for a trial ends those whose worker has died. The points of trials that ended
without a result are queued again, so a dead worker loses its running trial only.
"""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from smelt.core.errors import RunError
from smelt.core.files import json_hash
from smelt.pipeline.search.parameters import Parameter
from smelt.pipeline.search.space import (
    SearchSpace,
    distribution_of,
    grid_points,
    make_sampler,
    number_of_points,
)
from smelt.pipeline.search.storage import StudyStorage, lost_trials, point_of, trial_owner

if TYPE_CHECKING:
    import optuna

_RESULT, _REPEATS = "result", "repeats"
_MAX_SAMPLER_REPEATS = 10  # known points in a row; then points are drawn elsewhere
_MAX_REPEATS = 50  # known points in a row of which the last 40 are random: the space is exhausted
_MAX_ENUMERATED = 10_000  # points of a space that is enumerated to find untried ones


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


class TrialQueue:
    """The next trials of a study, for several workers.

    Args:
        space: the search space.
        storage: of the study.
        most: number of trials.
        seed: of the samplers.
    """

    def __init__(self, space: SearchSpace, storage: StudyStorage, most: int, seed: int) -> None:
        self.space, self.storage, self.most, self.seed = space, storage, most, seed
        self.distributions = {parameter.name: distribution_of(parameter) for parameter in space.parameters}

    def ask(self, study: optuna.Study, stack: ExitStack) -> optuna.Trial | Literal["trials", "exhausted"]:
        """Return the next trial, claimed for this process until `stack` is closed, or why there is none.

        It may be of a known point (`known_trial`).

        Raises:
            InputError, RunError: as `StudyStorage.retry`.
        """
        return self.storage.retry(lambda: self._ask(study, stack))

    def _ask(self, study: optuna.Study, stack: ExitStack) -> optuna.Trial | Literal["trials", "exhausted"]:
        from optuna.trial import TrialState

        with self.storage.lock("ask"), ExitStack() as claim_stack:
            self.reclaim(study)
            self._queue_again(study)
            trials = study.get_trials(deepcopy=False)
            has_waiting = any(trial.state == TrialState.WAITING for trial in trials)
            started_trials = [
                trial for trial in trials if not _is_abandoned(trial) and trial.state != TrialState.WAITING
            ]
            sampler, seed = self.space.sampler, self.seed + len(started_trials)
            if sampler == "grid" and not has_waiting:
                return "exhausted"
            if sum(_REPEATS not in trial.user_attrs for trial in started_trials) >= self.most:
                return "trials"
            # counted in the study, not by this worker: a search that is resumed samples the same trials
            num_repeats = len(started_trials) - max(
                (
                    position
                    for position, trial in enumerate(started_trials, 1)
                    if _REPEATS not in trial.user_attrs
                ),
                default=0,
            )
            if num_repeats >= _MAX_SAMPLER_REPEATS and not has_waiting and sampler != "grid":
                sampler = "random"
                untried = self.untried_points(trials)
                if untried == []:
                    return "exhausted"
                if untried is not None:
                    study.enqueue_trial(random.Random(seed).choice(untried))
                elif num_repeats >= _MAX_REPEATS:
                    return "exhausted"
            study.sampler = make_sampler(sampler, seed)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Heartbeat of storage")  # `claim` records it
                trial = study.ask(self.distributions)
            self.storage.claim(study, trial, claim_stack)
            stack.push(claim_stack.pop_all())
            return trial

    def _queue_again(self, study: optuna.Study) -> None:
        """Queue the points of trials that ended without a result, each once.

        It is found out from the trials, not recorded when one ends: a worker that dies in between loses none.
        """
        trials = study.get_trials(deepcopy=False)
        points = {json_hash(trial.params): trial.params for trial in trials if _is_abandoned(trial)}
        known_hashes = (
            {json_hash(point_of(trial)) for trial in trials if not _is_abandoned(trial)} if points else ()
        )
        for key, point in points.items():
            # of an incomplete point the next trial, with the same seed, samples the same
            if key not in known_hashes and len(point) == len(self.distributions):
                study.enqueue_trial(point)

    def untried_points(self, trials: Sequence[optuna.trial.FrozenTrial]) -> list[dict[str, Any]] | None:
        """Return a point for each recipe that no trial has; None if the space is too large to enumerate."""
        if number_of_points(self.space.parameters) > _MAX_ENUMERATED:
            return None
        known_hashes = {self._recipe_hash(trial.params) for trial in trials if _is_known(trial)}
        points = {self._recipe_hash(point): point for point in grid_points(self.space.parameters)}
        return [point for key, point in points.items() if key not in known_hashes]

    def _recipe_hash(self, point: Mapping[str, Any]) -> str:
        # a sampler and a grid may differ in the last digit of the same step
        rounded = {k: float(f"{v:.12g}") if isinstance(v, float) else v for k, v in point.items()}
        return json_hash(self.space.value_at(rounded))

    def reclaim(self, study: optuna.Study) -> None:
        """End the running trials whose worker has died. The caller holds the lock of `ask`."""
        from optuna.trial import TrialState

        running = (TrialState.RUNNING,)
        dead_workers = self.storage.dead_workers(study.get_trials(deepcopy=False, states=running))
        # read again: a worker may have finished its trial, and ended, since the first reading
        for trial in study.get_trials(deepcopy=False, states=running) if dead_workers else ():
            if trial.number not in dead_workers:
                continue
            if _RESULT in trial.user_attrs:  # its worker died before `tell`
                self._finish(study, trial.number, read_result(trial))
                continue
            if dead_workers[trial.number]:
                self.storage.record_loss(study, trial.number, dead_workers[trial.number])
            _fail(study, trial.number)
        self.storage.fail_stale_trials(study)

    def abandon(self, study: optuna.Study, number: int) -> None:
        """End an interrupted trial without a result; `ask` queues its point again."""
        with suppress(RunError):  # during an outage: its worker ends now, so `reclaim` ends it
            self.storage.retry(lambda: _fail(study, number), patience_s=0)

    def known_trial(self, study: optuna.Study, trial: optuna.Trial) -> optuna.trial.FrozenTrial | None:
        """Return an earlier trial of the same recipe, finished or still running; None if there is none.

        Parameters of stages that are not used make no difference.
        """
        recipe_hash = self._recipe_hash(trial.params)
        trials = self.storage.retry(lambda: study.get_trials(deepcopy=False))
        for earlier_trial in trials[: trial.number]:
            if _is_known(earlier_trial) and self._recipe_hash(earlier_trial.params) == recipe_hash:
                return earlier_trial
        return None

    def repeat(self, study: optuna.Study, trial: optuna.Trial, known: optuna.trial.FrozenTrial) -> None:
        """End a trial that repeats the trial `known`, with the same result if that is finished."""

        def end() -> None:
            trial.set_user_attr(_REPEATS, known.number)
            _fail(study, trial.number)

        if _RESULT in known.user_attrs:
            self.tell(study, trial, read_result(known), repeated=known.number)
        else:
            self.storage.retry(end)

    def tell(
        self, study: optuna.Study, trial: optuna.Trial, result: TrialResult, repeated: int | None = None
    ) -> None:
        """Store the result of a trial and end it. repeated: number of the trial that it repeats.

        Raises:
            UpdateFinishedTrialError: the trial was ended meanwhile, since its worker counted as dead.
            RunError: as `StudyStorage.retry`.
        """
        values = json.loads(json.dumps(asdict(result)))

        def store() -> None:
            constraints = trial.constraints
            for name, violation in result.violations.items():
                if name not in constraints:
                    trial.set_constraint(name, violation)
            if repeated is not None:
                trial.set_user_attr(_REPEATS, repeated)
            # last: it is complete now
            trial.set_user_attr(_RESULT, {"sha256": _result_hash(trial.params, values), "measured": values})
            self._finish(study, trial.number, result)

        self.storage.retry(store)

    def _finish(self, study: optuna.Study, number: int, result: TrialResult) -> None:
        from optuna.trial import TrialState

        values = [
            result.values[objective.name]
            for objective in self.space.objectives
            if objective.name in result.values
        ]
        if result.status == "failed":
            _fail(study, number)
        elif len(values) < len(self.space.objectives) or result.status == "stopped":
            study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
        else:
            study.tell(number, values, skip_if_finished=True)

    def validate(self, study: optuna.Study) -> None:
        """Check what the study's trials contain: another program, or a disk, may have changed them.

        Raises:
            ValueError: a trial has a point outside the space, or a result that it was not stored with.
        """
        from optuna.trial import TrialState

        lost_trials(study)
        for trial in study.get_trials(deepcopy=False):
            name = f"trial {trial.number}"
            point = point_of(trial)
            if not _is_within(point, self.space.parameters):
                raise ValueError(f"{name} has a point outside the space: {point}")
            if trial.distributions != {each: self.distributions[each] for each in trial.params}:
                raise ValueError(f"{name} has a parameter with another range")
            if not all(math.isfinite(step * value) for step, value in trial.intermediate_values.items()):
                raise ValueError(f"{name} has an intermediate value that is no number")
            trial_owner(trial)
            if _RESULT in trial.user_attrs:
                result = read_result(trial)
                if trial.state == TrialState.COMPLETE and trial.values != [
                    result.values[each.name] for each in self.space.objectives
                ]:
                    raise ValueError(f"{name} has other values than its result")
                if trial.state == TrialState.COMPLETE and trial.constraints != result.violations:
                    raise ValueError(f"{name} has other constraints than its result")
            elif trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                raise ValueError(f"{name} is finished and has no result")


def _fail(study: optuna.Study, number: int) -> None:
    from optuna.trial import TrialState

    study.tell(number, state=TrialState.FAIL, skip_if_finished=True)


def _is_within(point: Mapping[str, Any], parameters: Sequence[Parameter]) -> bool:
    by_name = {parameter.name: parameter for parameter in parameters}
    return point.keys() <= by_name.keys() and all(
        value in by_name[name].labels
        if by_name[name].choices
        else by_name[name].low <= value <= by_name[name].high
        for name, value in point.items()
    )


def read_result(trial: optuna.trial.FrozenTrial) -> TrialResult:
    """Return the stored result of a trial.

    Raises:
        ValueError: the result or the trial's parameters are not those that were stored.
    """
    stored = trial.user_attrs[_RESULT]
    if stored["sha256"] != _result_hash(trial.params, stored["measured"]):
        raise ValueError(f"trial {trial.number} has another result than it was stored with")
    return TrialResult(**stored["measured"])


def _result_hash(parameters: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    return json_hash([parameters, measured])


def objective_text(name: str, value: float) -> str:
    """Return the value of an objective for a reader: sizes in MB, `latency` as a share."""
    return f"{value / 1e6:.4g} MB" if name in ("size", "memory", "size_bytes") else f"{value:.4g}"


def parameter_text(value: Any) -> str:
    """Return the value of a parameter for a reader."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def finished_trials(study: optuna.Study) -> list[Trial]:
    """Return the finished trials in the order of their numbers, without repeated ones."""
    return [
        Trial(trial.number, trial.params, read_result(trial))
        for trial in study.get_trials(deepcopy=False)
        if _RESULT in trial.user_attrs and _REPEATS not in trial.user_attrs
    ]


def _is_known(trial: optuna.trial.FrozenTrial) -> bool:
    from optuna.trial import TrialState

    return _RESULT in trial.user_attrs or trial.state == TrialState.RUNNING


def _is_abandoned(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether the trial ended without a result, so that its point was queued again."""
    from optuna.trial import TrialState

    return trial.state == TrialState.FAIL and not {_RESULT, _REPEATS} & trial.user_attrs.keys()
