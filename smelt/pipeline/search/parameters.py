"""The parameters of a search space: ranges and choices of settings, optional stages, orders of stages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from smelt.core.errors import did_you_mean
from smelt.pipeline.recipe.validation_errors import RecipeErrors, value_text
from smelt.pipeline.recipe.yaml_file import KeyPath

SEARCH_KEY = "search"
_MAX_ORDERS = 24  # of a group: four steps
_RANGE_KEYS = ("low", "high", "log", "step")


@dataclass(frozen=True)
class Parameter:
    """One dimension of the space.

    name: STEP.SETTING; STEP for a stage with `optional: search`; the group for an order. kind: float or int
    between `low` and `high` (with `step`, or on a logarithmic scale), a choice of `choices`, `used` (whether
    the stage is in the chain), or `order`. path: the place in the recipe.
    """

    name: str
    kind: Literal["float", "int", "choice", "used", "order"]
    path: KeyPath
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def labels(self) -> tuple[str | int | float | bool | None, ...]:
        """The choices as values that a study can store: lists and mappings as JSON."""
        return tuple(
            value if value is None or isinstance(value, str | int | float | bool) else json.dumps(value)
            for value in self.choices
        )

    def corner_values(self) -> Sequence[Any]:
        """Return the values that are checked when the search is planned: the bounds, or every choice."""
        return self.labels if self.choices else (self.low, self.high)

    def value_of(self, label: Any) -> Any:
        """Return the value in the recipe for a value of the study."""
        return self.choices[self.labels.index(label)] if self.choices else label


def stage_parameters(
    item: Mapping[str, Any],
    stage: str,
    name: str,
    index: int,
    errors: RecipeErrors,
    refused: list[KeyPath],
) -> Iterator[Parameter]:
    """Yield the parameters of a stage. Settings with a wrong range are removed and added to `refused`."""
    if item.get("optional") == SEARCH_KEY:
        yield Parameter(name, "used", ("stages", index), choices=(True, False))
    for path, search_range in [*_searched(item[stage], ("stages", index, stage))]:
        setting = ".".join(str(key) for key in path[3:])
        parameter = _parameter(f"{name}.{setting}", path, search_range, errors)
        if parameter is not None:
            yield parameter
            continue
        refused.append(path)
        holder: Any = item
        for key in path[2:-1]:
            holder = holder[key]
        if isinstance(holder, dict):
            del holder[path[-1]]


def _searched(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, range) of every `{search: range}` below `value`."""
    if isinstance(value, dict) and set(value) == {SEARCH_KEY}:
        yield path, value[SEARCH_KEY]
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _searched(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _searched(child, (*path, index))


def _parameter(name: str, path: KeyPath, value: Any, errors: RecipeErrors) -> Parameter | None:
    range_path = (*path, SEARCH_KEY)
    if isinstance(value, dict) and set(value) == {"choices"}:
        choices = value["choices"]
        if not isinstance(choices, list) or not choices:
            errors.add(
                (*range_path, "choices"),
                f"expected a list of values, got {value_text(choices)}.",
                code="empty-choices",
            )
            return None
        if any(
            first_choice == second_choice
            for first_choice, second_choice in itertools.combinations(choices, 2)
        ):
            errors.add(
                (*range_path, "choices"), "a value is listed twice. Remove one.", code="duplicate-choice"
            )
            return None
        return Parameter(name, "choice", path, choices=tuple(choices))
    if isinstance(value, list) and len(value) == 2:
        value = {"low": value[0], "high": value[1]}
    has_valid_keys = isinstance(value, dict) and {"low", "high"} <= set(value) <= set(_RANGE_KEYS)
    if not has_valid_keys or not all(_is_number(value[key]) for key in value if key != "log"):
        errors.add(
            range_path,
            "expected [LOW, HIGH], {low: ..., high: ..., log: true, step: ...} or {choices: [...]}, got"
            f" {value_text(value)}.",
            code="wrong-search-range",
        )
        return None
    low, high, step, log = value["low"], value["high"], value.get("step"), value.get("log", False)
    problem = (
        "low must be less than high"
        if not low < high
        else "a logarithmic range needs low greater than 0"
        if log and low <= 0
        else "step and log exclude each other"
        if log and step is not None
        else "step must be greater than 0, and at most high minus low"
        if step is not None and not 0 < step <= high - low
        else "log must be true or false"
        if not isinstance(log, bool)
        else None
    )
    if problem:
        errors.add(range_path, f"{problem}, got {value_text(value)}.", code="wrong-search-range")
        return None
    if step is not None:  # the highest value that the steps reach
        high = min(high, low + int((high - low) / step + 1e-9) * step)
    is_integer = all(isinstance(number, int) for number in (low, high, *([] if step is None else [step])))
    return Parameter(name, "int" if is_integer else "float", path, low, high, step, log)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def order_parameters(
    groups: Mapping[str, Sequence[str]], names: Sequence[str], errors: RecipeErrors
) -> Iterator[Parameter]:
    """Yield a parameter for each group of steps whose order is searched. names: of all steps."""
    group_by_step: dict[str, str] = {}
    for group, members in groups.items():
        path: KeyPath = (SEARCH_KEY, "order", group)
        if group.split(".")[0] in names:
            errors.add(path, f"'{group}' is the name of a step. Rename the group.", code="wrong-order-group")
            continue
        unknown = [name for name in members if name not in names]
        if unknown:
            errors.add(
                path,
                f"no step '{unknown[0]}'. Steps: {', '.join(names)}.{did_you_mean(unknown[0], names)}",
                code="unknown-step",
            )
            continue
        if repeated := [name for name in members if name in group_by_step]:
            errors.add(
                path,
                f"{repeated[0]} is in the group '{group_by_step[repeated[0]]}' too. Make one group of both.",
                code="wrong-order-group",
            )
            continue
        group_by_step |= dict.fromkeys(members, group)
        positions = sorted(names.index(name) for name in members)
        if len(set(members)) < 2 or positions != list(range(positions[0], positions[0] + len(members))):
            errors.add(
                path,
                "expected at least two different steps that follow each other in the list of stages.",
                code="wrong-order-group",
            )
            continue
        if len(names) - 1 in positions:
            errors.add(
                path, f"the last step ({names[-1]}) must stay the last. Remove it.", code="wrong-order-group"
            )
            continue
        orders = tuple(
            list(order) for order in itertools.permutations(names[position] for position in positions)
        )
        if len(orders) > _MAX_ORDERS:
            errors.add(
                path,
                f"{len(members)} steps have {len(orders)} orders; at most 4 steps.",
                code="wrong-order-group",
            )
            continue
        yield Parameter(group, "order", path, choices=orders)
