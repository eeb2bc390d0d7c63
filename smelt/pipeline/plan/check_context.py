"""What the checks of a recipe share: the recipe, its steps, model and data, and which parts are invalid.

A check is a function that yields findings: errors, warnings and notes, each with the path of the value that
it is about. `smelt.pipeline.plan.load_plan` lists the checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from smelt.core.artifact import Format
from smelt.core.errors import did_you_mean
from smelt.core.messages import Message
from smelt.data.labels import ProblemType
from smelt.data.splits import Split
from smelt.pipeline.inspect.model_info import OnnxModel
from smelt.pipeline.plan.plan import PlannedGate, PlanStep
from smelt.pipeline.plan.step_draft import StepDraft
from smelt.pipeline.recipe import stages
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.pipeline.recipe.stages import MODEL_STEP, step_names
from smelt.pipeline.recipe.validation_errors import Finding, RecipeErrors, has_error
from smelt.pipeline.recipe.yaml_file import KeyPath

ResultT = TypeVar("ResultT")
# A part of a check, which yields findings and returns a result.
Findings = Generator[Finding, None, ResultT]


@dataclass
class CheckContext:
    """A recipe while it is checked.

    recipe: the recipe, completed by what model and data determine, such as default metrics.
    errors: all errors so far, which are reported together.
    invalid_paths: dotted paths of the parts that are known to be invalid.
    start_format: the format of the original model.
    until: the last step of the run; None for all.
    drafts: the steps by name, in the recipe's order.
    steps: the complete steps, parents first.
    included_names: the steps of the run, in order.
    gates: the gates of the run.
    onnx_model: the ONNX model that the recipe starts from, if it does.
    model_folder: the folder of the model, or of a third-party model's tokenizer; None if it is not downloaded
        or created yet.
    splits: the splits that were read, because their files are small.
    problem_type: problem type of a classifier, if model and data are available.
    warnings, notes: warnings for plan and report, notes for the plan only.
    """

    recipe: ParsedRecipe
    errors: RecipeErrors
    invalid_paths: set[str]
    start_format: Format = "torch"
    until: str | None = None
    drafts: dict[str, StepDraft] = field(default_factory=dict)
    steps: tuple[PlanStep, ...] = ()
    included_names: list[str] = field(default_factory=list)
    gates: tuple[PlannedGate, ...] = ()
    onnx_model: OnnxModel | None = None
    model_folder: Path | None = None
    splits: Mapping[str, Split] = field(default_factory=dict)
    problem_type: ProblemType | None = None
    warnings: list[Message] = field(default_factory=list)
    notes: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.declared_names = step_names(list(self.recipe.stages))
        self._unparsed_names = _unparsed_step_names(self.recipe) if self.is_invalid("stages") else set()

    def run(self, check: Check) -> None:
        """Add the findings of `check`."""
        for path, message in check(self):
            if message.severity == "warning":
                self.warnings.append(message)
            elif message.severity == "info":
                self.notes.append(message)
            elif path:
                self.errors.add_message(path, message)
            else:
                self.errors.add(path, message.message, message.line, code=message.code)

    def is_invalid(self, *paths: str) -> bool:
        """Return whether one of these parts of the recipe is known to be invalid, wholly or partly."""
        return has_error(self.invalid_paths, *paths)

    @property
    def step_names(self) -> list[str]:
        """The names of all steps, `model` first."""
        return [MODEL_STEP, *self.drafts]

    @property
    def included_steps(self) -> tuple[PlanStep, ...]:
        """The complete steps of the run, parents first."""
        return tuple(step for step in self.steps if step.name in self.included_names)

    def may_exist(self, name: str) -> bool:
        """Return whether there is a step `name`, or possibly one among the invalid steps."""
        return name in self.step_names or not self._unparsed_names.isdisjoint(
            {"*", name, name.rpartition("-")[0]}
        )

    def unknown_step_text(self, name: str) -> str:
        """Return the message that there is no step `name`."""
        hint = did_you_mean(name, self.step_names)
        return f"no step '{name[:60]}'. Known steps: {', '.join(self.step_names)}.{hint}"

    def setting_path(self, step: str, setting: str = "") -> KeyPath:
        """Return the path of a setting such as `phases.0.losses` of the step `step`."""
        keys = (int(key) if key.isdigit() else key for key in setting.split(".") if key)
        return (*self.drafts[step].entry.path, *keys)

    def setting_findings(self, step: PlanStep, errors: Iterable[Message]) -> Iterator[Finding]:
        """Yield errors in the settings of `step`, except in those that are invalid anyway."""
        for message in errors:
            setting = message.setting or ""
            if setting.partition(".")[0] not in step.invalid_settings:
                yield self.setting_path(step.name, setting), message

    def step_format(self, name: str) -> Format | None:
        """Return the output format of the step `name`; None if unknown."""
        return self.start_format if name == MODEL_STEP else self.drafts[name].format

    def ancestors(self, draft: StepDraft) -> list[StepDraft]:
        """Return the ancestors of `draft`, nearest first."""
        ancestors: list[StepDraft] = []
        name = draft.parent
        while name is not None and name in self.drafts:
            ancestors.append(self.drafts[name])
            name = self.drafts[name].parent
        return ancestors

    @property
    def leaf_names(self) -> tuple[str, ...]:
        """The last scored steps of each branch; `model` if there are none."""
        running = [d for d in self.drafts.values() if not d.unavailable and not d.unscored]
        parents = {d.parent for d in running}
        return tuple(d.name for d in running if d.name not in parents) or (MODEL_STEP,)


Check = Callable[[CheckContext], Iterable[Finding]]


def skip_if_invalid(*paths: str) -> Callable[[Check], Check]:
    """Return a decorator: the check is skipped if one of these parts of the recipe is known to be invalid."""

    def decorate(check: Check) -> Check:
        @functools.wraps(check)
        def check_valid_parts(context: CheckContext) -> Iterator[Finding]:
            if not context.is_invalid(*paths):
                yield from check(context)

        return check_valid_parts

    return decorate


def _unparsed_step_names(recipe: ParsedRecipe) -> set[str]:
    """Return the possible names of invalid steps; `*` for any name."""
    items = recipe.document.get("stages")
    if not isinstance(items, list):
        return {"*"}
    parsed = {entry.index for entry in recipe.stages}
    names: set[str] = set()
    for number, item in enumerate(items):
        name = item.get("name") if isinstance(item, dict) else None
        if number not in parsed:
            # without `name`, a step has the name of its stage, which is unknown if mistyped
            names |= {name} if isinstance(name, str) else set(stages.STAGE_CLASSES)
    return names
