"""The search space of a recipe: which settings, stages and orders a search tries, and what it is for.

A recipe with a search space is a recipe in which settings of stages are `{search: ...}`, and stages may have
`optional: search`; its key `search` has the objectives and constraints. Every point of the space is a recipe
without these.

    stages:
      - prune: {keep_ratio: {search: [0.5, 0.9]}}
        optional: search
      - quantize: {scheme: {search: {choices: [int8-dynamic, int4]}}}
      - onnx: {target: ort-cpu}
    search:
      minimize: latency
      subject_to: {bleu: {max_drop: 1.0}}
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import json_hash, resolve_path
from smelt.core.stage import Settings
from smelt.evaluate.metrics import is_lower_better
from smelt.pipeline.plan.load_plan import make_plan
from smelt.pipeline.plan.plan import Plan
from smelt.pipeline.recipe.mistakes import Mistakes, validate_settings, value_text
from smelt.pipeline.recipe.recipe import (
    SPEED_METRICS,
    GateSettings,
    RecipeKeys,
    check_reachable,
    find_recipe,
)
from smelt.pipeline.recipe.stages import MODEL_STEP, apply_overrides, read_stages, step_names
from smelt.pipeline.recipe.yaml_file import KeyPath, YamlDocument, read_yaml

SEARCH_KEY = "search"
COSTS = ("latency", "size", "memory")
"""Objectives other than metrics: time of a call as a share of the baseline's, bytes, peak bytes."""
QUALITY = "quality"
"""The first metric of the recipe, as an objective."""
Sampler = Literal["tpe", "nsga2", "random", "grid"]
_MAX_ORDERS = 24  # of a group: four steps
_RANGE_KEYS = ("low", "high", "log", "step")


class SearchSettings(Settings):
    """The key `search` of a recipe: objectives, constraints, and how the space is searched."""

    minimize: str | tuple[str, ...] = Field(
        default=(), description="objectives: latency, size, memory, or metrics"
    )
    maximize: str | tuple[str, ...] = Field(
        default=(), description="objectives: quality (the first metric), or metrics"
    )
    subject_to: dict[str, GateSettings] = Field(
        default_factory=dict, description="constraints on the last step, as in `gates`"
    )
    order: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="groups of neighbouring steps whose order is searched"
    )
    sampler: Sampler | None = Field(
        default=None, description="default: tpe for one or two objectives, nsga2 for more"
    )
    trials: int | None = Field(default=None, ge=1, le=100_000, description="trials at most")
    max_minutes: float | None = Field(
        default=None, gt=0, description="time limit; a running trial is finished"
    )


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


@dataclass(frozen=True)
class Objective:
    """What is minimized or maximized: latency, size, memory, or a metric of the last step."""

    name: str
    maximize: bool


@dataclass(frozen=True)
class SearchSpace:
    """A recipe with a search space, checked.

    path: the recipe's file. settings: its key `search`. objectives: with the metric for `quality`. leaf: the
    last step, which trials are judged by. value: the recipe as plain values. step_names: by position.
    """

    path: Path
    document: YamlDocument
    settings: SearchSettings
    parameters: tuple[Parameter, ...]
    value: Mapping[str, Any]
    step_names: tuple[str, ...]
    objectives: tuple[Objective, ...] = ()
    plan: Plan | None = field(default=None, repr=False, compare=False)

    @property
    def leaf(self) -> str:
        """The last step of every chain."""
        return self.step_names[-1]

    @property
    def sampler(self) -> Sampler:
        """The sampler of the recipe, or the default for its number of objectives."""
        return self.settings.sampler or ("tpe" if len(self.objectives) <= 2 else "nsga2")

    @property
    def identity(self) -> str:
        """A hash of everything that the values of a trial depend on, apart from the data's content."""
        return json_hash(
            {
                "recipe": {key: part for key, part in self.value.items() if key != SEARCH_KEY},
                "parameters": [
                    [p.name, p.kind, p.low, p.high, p.step, p.log, list(p.labels)] for p in self.parameters
                ],
                "objectives": [[each.name, each.maximize] for each in self.objectives],
                "subject_to": {n: gate.model_dump() for n, gate in self.settings.subject_to.items()},
            }
        )

    def __str__(self) -> str:
        """Return the space for a terminal: its parameters, objectives and constraints."""
        lines = [
            f"{self.path}: {len(self.parameters)} parameters, one chain of {len(self.step_names)} stages"
        ]
        for each in self.parameters:
            values = (
                ", ".join(str(label) for label in each.labels)
                if each.choices
                else f"{each.low:g} to {each.high:g}"
                + (f" in steps of {each.step:g}" if each.step else "")
                + (", logarithmic" if each.log else "")
            )
            lines.append(f"  {each.name}: {values}")
        goals = ", ".join(
            f"{'maximize' if each.maximize else 'minimize'} {each.name}" for each in self.objectives
        )
        lines.append(f"objectives: {goals}; sampler {self.sampler}")
        for metric, gate in self.settings.subject_to.items():
            limits = gate.model_dump(exclude_none=True, mode="json")
            lines.append(
                f"subject to: {metric}: {', '.join(f'{key} {value}' for key, value in limits.items())}"
            )
        return "\n".join(lines)

    def defaults(self) -> dict[str, Any]:
        """Return the point with the lower bounds, the first choices, all stages, and the order as written."""
        return {p.name: p.labels[0] if p.choices else p.low for p in self.parameters}

    def used_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of one point without the settings of stages that it does not have."""
        absent = {each.path[1] for each in self.parameters if each.kind == "used" and not values[each.name]}
        return {
            each.name: values[each.name]
            for each in self.parameters
            if each.kind in ("used", "order") or each.path[:1] != ("stages",) or each.path[1] not in absent
        }

    def recipe_at(self, values: Mapping[str, Any]) -> YamlDocument:
        """Return the recipe of one point, with the lines of the file. values: by parameter name."""
        value, chain = self.value_at(values)
        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        return YamlDocument(self.document.name, value, text, self._lines(chain))

    def value_at(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Return the recipe of one point as plain values, and which stages of the file it has, in order."""
        value = copy.deepcopy({key: part for key, part in self.value.items() if key != SEARCH_KEY})
        sequence, unused = list(range(len(value["stages"]))), set[int]()
        for each in self.parameters:
            chosen = each.value_of(values[each.name])
            if each.kind == "used":
                value["stages"][each.path[1]].pop("optional")
                unused |= set() if chosen else {int(each.path[1])}
            elif each.kind == "order":
                indices = [self.step_names.index(name) for name in chosen]
                for place, index in zip(sorted(indices), indices, strict=True):
                    sequence[place] = index
            else:
                _set(value, each.path, chosen)
        chain = [at for at in sequence if at not in unused]
        value["stages"] = [{**value["stages"][at], "name": self.step_names[at]} for at in chain]
        gates = dict(value.get("gates") or {})
        for metric, gate in self.settings.subject_to.items():
            gates[metric] = gate.model_dump(exclude_none=True, mode="json") | {"at": self.leaf}
        value["gates"] = gates | {"on": "validation"}
        return value, chain

    def _lines(self, chain: Sequence[int]) -> dict[KeyPath, int]:
        """Return the lines of the file by the paths in the recipe of a point."""
        lines: dict[KeyPath, int] = {}
        new = {old: at for at, old in enumerate(chain)}
        for path, line in self.document.lines.items():
            if path[:2] == (SEARCH_KEY, "subject_to"):
                lines["gates", *path[2:]] = line
            if path[:1] != ("stages",) or len(path) == 1:
                lines.setdefault(path, line)
            elif path[1] in new:
                lines["stages", new[path[1]], *path[2:]] = line
        return lines

    def plan_at(self, values: Mapping[str, Any]) -> Plan:
        """Return the plan of one point.

        Raises:
            InputError: the combination of settings is refused.
        """
        return make_plan(self.recipe_at(values), self.path)

    def portable_recipe(self, values: Mapping[str, Any]) -> str:
        """Return the recipe of one point as YAML that runs from any folder: its paths are absolute."""
        value = self.recipe_at(values).value
        plan = self.plan_at(values)
        base = plan.recipe.base
        for holder, key in _places_of_paths(value, plan):
            path = resolve_path(base, holder[key])
            if path.exists():
                holder[key] = str(path.resolve())
        return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def _places_of_paths(value: dict[str, Any], plan: Plan) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every path in a recipe."""
    for key in ("model", "tokenizer"):
        if isinstance(value.get(key), str):
            yield value, key
    if isinstance(value["model"], dict):
        yield from ((value["model"], k) for k, v in value["model"].items() if isinstance(v, str))
    yield from ((value["data"], name) for name in plan.recipe.data.split_files() if name in value["data"])
    for item, step in zip(value["stages"], plan.steps, strict=False):
        for place in step.settings.paths():
            holder: Any = item[step.stage]
            for part in place[:-1]:
                holder = holder[part]
            yield holder, place[-1]


def _set(value: Any, path: KeyPath, new: Any) -> None:
    for part in path[:-1]:
        value = value[part]
    value[path[-1]] = new


def read_space(recipe: str | Path, overrides: Sequence[str] = ()) -> SearchSpace:
    """Read and check a recipe with a search space.

    The recipes at the bounds of every setting, of every choice, with and without optional stages and in every
    order are checked as `smelt plan` does, the others of the same setting at their defaults.

    Raises:
        InputError: the recipe or the space has mistakes; the message lists them with file and line.
    """
    path = recipe if isinstance(recipe, Path) else find_recipe(recipe)
    document = read_yaml(path)
    mistakes = Mistakes(document)
    value = document.value
    if not isinstance(value, dict):
        make_plan(document, path)  # raises the error
    apply_overrides(value, overrides, mistakes, (*RecipeKeys.model_fields, "stages", SEARCH_KEY))
    settings, _ = validate_settings(SearchSettings, value.get(SEARCH_KEY, {}), (SEARCH_KEY,), mistakes)
    settings = settings or SearchSettings()
    entries, _ = read_stages(_without_search(value.get("stages")), mistakes)
    names = step_names(entries)
    mistakes.raise_if_any()
    value["stages"] = [{item: {}} if isinstance(item, str) else item for item in value["stages"]]
    for entry, item in zip(entries, value["stages"], strict=True):
        if item[entry.stage] is None:
            item[entry.stage] = {}
    parameters = [
        found
        for entry, name, item in zip(entries, names, value["stages"], strict=True)
        for found in _stage_parameters(item, entry.stage, name, entry.index, mistakes)
    ]
    parameters += _order_parameters(settings, names, value["stages"], mistakes)
    if not parameters:
        mistakes.add(
            ("stages",),
            "nothing to search. Give a setting a range, such as keep_ratio: {search: [0.5, 0.9]}.",
            code="empty-search-space",
        )
    if not settings.minimize and not settings.maximize:
        mistakes.add(
            (SEARCH_KEY,),
            "no objective. Set minimize or maximize, such as minimize: latency.",
            code="missing-setting",
        )
    _check_chain(value["stages"], names, parameters, mistakes)
    mistakes.raise_if_any()
    space = SearchSpace(path, document, settings, tuple(parameters), value, tuple(names))
    plan = _check_corners(space)
    return SearchSpace(
        path, document, settings, tuple(parameters), value, tuple(names),
        _objectives(settings, plan, mistakes), plan,
    )  # fmt: skip


def _without_search(stages: Any) -> Any:
    """Return the list of stages with `optional: search` removed, for the checks of their form."""
    if not isinstance(stages, list):
        return stages
    return [
        {k: v for k, v in item.items() if not (k == "optional" and v == SEARCH_KEY)}
        if isinstance(item, dict)
        else item
        for item in stages
    ]


def _stage_parameters(
    item: Mapping[str, Any], stage: str, name: str, index: int, mistakes: Mistakes
) -> Iterator[Parameter]:
    if item.get("optional") == SEARCH_KEY:
        yield Parameter(name, "used", ("stages", index), choices=(True, False))
    for path, given in _searched(item[stage], ("stages", index, stage)):
        setting = ".".join(str(part) for part in path[3:])
        found = _parameter(f"{name}.{setting}", path, given, mistakes)
        if found is not None:
            yield found


def _searched(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, range) of every `{search: range}` below `value`."""
    if isinstance(value, dict) and set(value) == {SEARCH_KEY}:
        yield path, value[SEARCH_KEY]
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _searched(part, (*path, key))
    elif isinstance(value, list):
        for at, part in enumerate(value):
            yield from _searched(part, (*path, at))


def _parameter(name: str, path: KeyPath, given: Any, mistakes: Mistakes) -> Parameter | None:
    where = (*path, SEARCH_KEY)
    if isinstance(given, dict) and set(given) == {"choices"}:
        choices = given["choices"]
        if not isinstance(choices, list) or not choices:
            mistakes.add(
                (*where, "choices"),
                f"expected a list of values, got {value_text(choices)}.",
                code="empty-choices",
            )
            return None
        if any(one == other for one, other in itertools.combinations(choices, 2)):
            mistakes.add((*where, "choices"), "a value is listed twice. Remove one.", code="duplicate-choice")
            return None
        return Parameter(name, "choice", path, choices=tuple(choices))
    if isinstance(given, list) and len(given) == 2:
        given = {"low": given[0], "high": given[1]}
    known = isinstance(given, dict) and {"low", "high"} <= set(given) <= set(_RANGE_KEYS)
    if not known or not all(_is_number(given[key]) for key in given if key != "log"):
        mistakes.add(
            where,
            "expected [LOW, HIGH], {low: ..., high: ..., log: true, step: ...} or {choices: [...]}, got"
            f" {value_text(given)}.",
            code="wrong-search-range",
        )
        return None
    low, high, step, log = given["low"], given["high"], given.get("step"), given.get("log", False)
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
        mistakes.add(where, f"{problem}, got {value_text(given)}.", code="wrong-search-range")
        return None
    if step is not None:  # the highest value that the steps reach
        high = min(high, low + int((high - low) / step + 1e-9) * step)
    whole = all(isinstance(number, int) for number in (low, high, *([] if step is None else [step])))
    return Parameter(name, "int" if whole else "float", path, low, high, step, log)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _order_parameters(
    settings: SearchSettings, names: Sequence[str], items: Sequence[Any], mistakes: Mistakes
) -> Iterator[Parameter]:
    seen: dict[str, str] = {}
    for group, members in settings.order.items():
        path: KeyPath = (SEARCH_KEY, "order", group)
        if group.split(".")[0] in names:
            mistakes.add(
                path, f"'{group}' is the name of a step. Rename the group.", code="wrong-order-group"
            )
            continue
        unknown = [name for name in members if name not in names]
        if unknown:
            mistakes.add(
                path,
                f"no step '{unknown[0]}'. Steps: {', '.join(names)}.{did_you_mean(unknown[0], names)}",
                code="unknown-step",
            )
            continue
        if twice := [name for name in members if name in seen]:
            mistakes.add(
                path,
                f"{twice[0]} is in the group '{seen[twice[0]]}' too. Make one group of both.",
                code="wrong-order-group",
            )
            continue
        seen |= dict.fromkeys(members, group)
        places = sorted(names.index(name) for name in members)
        if len(set(members)) < 2 or places != list(range(places[0], places[0] + len(members))):
            mistakes.add(
                path,
                "expected at least two different steps that follow each other in the list of stages.",
                code="wrong-order-group",
            )
            continue
        if len(names) - 1 in places:
            mistakes.add(
                path, f"the last step ({names[-1]}) must stay the last. Remove it.", code="wrong-order-group"
            )
            continue
        orders = tuple(list(order) for order in itertools.permutations(names[at] for at in places))
        if len(orders) > _MAX_ORDERS:
            mistakes.add(
                path,
                f"{len(members)} steps have {len(orders)} orders; at most 4 steps.",
                code="wrong-order-group",
            )
            continue
        yield Parameter(group, "order", path, choices=orders)


def _check_chain(
    items: Sequence[Any], names: Sequence[str], parameters: Sequence[Parameter], mistakes: Mistakes
) -> None:
    """Require one chain: each step starts from the one before, and the last one is in every point."""
    for at, item in enumerate(items):
        if "from" in item and item["from"] != (names[at - 1] if at else MODEL_STEP):
            mistakes.add(
                ("stages", at, "from"),
                "a search needs one chain of stages. Remove `from`, and search each branch by itself.",
                code="not-a-chain",
            )
        item.pop("from", None)
    if any(each.kind == "used" and each.path[1] == len(items) - 1 for each in parameters):
        mistakes.add(
            ("stages", len(items) - 1, "optional"),
            "the last step is the result of every trial and cannot be optional.",
            code="not-a-chain",
        )


def _check_corners(space: SearchSpace) -> Plan:
    """Check the recipe at every bound and choice; return the plan of the defaults.

    Raises:
        InputError: the mistakes of the first refused recipe, with the setting that was changed.
    """
    base = space.defaults()
    _require_validation(space)
    plan = space.plan_at(base)
    for each in space.parameters:
        for label in each.corner_values():
            if label == base[each.name]:
                continue
            try:
                space.plan_at(base | {each.name: label})
            except InputError as error:
                raise InputError(
                    f"{space.document.name}: the search space has a value that is refused, {each.name} ="
                    f" {value_text(each.value_of(label))}:\n{error}",
                    code=error.code,
                    setting=each.name,
                    file=space.document.name,
                ) from error
    return plan


def _require_validation(space: SearchSpace) -> None:
    data = space.value.get("data")
    if isinstance(data, dict) and not (
        data.get("validation") or (isinstance(data.get("split"), dict) and data["split"].get("validation"))
    ):
        mistakes = Mistakes(space.document)
        mistakes.add(
            ("data",),
            "a search chooses on validation samples and scores its winners on test. Set data.validation, or"
            " split: {validation: 0.1} to take samples from train.",
            code="missing-data",
        )
        mistakes.raise_if_any()


def _objectives(settings: SearchSettings, plan: Plan, mistakes: Mistakes) -> tuple[Objective, ...]:
    """Return the objectives, with the name of the metric for `quality`.

    Raises:
        InputError: one is unknown, not scored, named twice, or has the wrong direction.
    """
    scored = plan.recipe.score.quality
    found: list[Objective] = []
    for key, maximize in (("minimize", False), ("maximize", True)):
        for at, written in enumerate(_as_tuple(getattr(settings, key))):
            name = scored[0] if written == QUALITY and scored else written
            path: KeyPath = (SEARCH_KEY, key, at)
            if name not in (*COSTS, *scored):
                known = ", ".join((*COSTS, QUALITY, *scored))
                mistakes.add(
                    path,
                    f"'{written[:60]}' is not measured. Known: {known}."
                    f"{did_you_mean(written, (*COSTS, *scored))}",
                    code="metric-not-scored",
                )
            elif maximize == (name in COSTS or is_lower_better(name, plan.recipe.metric_settings)):
                other = "minimize" if maximize else "maximize"
                mistakes.add(path, f"{name}: {other} it instead.", code="wrong-direction")
            elif name in [each.name for each in found]:
                mistakes.add(path, f"{name} is listed twice. Remove one.", code="duplicate-metric")
            elif name in ("latency", "memory") and not plan.recipe.score.latency:
                mistakes.add(
                    path,
                    f"{name} needs latency measurements, but `latency: false` is set.",
                    code="settings-conflict",
                )
            else:
                found.append(Objective(name, maximize))
    for name in (name for name, gate in settings.subject_to.items() if gate.at is not None):
        mistakes.add(
            (SEARCH_KEY, "subject_to", name, "at"),
            "constraints are on the last step. Remove `at`; a limit on another step belongs into `gates`.",
            code="wrong-value",
        )
    for name, gate in settings.subject_to.items():
        check_reachable(name, gate, (SEARCH_KEY, "subject_to", name), mistakes)
    limited = [name for name in settings.subject_to if name in SPEED_METRICS]
    if limited and not plan.recipe.score.latency:
        mistakes.add(
            (SEARCH_KEY, "subject_to", limited[0]), "needs latency measurements.", code="settings-conflict"
        )
    mistakes.raise_if_any()
    return tuple(found)


def _as_tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value
