"""The trials of a study: their results, and the queue from which several workers take them.

A lock shows which trials have a worker. The next worker that asks for a trial ends those whose worker has
died and queues their points again, so a dead worker loses its running trial only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from smelt.core.files import json_hash
from smelt.core.locks import file_lock, is_file_lock_held, read_owner
from smelt.core.messages import Message, warning
from smelt.pipeline.search.sampling import distribution_of, grid_points, make_sampler, number_of_points
from smelt.pipeline.search.space import SearchSpace

if TYPE_CHECKING:
    import optuna

_RESULT, _REPEATS, _LOST = "result", "repeats", "lost"
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
        folder: the search's folder, with the locks of all workers.
        most: number of trials.
        seed: of the samplers.
        warn: called with a warning for each trial that a dead worker has lost.
    """

    def __init__(
        self, space: SearchSpace, folder: Path, most: int, seed: int, warn: Callable[[Message], None]
    ) -> None:
        self.space, self.folder, self.most, self.seed, self.warn = space, folder, most, seed, warn
        self.distributions = {each.name: distribution_of(each) for each in space.parameters}

    def ask(self, study: optuna.Study, stack: ExitStack) -> optuna.Trial | Literal["trials", "exhausted"]:
        """Return the next trial, locked as running until `stack` is closed, or why there is none.

        It may be of a known point (`known_trial`).
        """
        from optuna.trial import TrialState

        with file_lock(self.folder / "ask.lock"):
            self.reclaim(study)
            trials = study.get_trials(deepcopy=False)
            waiting = any(trial.state == TrialState.WAITING for trial in trials)
            begun = [
                trial for trial in trials if not _is_abandoned(trial) and trial.state != TrialState.WAITING
            ]
            sampler, seed = self.space.sampler, self.seed + len(begun)
            if sampler == "grid" and not waiting:
                return "exhausted"
            if sum(_REPEATS not in trial.user_attrs for trial in begun) >= self.most:
                return "trials"
            # counted in the study, not by this worker: a search that is resumed samples the same trials
            repeats = len(begun) - max(
                (at for at, trial in enumerate(begun, 1) if _REPEATS not in trial.user_attrs), default=0
            )
            if repeats >= _MAX_SAMPLER_REPEATS and not waiting and sampler != "grid":
                sampler = "random"
                if number_of_points(self.space.parameters) <= _MAX_ENUMERATED:
                    point = self._untried_point(trials, seed)
                    if point is None:
                        return "exhausted"
                    study.enqueue_trial(point)
                elif repeats >= _MAX_REPEATS:
                    return "exhausted"
            study.sampler = make_sampler(sampler, seed)
            trial = study.ask(self.distributions)
            stack.enter_context(self.running(trial.number))
            return trial

    def _untried_point(self, trials: list[optuna.trial.FrozenTrial], seed: int) -> dict[str, Any] | None:
        """Return a random point whose recipe no trial has; None if all are known."""
        known = {self._recipe_hash(trial.params) for trial in trials if _is_known(trial)}
        points = [p for p in grid_points(self.space.parameters) if self._recipe_hash(p) not in known]
        return random.Random(seed).choice(points) if points else None

    def _recipe_hash(self, point: Mapping[str, Any]) -> str:
        # a sampler and a grid may differ in the last digit of the same step
        rounded = {k: float(f"{v:.12g}") if isinstance(v, float) else v for k, v in point.items()}
        return json_hash(self.space.value_at(rounded))

    def running(self, number: int) -> AbstractContextManager[None]:
        """Return the lock of a running trial, which its worker holds."""
        return file_lock(self._running_lock(number))

    def _running_lock(self, number: int) -> Path:
        return self.folder / "running" / f"{number}.lock"

    def reclaim(self, study: optuna.Study) -> None:
        """End the running trials whose worker has died, and queue those without a result again."""
        from optuna.trial import TrialState

        running = (TrialState.RUNNING,)
        numbers = [trial.number for trial in study.get_trials(deepcopy=False, states=running)]
        # the owners are read first: the check removes the locks of dead workers
        owners = {number: str(read_owner(self._running_lock(number)) or "a process") for number in numbers}
        free = [number for number in numbers if not is_file_lock_held(self._running_lock(number))]
        # read again: a worker may have finished its trial, and unlocked it, since the first reading
        for trial in study.get_trials(deepcopy=False, states=running) if free else ():
            if trial.number not in free:
                continue
            if _RESULT in trial.user_attrs:  # its worker died before `tell`
                self._finish(study, trial.number, TrialResult(**trial.user_attrs[_RESULT]))
            else:
                lost = study.user_attrs.get(_LOST, {}) | {str(trial.number): owners[trial.number]}
                study.set_user_attr(_LOST, lost)
                self.abandon(study, trial.number)
                self.warn(_lost_warning(trial.number, owners[trial.number]))

    def abandon(self, study: optuna.Study, number: int) -> None:
        """End a trial without a result, and queue its point again, if all of it was sampled."""
        import optuna

        point = study.get_trials(deepcopy=False)[number].params
        # queued first: a worker that dies in between leaves the point twice, not lost
        if len(point) == len(self.distributions):  # else the next trial, with the same seed, samples it
            study.enqueue_trial(point)
        study.tell(number, state=optuna.trial.TrialState.FAIL)

    def known_trial(self, study: optuna.Study, trial: optuna.Trial) -> optuna.trial.FrozenTrial | None:
        """Return an earlier trial of the same recipe, finished or still running; None if there is none.

        Parameters of stages that are not used make no difference.
        """
        own = self._recipe_hash(trial.params)
        for other in study.get_trials(deepcopy=False)[: trial.number]:
            if _is_known(other) and self._recipe_hash(other.params) == own:
                return other
        return None

    def repeat(self, study: optuna.Study, trial: optuna.Trial, known: optuna.trial.FrozenTrial) -> None:
        """End a trial that repeats the trial `known`, with the same result if that is finished."""
        from optuna.trial import TrialState

        if _RESULT in known.user_attrs:
            self.tell(study, trial, TrialResult(**known.user_attrs[_RESULT]), repeated=known.number)
        else:
            trial.set_user_attr(_REPEATS, known.number)
            study.tell(trial, state=TrialState.FAIL)

    def tell(
        self, study: optuna.Study, trial: optuna.Trial, result: TrialResult, repeated: int | None = None
    ) -> None:
        """Store the result of a trial and end it. repeated: number of the trial that it repeats."""
        for name, over in result.violations.items():
            trial.set_constraint(name, over)
        if repeated is not None:
            trial.set_user_attr(_REPEATS, repeated)
        trial.set_user_attr(_RESULT, json.loads(json.dumps(asdict(result))))  # last: it is complete now
        self._finish(study, trial.number, result)

    def _finish(self, study: optuna.Study, number: int, result: TrialResult) -> None:
        from optuna.trial import TrialState

        values = [result.values[each.name] for each in self.space.objectives if each.name in result.values]
        if result.status == "failed":
            study.tell(number, state=TrialState.FAIL)
        elif len(values) < len(self.space.objectives) or result.status == "stopped":
            study.tell(number, state=TrialState.PRUNED)
        else:
            study.tell(number, values)


def objective_text(name: str, value: float) -> str:
    """Return the value of an objective for a reader: sizes in MB, `latency` as a share."""
    return f"{value / 1e6:.4g} MB" if name in ("size", "memory", "size_bytes") else f"{value:.4g}"


def parameter_text(value: Any) -> str:
    """Return the value of a parameter for a reader."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def finished_trials(study: optuna.Study) -> list[Trial]:
    """Return the finished trials in the order of their numbers, without repeated ones."""
    return [
        Trial(trial.number, trial.params, TrialResult(**trial.user_attrs[_RESULT]))
        for trial in study.get_trials(deepcopy=False)
        if _RESULT in trial.user_attrs and _REPEATS not in trial.user_attrs
    ]


def lost_trials(study: optuna.Study) -> list[Message]:
    """Return a warning for each trial that a dead worker has lost."""
    return [_lost_warning(int(number), owner) for number, owner in study.user_attrs.get(_LOST, {}).items()]


def _lost_warning(number: int, owner: str) -> Message:
    return warning(
        "worker-died",
        f"Trial {number} was running in {owner}, which has ended without a result. The same point is queued"
        " again. If this repeats, look for out of memory in the system's log.",
    )


def _is_known(trial: optuna.trial.FrozenTrial) -> bool:
    from optuna.trial import TrialState

    return _RESULT in trial.user_attrs or trial.state == TrialState.RUNNING


def _is_abandoned(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether the trial ended without a result, so that its point was queued again."""
    from optuna.trial import TrialState

    return trial.state == TrialState.FAIL and not {_RESULT, _REPEATS} & trial.user_attrs.keys()
