"""How Optuna samples the points of a space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from smelt.core.errors import InputError
from smelt.pipeline.search.parameters import Parameter
from smelt.pipeline.search.space import Sampler

_STARTUP_TRIALS = 10  # random trials before the sampler uses their results
_MAX_GRID = 100_000


def distribution_of(each: Parameter) -> Any:
    """Return a parameter as a distribution of Optuna."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if each.choices:
        return CategoricalDistribution(each.labels)
    if each.kind == "int":
        return IntDistribution(int(each.low), int(each.high), log=each.log, step=int(each.step or 1))
    return FloatDistribution(each.low, each.high, log=each.log, step=each.step)


def make_sampler(name: Sampler, seed: int) -> Any:
    """Return the sampler `name`; a grid's points are queued, so none is sampled."""
    from optuna import samplers

    if name == "tpe":
        return samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
    if name == "nsga2":
        return samplers.NSGAIISampler(seed=seed, population_size=2 * _STARTUP_TRIALS)
    return samplers.RandomSampler(seed=seed)  # the points of a grid are queued


def grid_points(parameters: Sequence[Parameter]) -> Iterator[dict[str, Any]]:
    """Yield every point of a grid, the last parameter fastest.

    Raises:
        InputError: a range has no step, or there are too many points.
    """
    axes: list[Sequence[Any]] = []
    for axis in parameters:
        if axis.choices:
            axes.append(axis.labels)
        elif axis.kind == "float" and axis.step is None:
            raise InputError(
                f"{axis.name}: a grid needs a step: {{low: {axis.low:g}, high: {axis.high:g}, step: ...}}, or"
                " choices.",
                code="grid-without-step",
                setting=axis.name,
            )
        else:
            size = axis.step or 1
            count = int((axis.high - axis.low) / size + 1e-9) + 1
            axes.append([min(axis.low + index * size, axis.high) for index in range(count)])
    points = math.prod(map(len, axes))
    if points > _MAX_GRID:
        raise InputError(
            f"the grid has {points:,} points. Use larger steps, or another sampler.", code="grid-too-large"
        )
    for values in itertools.product(*axes):
        yield dict(zip((axis.name for axis in parameters), values, strict=True))


def number_of_points(parameters: Sequence[Parameter]) -> float:
    """Return the number of points of a grid; infinity if a range has no step."""
    return math.prod(
        len(parameter.labels)
        if parameter.choices
        else math.inf
        if parameter.kind == "float" and parameter.step is None
        else int((parameter.high - parameter.low) / (parameter.step or 1) + 1e-9) + 1
        for parameter in parameters
    )
