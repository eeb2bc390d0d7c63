"""The plan: the tree of steps that a recipe asks for, with what it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smelt.core.artifact import Format
from smelt.core.data import Split
from smelt.core.errors import InputError, MissingDependencyError, together
from smelt.core.labels import ProblemType
from smelt.core.messages import Message, mistake
from smelt.core.shares import limited
from smelt.core.stage import Need, Settings, Stage
from smelt.look.foreign import ForeignModel
from smelt.look.model_folder import fetch_model
from smelt.plan.splits import read_source
from smelt.recipe.recipe import JudgedOn, Recipe
from smelt.recipe.stages import ROOT


@dataclass(frozen=True)
class Step:
    """One stage with its settings, and the step that it goes on from (`model` is the untouched one).

    needs: data and machine, as its settings make it. wrong: settings that are mistakes and have their
    defaults here, while a recipe is being checked. unavailable: why it cannot run on this machine, or None.
    unscored: why what it makes cannot be scored on this machine, or None.
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
    wrong: frozenset[str] = frozenset()
    needs: frozenset[Need] = frozenset()

    @property
    def format(self) -> Format:
        """What the step gives: torch, onnx or tensorrt."""
        return self.cls.produces

    @property
    def trains(self) -> bool:
        """Whether it learns from the training rows."""
        return bool(self.needs & {"train", "unlabelled"})

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
    are small. text: the recipe as it stands in its file. rest: the steps that `until` cuts off. order: the
    names of all steps, as the recipe has them.
    warnings: what a person should know; the report says it too. notes: what only the plan's reader needs.
    judged_on: the split that steps are scored on, gates judged and a step recommended.
    problem: what a classifier does, where model and data are at hand. foreign: the ONNX graph that the recipe
    starts from; None where it starts from weights.
    """

    recipe: Recipe
    steps: tuple[Step, ...]
    gates: tuple[PlannedGate, ...]
    local_model: Path | None
    text: str
    splits: Mapping[str, Split] = field(default_factory=dict)
    warnings: tuple[Message, ...] = ()
    notes: tuple[Message, ...] = ()
    until: str | None = None
    rest: tuple[Step, ...] = ()
    order: tuple[str, ...] = ()
    judged_on: JudgedOn = "test"
    problem: ProblemType | None = None
    foreign: ForeignModel | None = None

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of the steps that `until` cuts off."""
        return tuple(step.name for step in self.rest)

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

    @property
    def blocked(self) -> list[Step]:
        """The steps that cannot run on this machine and are not optional."""
        return [step for step in self.steps if step.unavailable and not step.optional]

    def above(self, step: Step) -> list[str]:
        """Return what `step` may look at: the model, the steps that it names, those it goes on from."""
        parents = {s.name: s.parent for s in self.steps}
        line, name = list[str](), step.parent
        while name != ROOT:
            line.append(name)
            name = parents[name]
        named = [name for name in step.stands_on if name != ROOT and name not in line]
        return [ROOT, *named, *reversed(line)]

    def require_runnable(self) -> None:
        """Make sure that all that is to be done can be done on this machine.

        Raises:
            MissingDependencyError: a step that is not optional cannot run; every such step is named.
        """
        if self.blocked:
            raise together(
                (
                    mistake(
                        "step-unavailable",
                        f"step '{step.name}' cannot run here: {step.unavailable}"
                        " With `optional: true` beside the stage it is skipped.",
                        file=str(self.recipe.path),
                        line=step.line,
                    )
                    for step in self.blocked
                ),
                MissingDependencyError,
            )

    def read_data(self, limit: int | None = None) -> dict[str, Split]:
        """Read the rows of every split that the recipe names, `limit` of each.

        Raises:
            InputError: what is wrong with the data, all splits together.
        """
        splits, problems = dict(self.splits), list[Message]()
        for name in self.recipe.data.files():
            if name not in splits:
                try:
                    splits |= read_source(self.recipe, name)
                except InputError as error:
                    problems += error.found or [error.as_message()]
        if problems:
            raise together(problems)
        return {name: limited(splits[name], limit) for name in self.recipe.data.splits()}
