"""What the trials of a study show together: importances of the parameters, and the hypervolume over time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from smelt.pipeline.search.study import Search
from smelt.pipeline.search.trials import Trial


def importances(search: Search) -> dict[str, dict[str, float]]:
    """Return the importance of each parameter for each objective; the shares of an objective sum to 1.

    It is by how much the best tenth of the trials differs from all of them in a parameter, whose values count
    only in trials that have its stage. Sources: Watanabe et al. 2023, PED-ANOVA, arXiv:2304.10255; for
    optional stages Conditional PED-ANOVA, arXiv:2601.20800.
    """
    import optuna

    study, found = _study_of_used_values(search), {}
    for at, (objective, sign) in enumerate(search.signs().items()):

        def value(trial: Any, at: int = at, sign: int = sign) -> float:
            return float(sign * trial.values[at])

        with suppress(ValueError, RuntimeError), warnings.catch_warnings():  # too few, or all equal
            # that low targets count as good: they are, by their sign
            warnings.simplefilter("ignore", UserWarning)
            found[objective] = {
                name: float(share)
                for name, share in optuna.importance.get_param_importances(study, target=value).items()
            }
    return found


def _study_of_used_values(search: Search) -> Any:
    """Return the completed trials in a study in memory, without the settings of absent stages."""
    import optuna

    study = optuna.create_study(directions=["minimize"] * len(search.space.objectives))
    for trial in search.open_study().get_trials(deepcopy=False):
        if trial.state == optuna.trial.TrialState.COMPLETE:
            used = search.space.used_values(trial.params)
            study.add_trial(
                optuna.trial.create_trial(
                    params=used,
                    distributions={name: trial.distributions[name] for name in used},
                    values=trial.values,
                )
            )
    return study


def hypervolumes(trials: Sequence[Trial], search: Search) -> list[float]:
    """Return, after each trial, the area that the front dominates, as a share of the final one (0 to 1).

    For two objectives. The reference point is the worst value of each among the trials that meet the
    constraints. Source: Zitzler and Thiele 1998, doi:10.1007/BFb0056872.
    """
    signs = {each.name: -1 if each.maximize else 1 for each in search.space.objectives}
    points = [
        tuple(sign * trial.result.values[name] for name, sign in signs.items())
        if trial.result.status == "feasible"
        else None
        for trial in trials
    ]
    known = [point for point in points if point is not None]
    if len(known) < 2:
        return []
    worst = (max(x for x, _ in known), max(y for _, y in known))
    areas = [
        area_dominated([p for p in points[: at + 1] if p is not None], worst) for at in range(len(points))
    ]
    return [area / areas[-1] for area in areas] if areas[-1] else []  # all equal in one objective: no area


def area_dominated(points: Sequence[tuple[float, ...]], worst: tuple[float, float]) -> float:
    """Return the area between `worst` and the points that are to be minimized in both coordinates."""
    area, height = 0.0, worst[1]
    for x, y in sorted(points):
        if y < height:
            area += (worst[0] - x) * (height - y)
            height = y
    return area
