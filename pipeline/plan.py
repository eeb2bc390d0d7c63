"""The plan: the tree of steps that a recipe asks for, checked as far as it can be without doing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smelt.core.artifact import Format
from smelt.core.data import Split, read_split
from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.labels import ProblemType
from smelt.core.stage import Settings, Stage
from smelt.model_folder import fetch_model
from smelt.recipe import Recipe, examine, find_recipe
from smelt.recipe_yaml import read_yaml


@dataclass(frozen=True)
class Step:
    """One stage with its settings, and the step that it goes on from (`model` is the untouched one).

    unavailable: why it cannot run on this machine, or None. unscored: why what it makes cannot be scored
    on this machine, or None.
    """

    name: str
    stage: str
    cls: type[Stage[Any]]
    settings: Settings
    parent: str
    optional: bool
    line: int
    unavailable: str | None = None
    unscored: str | None = None

    @property
    def format(self) -> Format:
        """What the step gives: torch, onnx or tensorrt."""
        return self.cls.produces

    @property
    def stands_on(self) -> tuple[str, ...]:
        """The steps that must be there before this one: its parent and those that its settings name."""
        return (self.parent, *self.settings.references().values())


@dataclass(frozen=True)
class PlannedGate:
    """A limit on one metric, as in report.json. kind: max_drop, min or max. at: names of steps.

    confidence: of the interval whose worse end is judged; None judges the value.
    """

    metric: str
    kind: str
    limit: float
    at: tuple[str, ...]
    confidence: float | None = None


@dataclass(frozen=True)
class Plan:
    """A checked recipe.

    steps: in the recipe's order, parents first; the untouched model is not among them. With `until`
    only that step and those above it. splits: the rows that were read already, because their files
    are small. text: the recipe as it stands in its file. left_out: the steps that `until` cuts off.
    problem: what a classifier does, where model and data are at hand.
    """

    recipe: Recipe
    steps: tuple[Step, ...]
    gates: tuple[PlannedGate, ...]
    local_model: Path | None
    text: str
    splits: Mapping[str, Split] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    until: str | None = None
    left_out: tuple[str, ...] = ()
    problem: ProblemType | None = None

    @property
    def path(self) -> Path:
        """The recipe's file."""
        return self.recipe.path

    @property
    def model_folder(self) -> Path:
        """The folder of the untouched model; an id on the hub is downloaded now.

        Raises:
            InputError: the hub does not give it, or smelt cannot start from it.
        """
        return self.local_model or fetch_model(str(self.recipe.model), self.recipe.base, self.recipe.task)

    def recipe_dict(self) -> dict[str, Any]:
        """Return the recipe as plain values, `--set` applied."""
        return dict(self.recipe.document)

    def gates_of(self, name: str) -> list[PlannedGate]:
        """Return the gates on the step `name`."""
        return [gate for gate in self.gates if name in gate.at]

    def step(self, name: str) -> Step:
        """Return the step `name`."""
        return next(step for step in self.steps if step.name == name)

    def children(self, name: str) -> list[Step]:
        """Return the steps that go on from the step `name` (`model` for the untouched one)."""
        return [step for step in self.steps if step.parent == name]

    def require_runnable(self) -> None:
        """Make sure that all that is to be done can be done on this machine.

        Raises:
            MissingDependencyError: a step that is not optional cannot run; every such step is named.
        """
        missing = [step for step in self.steps if step.unavailable and not step.optional]
        if missing:
            raise MissingDependencyError(
                "\n".join(
                    f"{self.recipe.path}:{step.line}: step '{step.name}' cannot run here: {step.unavailable}"
                    " With `optional: true` beside the stage it is skipped."
                    for step in missing
                )
            )

    def read_data(self, limit: int | None = None) -> dict[str, Split]:
        """Read the rows of every split that the recipe names, the first `limit` of each.

        Raises:
            InputError: what is wrong with the data, all splits together.
        """
        splits, problems = dict(self.splits), []
        for name, origin in self.recipe.data.splits().items():
            if name not in splits:
                try:
                    splits[name] = read_origin(self.recipe, origin, name)
                except InputError as error:
                    problems.append(str(error))
        if problems:
            raise InputError("\n".join(problems))
        return {name: split.head(limit) for name, split in splits.items()}


def read_origin(recipe: Recipe, origin: str, name: str) -> Split:
    """Read the rows of the split `name` of `recipe` from `origin`."""
    split = read_split(origin, recipe.task, recipe.data.columns, recipe.base, name)
    if split.windows is None:
        return split
    given = recipe.data.windows.model_dump(exclude_none=True)
    return replace(split, windows=split.windows.model_copy(update=given))


def load_plan(recipe: str | Path, overrides: Sequence[str] = (), until: str | None = None) -> Plan:
    """Read the recipe (a file, or the name of one that ships) and check all that can be checked now.

    Raises:
        InputError: every mistake in the recipe, the model's folder and the data, one per line, each
            with file and line.
    """
    from smelt.plan_checks import Checker
    from smelt.plan_engines import fit_engines
    from smelt.plan_fit import check_fit
    from smelt.plan_inputs import check_data, check_device, check_model
    from smelt.plan_labels import check_classifier
    from smelt.untrained import check_untrained

    path = recipe if isinstance(recipe, Path) else find_recipe(recipe)
    document = read_yaml(path)
    read, mistakes, bad = examine(document, path, overrides)
    checker = Checker(read, mistakes, bad)
    every = fit_engines(checker.steps(), read, checker.places, mistakes)
    kept = checker.cut(until)
    gates = checker.gates(kept)
    checker.baseline(kept)
    folder = check_model(read, mistakes, bad, checker.warnings)
    check_untrained(read, every, mistakes, bad)
    check_fit(every, checker.places, folder, mistakes)
    splits = check_data(read, mistakes, bad)
    check_device(read, mistakes, bad)
    read, problem = check_classifier(read, folder, splits, mistakes, bad)
    mistakes.raise_all()
    text = document.text + "".join(f"\n# --set {override}" for override in overrides)
    return Plan(
        recipe=read,
        steps=tuple(step for step in every if step.name in kept),
        gates=gates,
        local_model=folder,
        text=text,
        splits=splits,
        warnings=tuple(checker.warnings),
        until=until,
        left_out=tuple(step.name for step in every if step.name not in kept),
        problem=problem,
    )


def describe_plan(plan: Plan) -> str:
    """Return the plan as text of at most 80 columns, for `smelt plan`."""
    from smelt.plan_text import plan_text

    return plan_text(plan)
