"""Types of report.json: the report, its steps and its verdict.

docs/reference/report.md is the documentation of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from smelt.core.errors import InputError, SettingError
from smelt.core.files import load_json
from smelt.core.messages import Message, error_message, messages_to_json
from smelt.evaluate.degenerate_outputs import OutputCounts
from smelt.evaluate.report.step_schema import (
    STRICT_CONFIG,
    Agreement,
    ClassReport,
    Confusion,
    Examples,
    FoldScores,
    GateReport,
    LatencyReport,
    LayerSqnr,
    Quality,
    ReportModel,
    ScoreDifference,
    ScoresOnTest,
)

RunStatus = Literal["passed", "gate-failed", "error", "interrupted"]
StepStatus = Literal["done", "cached", "skipped", "error", "not-reached"]


_EmptyDict = BeforeValidator(lambda value: {} if value is None else value)
_EmptyList = BeforeValidator(lambda value: [] if value is None else value)
Differences = Annotated[dict[str, ScoreDifference], _EmptyDict]


def _message_as_json(error: Message | None) -> dict[str, Any] | None:
    return None if error is None else messages_to_json([error])[0]


_Error = Annotated[Message | None, PlainSerializer(_message_as_json)]
_Messages = Annotated[list[Message], _EmptyList, PlainSerializer(messages_to_json)]


class StepReport(ReportModel):
    """One step of the run, in any status. reason: why it has no artifact or no scores; cause: its code."""

    name: str = Field(min_length=1)
    stage: str
    parent: str | None = None
    status: StepStatus
    from_previous_run: bool = False
    cause: str | None = None
    reason: str | None = None
    error: _Error = None
    format: str | None = None
    target: str | None = None
    runner: str | None = None
    device: str | None = None
    artifact: str | None = None
    deployable: bool | None = None
    key: str | None = None
    settings: Annotated[dict[str, Any], _EmptyDict] = Field(default_factory=dict)
    parameters: int | None = Field(default=None, ge=0)
    operations: int | None = Field(default=None, ge=0)
    size_bytes: int | None = Field(default=None, ge=0)
    float_dtype: str | None = None
    seconds: float | None = Field(default=None, ge=0)
    peak_memory_bytes: int | None = Field(default=None, ge=0)
    gpu_memory_bytes: int | None = Field(default=None, ge=0)
    warnings: _Messages = Field(default_factory=list)
    quality: Annotated[dict[str, Quality], _EmptyDict] = Field(default_factory=dict)
    latency: Annotated[list[LatencyReport], _EmptyList] = Field(default_factory=list)
    against_baseline: Differences = Field(default_factory=dict)
    against_parent: Differences = Field(default_factory=dict)
    gates: Annotated[list[GateReport], _EmptyList] = Field(default_factory=list)
    test: ScoresOnTest | None = None
    agreement: Agreement | None = None
    folds: dict[str, FoldScores] = Field(default_factory=dict)
    layer_sqnr: LayerSqnr | None = None
    confusion: Confusion | None = None
    examples: Examples | None = None
    classes: list[ClassReport] | None = None
    outputs: OutputCounts | None = None
    details: Annotated[dict[str, Any], _EmptyDict] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_words(self) -> Self:
        if self.status == "skipped" and not self.reason:
            raise SettingError("a skipped step needs a 'reason'", code="missing-reason")
        if self.status == "error" and not self.error:
            raise SettingError("a step with status 'error' needs the 'error' text", code="missing-error")
        return self

    @property
    def unscored(self) -> str | None:
        """Why a finished step could not be scored on the machine of the run; None where it was scored."""
        return self.reason if self.status in ("done", "cached") else None

    @property
    def failure_texts(self) -> list[str]:
        """The texts of the error and of the reason, as far as the step has them."""
        return [text for text in (self.error and self.error.message, self.reason) if text]

    def latency_at(self, batch_size: int) -> LatencyReport | None:
        """Return the times at `batch_size`, or None."""
        return next((entry for entry in self.latency if entry.batch_size == batch_size), None)


VerdictReason = Literal[
    "fastest", "fastest-by-cpu-time", "smallest",
    "not-finished", "no-deployable-step", "not-scored", "at-chance", "gates-failed", "significantly-worse",
    "too-few-examples", "nothing-gained",
]  # fmt: skip


class Verdict(ReportModel):
    """The step to deploy, or why none is recommended; `decide` in verdict.py makes it.

    reason: why this step, or why none. closest: where all candidates fail a gate or are significantly worse,
    or those with a gain do, the best of them; the figures are then its own. equally_fast: others as fast as
    `step`. folder: of the artifact, relative to the run's; command: what packages it, run there. value,
    difference: of `metric`, the first, on test where the step was scored there. speedup: at `batch_size`;
    by processor time for `fastest-by-cpu-time`; None where it is unknown. size_ratio: of the baseline's.
    """

    step: str | None = None
    reason: VerdictReason
    text: str
    closest: str | None = None
    equally_fast: list[str] = Field(default_factory=list)
    folder: str | None = None
    command: str | None = None
    metric: str | None = None
    value: float | None = None
    difference: ScoreDifference | None = None
    batch_size: int | None = None
    speedup: float | None = None
    speedup_ci95: tuple[float, float] | None = None
    size_bytes: int | None = None
    size_ratio: float | None = None
    warnings: _Messages = Field(default_factory=list)


SCORES_FOLDER = "scores"
"""Folder of a run with a file per step, NAME.json.gz: statistics per sample and metric, and the outputs."""
STEP_KEYS = ("name", "from", "optional")  # of a recipe's step, next to its stage


class ReportData(ReportModel):
    """A whole report.json, version 3.

    started: when the run began, local time of the machine, ISO 8601 to the minute. seconds: how long it took.
    """

    model_config = ConfigDict(**{**STRICT_CONFIG, "serialize_by_alias": True})
    schema_version: Literal[3] = Field(alias="schema")
    recipe: dict[str, Any]
    environment: dict[str, Any]
    status: RunStatus
    baseline: str | None = None
    judged_on: Literal["validation", "test"] = "test"
    started: str | None = None
    seconds: float | None = Field(default=None, ge=0)
    warnings: _Messages = Field(default_factory=list)
    steps: list[StepReport]
    pareto_front: list[str] = Field(default_factory=list)
    verdict: Verdict | None = None

    @field_validator("recipe")
    @classmethod
    def _check_recipe(cls, recipe: dict[str, Any]) -> dict[str, Any]:
        """Check the types of the recipe's parts that pages and packages read."""
        for name, kind in (("score", dict), ("data", dict), ("stages", list)):
            if not isinstance(recipe.get(name) or kind(), kind):
                raise SettingError(f"'{name}' must be a {kind.__name__}", code="wrong-recipe")
        if not isinstance((recipe.get("score") or {}).get("generation") or {}, dict):
            raise SettingError("'score.generation' must be a dict", code="wrong-recipe")
        for entry in recipe.get("stages") or ():
            values = [v for k, v in entry.items() if k not in STEP_KEYS] if isinstance(entry, dict) else []
            if not isinstance(entry, str | dict) or not all(isinstance(v or {}, dict) for v in values):
                raise SettingError(
                    "'stages' must contain stage names, or mappings of a stage name to settings",
                    code="wrong-recipe",
                )
        return recipe

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        earlier_names: set[str] = set()
        for step in self.steps:
            if step.name in earlier_names:
                raise SettingError(f"two steps are named '{step.name}'", code="duplicate-step")
            if step.parent is not None and step.parent not in earlier_names:
                raise SettingError(
                    f"the parent '{step.parent}' of step '{step.name}' is not an earlier step",
                    code="unknown-parent",
                )
            earlier_names.add(step.name)
        references = [("baseline", self.baseline), *(("pareto_front", name) for name in self.pareto_front)]
        if self.verdict:
            references += [("verdict", self.verdict.step), ("verdict", self.verdict.closest)]
        for field, name in references:
            if name is not None and name not in earlier_names:
                raise SettingError(f"'{field}' refers to '{name}', which is not a step", code="unknown-step")
        return self

    @model_validator(mode="after")
    def _mark_random(self) -> Self:
        for step in self.steps if self.is_random else ():
            comparisons = [step.against_baseline, step.against_parent]
            for differences in [*comparisons, *([step.test.against_baseline] if step.test else [])]:
                for difference in differences.values():
                    difference.mark_random()
        return self

    @property
    def is_random(self) -> bool:
        """Whether the source graph of the run draws random numbers."""
        return any(message.code == "random-outputs" for message in self.warnings)

    @property
    def baseline_step(self) -> StepReport | None:
        """The step that the others are compared with."""
        return next((step for step in self.steps if step.name == self.baseline), None)


def read_report(run: Path) -> dict[str, Any]:
    """Return the report of the run in the folder `run`, or the report.json at that path, checked.

    Raises:
        InputError: there is no report, or this version of smelt cannot read it.
    """
    path = run if run.is_file() else run / "report.json"
    if not path.is_file():
        is_search = (run / "search.json").is_file()
        hint = " This is the folder of a search; its runs are in points." if is_search else ""
        raise InputError(
            f"{path}: no such file. Expected the folder of a run, such as runs/quickstart.{hint}",
            code="missing-file",
            file=str(path),
        )
    try:
        report: dict[str, Any] = load_json(path)
        validate_report(report)
    except ValueError as error:
        raise InputError(f"{path}: invalid JSON: {error}", code="damaged-file", file=str(path)) from error
    except InputError as error:
        text = f"{path}: {error}"
        raise InputError(text, code=error.code, file=str(path), messages=error.messages) from error
    return report


def validate_report(report: Mapping[str, Any]) -> ReportData:
    """Check a report as read from report.json.

    Raises:
        InputError: with every deviation from the schema.
    """
    try:
        return ReportData.model_validate(report)
    except ValidationError as error:
        wrong = [_schema_error(schema_error) for schema_error in error.errors()]
        lines = [f"  {schema_error.setting or 'report'}: {schema_error.message}" for schema_error in wrong]
        raise InputError(
            "This report.json does not match schema 3 of this version of smelt:\n" + "\n".join(lines),
            code="invalid-report",
            messages=wrong,
        ) from error


def _schema_error(detail: ErrorDetails) -> Message:
    """Return a deviation from the schema: pydantic's finding, or one of our own checks."""
    refused = detail.get("ctx", {}).get("error")
    code = refused.code if isinstance(refused, SettingError) else detail["type"].replace("_", "-")
    input_text = text if len(text := repr(detail["input"])) <= 80 else f"{text[:77]}..."
    location = ".".join(map(str, detail["loc"]))
    return error_message(code, f"{detail['msg']}; got {input_text}", setting=location or None)
