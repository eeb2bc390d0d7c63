"""The search space of a recipe: which settings, stages and orders a search tries, and what it is for.

A recipe with a search space is a recipe in which settings of stages are `{search: ...}`, and stages may have
`optional: search`; its key `search` has the objectives. Its gates are the constraints on the last step. Every
point of the space is a plain recipe with the same gates.

    stages:
      - prune: {keep_ratio: {search: [0.5, 0.9]}}
        optional: search
      - quantize: {scheme: {search: {choices: [int8-dynamic, int4]}}}
      - onnx: {target: ort-cpu}
    search:
      minimize: latency
    gates: {bleu: {max_degradation: 1.0}}
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from smelt.core.errors import InputError, combined_error, did_you_mean
from smelt.core.files import json_hash, write_atomically
from smelt.core.messages import Message, error_message, with_count
from smelt.core.user_code import copy_user_code
from smelt.evaluate.metrics.registry import (
    METRICS,
    METRICS_BY_TASK,
    base_metric,
    is_custom_metric,
    is_lower_better,
)
from smelt.pipeline.plan.load_plan import make_plan
from smelt.pipeline.plan.plan import Plan
from smelt.pipeline.recipe.recipe import (
    GateSettings,
    RecipeKeys,
    check_reachable,
    find_recipe,
)
from smelt.pipeline.recipe.stages import MODEL_STEP, apply_overrides, read_stages, step_names
from smelt.pipeline.recipe.validation_errors import RecipeErrors, dotted_path, validate_settings, value_text
from smelt.pipeline.recipe.yaml_file import KeyPath, YamlDocument, dump_yaml, read_yaml
from smelt.pipeline.search.parameters import SEARCH_KEY, Parameter, order_parameters, stage_parameters
from smelt.stage import Settings

COSTS = ("latency", "size", "memory")
"""Objectives other than metrics: time of a call as a share of the baseline's, bytes, peak bytes."""
QUALITY = "quality"
"""The first metric of the recipe, as an objective."""
Sampler = Literal["tpe", "nsga2", "random", "grid"]


class SearchSettings(Settings):
    """The key `search` of a recipe: objectives, and how the space is searched."""

    minimize: str | tuple[str, ...] = Field(
        default=(), description="objectives: latency, size, memory, or metrics"
    )
    maximize: str | tuple[str, ...] = Field(
        default=(), description="objectives: quality (the first metric), or metrics"
    )
    order: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="groups of neighboring steps whose order is searched"
    )
    sampler: Sampler | None = Field(
        default=None, description="default: tpe for one or two objectives, nsga2 for more"
    )
    trials: int | None = Field(default=None, ge=1, le=100_000, description="trials at most")
    time_limit_minutes: float | None = Field(
        default=None,
        gt=0,
        description="time limit; a running trial ends after its current step, the first trial is finished",
    )


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
    def constraints(self) -> dict[str, GateSettings]:
        """The recipe's gates, by metric; they are on the last step."""
        return self.plan.recipe.gates if self.plan else {}

    @property
    def sampler(self) -> Sampler:
        """The sampler of the recipe, or the default for its number of objectives."""
        return self.settings.sampler or ("tpe" if len(self.objectives) <= 2 else "nsga2")

    @property
    def identity(self) -> str:
        """A hash of everything that the values of a trial depend on, apart from the data's content."""
        return json_hash(
            {
                "recipe": {key: key_value for key, key_value in self.value.items() if key != SEARCH_KEY},
                "parameters": [
                    [p.name, p.kind, p.low, p.high, p.step, p.log, list(p.labels)] for p in self.parameters
                ],
                "objectives": [[objective.name, objective.maximize] for objective in self.objectives],
            }
        )

    def __str__(self) -> str:
        """Return the space for a terminal: its parameters, objectives and constraints."""
        counts = with_count(len(self.parameters), "parameter"), with_count(len(self.step_names), "stage")
        lines = [f"{self.path}: {counts[0]}, one chain of {counts[1]}"]
        for item in self.parameters:
            values = (
                ", ".join(str(label) for label in item.labels)
                if item.choices
                else f"{item.low:g} to {item.high:g}"
                + (f" in steps of {item.step:g}" if item.step else "")
                + (", logarithmic" if item.log else "")
            )
            lines.append(f"  {item.name}: {values}")
        goals = ", ".join(
            f"{'maximize' if item.maximize else 'minimize'} {item.name}" for item in self.objectives
        )
        lines.append(f"objectives: {goals}; sampler {self.sampler}")
        for metric, gate in self.constraints.items():
            limits = gate.model_dump(exclude={"at"}, exclude_none=True, mode="json")
            limit_texts = (f"{key} {_limit_text(metric, value)}" for key, value in limits.items())
            lines.append(f"gate on {metric}: {', '.join(limit_texts)}")
        if self.plan is not None and self.plan.steps[-1].stage == "quantize":
            lines.append(
                f"note: '{self.leaf}' is the result, and torch cannot deploy it. Add a stage such as onnx."
            )
        return "\n".join(lines)

    def defaults(self) -> dict[str, Any]:
        """Return the point with the lower bounds, the first choices, all stages, and the order as written."""
        return {p.name: p.labels[0] if p.choices else p.low for p in self.parameters}

    def used_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of one point without the settings of stages that it does not have."""
        absent_stages = {
            parameter.path[1]
            for parameter in self.parameters
            if parameter.kind == "used" and not values[parameter.name]
        }
        return {
            parameter.name: values[parameter.name]
            for parameter in self.parameters
            if parameter.kind in ("used", "order")
            or parameter.path[:1] != ("stages",)
            or parameter.path[1] not in absent_stages
        }

    def recipe_at(self, values: Mapping[str, Any]) -> YamlDocument:
        """Return the recipe of one point, with the lines of the file. values: by parameter name."""
        value, chain = self.value_at(values)
        text = dump_yaml(value)
        return YamlDocument(self.document.name, value, text, self._lines(chain))

    def value_at(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Return the recipe of one point as plain values, and which stages of the file it has, in order."""
        value = copy.deepcopy({key: key_value for key, key_value in self.value.items() if key != SEARCH_KEY})
        sequence, unused = list(range(len(value["stages"]))), set[int]()
        for parameter in self.parameters:
            parameter_value = parameter.value_of(values[parameter.name])
            if parameter.kind == "used":
                value["stages"][parameter.path[1]].pop("optional")
                unused |= set() if parameter_value else {int(parameter.path[1])}
            elif parameter.kind == "order":
                indices = [self.step_names.index(name) for name in parameter_value]
                for position, index in zip(sorted(indices), indices, strict=True):
                    sequence[position] = index
            else:
                _set(value, parameter.path, parameter_value)
        chain = [stage_index for stage_index in sequence if stage_index not in unused]
        value["stages"] = [
            {**value["stages"][stage_index], "name": self.step_names[stage_index]} for stage_index in chain
        ]
        gates = value.get("gates") or {}
        value["gates"] = gates | {"on": "validation"} if isinstance(gates, dict) else gates
        return value, chain

    def _lines(self, chain: Sequence[int]) -> dict[KeyPath, int]:
        """Return the lines of the file by the paths in the recipe of a point."""
        lines: dict[KeyPath, int] = {}
        new_indices = {old_index: position for position, old_index in enumerate(chain)}
        for path, line in self.document.lines.items():
            if path[:1] != ("stages",) or len(path) == 1:
                lines.setdefault(path, line)
            elif path[1] in new_indices:
                lines["stages", new_indices[path[1]], *path[2:]] = line
        return lines

    def plan_at(self, values: Mapping[str, Any]) -> Plan:
        """Return the plan of one point.

        Raises:
            InputError: the combination of settings is refused.
        """
        return make_plan(self.recipe_at(values), self.path)

    def write_recipe(self, values: Mapping[str, Any], path: Path) -> None:
        """Write the recipe of one point, which runs from any folder, to `path`.

        The user's own code is copied next to it.
        """
        path.parent.mkdir(exist_ok=True)
        plan = self.plan_at(values)
        copy_user_code(plan.user_functions, plan.recipe.base, path.parent)
        write_atomically(path, plan.portable_recipe())


def _limit_text(metric: str, value: Any) -> str:
    return f"{value / 1e6:.4g} MB" if metric == "size_bytes" else f"{value:g}"


def _set(value: Any, path: KeyPath, new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def read_space(recipe: str | Path, overrides: Sequence[str] = ()) -> SearchSpace:
    """Read and check a recipe with a search space.

    The recipes at the bounds of every setting, of every choice, with and without optional stages and in every
    order are checked as `smelt plan` does, the others of the same setting at their defaults.

    Raises:
        InputError: the recipe or the space has errors; the message lists them with file and line.
    """
    path = recipe if isinstance(recipe, Path) else find_recipe(recipe)
    document = read_yaml(path)
    errors = RecipeErrors(document)
    value = document.value
    if not isinstance(value, dict):
        make_plan(document, path)  # raises the error
    apply_overrides(value, overrides, errors, (*RecipeKeys.model_fields, "stages", SEARCH_KEY))
    settings, invalid_paths = validate_settings(
        SearchSettings, value.get(SEARCH_KEY, {}), (SEARCH_KEY,), errors
    )
    settings = settings or SearchSettings()
    entries, stages_wrong = read_stages(_without_search(value.get("stages")), errors)
    names = step_names(entries)
    if entries:
        value["stages"] = [{item: {}} if isinstance(item, str) else item for item in value["stages"]]
    parameters: list[Parameter] = []
    refused_paths: list[KeyPath] = []
    for entry, name in zip(entries, names, strict=True):
        item = value["stages"][entry.index]
        if item[entry.stage] is None:
            item[entry.stage] = {}
        parameters += stage_parameters(item, entry.stage, name, entry.index, errors, refused_paths)
    if stages_wrong:
        errors.raise_if_any()
    parameters += order_parameters(settings.order, names, errors)
    if not parameters and not refused_paths:
        errors.add(
            ("stages",),
            "nothing to search. Give a setting a range, such as keep_ratio: {search: [0.5, 0.9]}.",
            code="empty-search-space",
        )
    if not settings.minimize and not settings.maximize and not invalid_paths:
        errors.add(
            (SEARCH_KEY,),
            "no objective. Set minimize or maximize, such as minimize: latency.",
            code="missing-setting",
        )
    num_errors = len(errors)
    _check_chain(value["stages"], names, parameters, errors)
    is_chain = len(errors) == num_errors
    _check_validation(value.get("data"), errors)
    space = SearchSpace(path, document, settings, tuple(parameters), value, tuple(names))
    plan = _check_corners(space, refused_paths, errors) if entries and is_chain else None
    objectives = _objectives(settings, plan, value.get("task"), errors)
    space = replace(space, objectives=objectives, plan=plan)
    for name, gate in space.constraints.items():
        check_reachable(name, gate, ("gates", name), errors)
        if gate.at not in (None, space.leaf, (space.leaf,)):
            text = f"gates of a search are on the last step, {space.leaf}. Remove `at`."
            errors.add(("gates", name, "at"), text, code="wrong-value")
    errors.raise_if_any()
    return space


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


def _check_chain(
    items: Sequence[Any], names: Sequence[str], parameters: Sequence[Parameter], errors: RecipeErrors
) -> None:
    """Require one chain: each step starts from the one before, and the last one is in every point."""
    for position, item in enumerate(items):
        if "from" in item and item["from"] != (names[position - 1] if position else MODEL_STEP):
            errors.add(
                ("stages", position, "from"),
                "a search needs one chain of stages. Remove `from`, and search each branch by itself.",
                code="not-a-chain",
            )
        item.pop("from", None)
    if any(parameter.kind == "used" and parameter.path[1] == len(items) - 1 for parameter in parameters):
        errors.add(
            ("stages", len(items) - 1, "optional"),
            "the last step is the result of every trial and cannot be optional.",
            code="not-a-chain",
        )


def _check_corners(space: SearchSpace, refused: Sequence[KeyPath], errors: RecipeErrors) -> Plan | None:
    """Add the errors of the recipe at every bound and choice; return the plan of the defaults.

    refused: settings whose range is wrong, which is reported already. None if the defaults have errors.
    """
    base, reported = space.defaults(), set[Message]()
    refused_settings = {dotted_path(path) for path in (*refused, ("gates", "on"))}

    def planned(point: Mapping[str, Any]) -> tuple[Plan | None, list[Message]]:
        try:
            return space.plan_at(point), []
        except InputError as error:
            messages = [
                message for message in error.messages or (error.as_message(),) if message not in reported
            ]
            reported.update(messages)
            return None, [message for message in messages if message.setting not in refused_settings]

    plan, messages = planned(base)
    errors.add_found(messages)
    for parameter in space.parameters:
        for label in parameter.corner_values():
            if label == base[parameter.name]:
                continue
            _, messages = planned(base | {parameter.name: label})
            if messages:
                text = (
                    f"the search space has a value that is refused, {parameter.name} ="
                    f" {value_text(parameter.value_of(label))}:\n{combined_error(messages)}"
                )
                code, name = combined_error(messages).code, space.document.name
                errors.add_found([error_message(code, text, setting=parameter.name, file=name)])
    return plan


def _check_validation(data: Any, errors: RecipeErrors) -> None:
    if isinstance(data, dict) and not (
        data.get("validation") or (isinstance(data.get("split"), dict) and data["split"].get("validation"))
    ):
        errors.add(
            ("data",),
            "a search chooses on validation samples and scores its winners on test. Set data.validation, or"
            " split: {validation: 0.1} to take samples from train.",
            code="missing-data",
        )


def _objectives(
    settings: SearchSettings, plan: Plan | None, task: object, errors: RecipeErrors
) -> tuple[Objective, ...]:
    """Return the objectives, with the name of the metric for `quality`.

    Adds an error for each that is unknown, not scored, named twice, or has the wrong direction. Without a
    plan the scored metrics are not known, and any metric is accepted.
    """
    scored = plan.recipe.score.quality if plan else METRICS_BY_TASK.get(str(task), tuple(METRICS))
    metric_settings = plan.recipe.metric_settings if plan else {}
    timed = plan is None or bool(plan.recipe.score.latency)
    objectives: list[Objective] = []
    for key, maximize in (("minimize", False), ("maximize", True)):
        for index, objective_name in enumerate(_as_tuple(getattr(settings, key))):
            name = scored[0] if objective_name == QUALITY and scored else objective_name
            path: KeyPath = (SEARCH_KEY, key, index)
            if name not in (*COSTS, *scored) and (
                plan or (base_metric(name) == name and not is_custom_metric(name))
            ):
                supported = ", ".join((*COSTS, QUALITY, *scored))
                errors.add(
                    path,
                    f"'{objective_name[:60]}' is not measured. Known: {supported}."
                    f"{did_you_mean(objective_name, (*COSTS, *scored))}",
                    code="metric-not-scored",
                )
            elif maximize == (name in COSTS or is_lower_better(name, metric_settings)):
                direction = "minimize" if maximize else "maximize"
                errors.add(path, f"{name}: {direction} it instead.", code="wrong-direction")
            elif name in [objective.name for objective in objectives]:
                errors.add(path, f"{name} is listed twice. Remove one.", code="duplicate-metric")
            elif name in ("latency", "memory") and not timed:
                errors.add(
                    path,
                    f"{name} needs latency measurements, but `latency: false` is set.",
                    code="settings-conflict",
                )
            else:
                objectives.append(Objective(name, maximize))
    return tuple(objectives)


def _as_tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


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
