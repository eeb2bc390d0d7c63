"""Types of report.json, which docs/reference/report.md documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from smelt.core.errors import InputError, SettingError
from smelt.core.files import load_json
from smelt.core.messages import Message, error_message, messages_to_json
from smelt.evaluate.degenerate_outputs import OutputCounts


def is_chance_level(
    value: float, ci95: Sequence[float] | None, chance: float | None, higher_is_better: bool
) -> bool:
    """Return whether a score cannot be distinguished from `chance`, the value without a model.

    Args:
        value: the score.
        ci95: its interval; without one the value itself is compared.
        chance: None where it is not known.
        higher_is_better: direction of the metric.
    """
    if chance is None:
        return False
    low, high = ci95 or (value, value)
    return low <= chance if higher_is_better else high >= chance


def is_step_at_chance(step: Mapping[str, Any]) -> bool:
    """Return whether the first metric of a step (of report.json) is at chance level."""
    for score in (step.get("quality") or {}).values():
        return is_chance_level(
            score["value"], score.get("ci95"), score.get("chance"), score["higher_is_better"]
        )
    return False


RunStatus = Literal["passed", "gate-failed", "error", "interrupted"]
StepStatus = Literal["done", "cached", "skipped", "error", "not-reached"]

STRICT_CONFIG = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _require_ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise SettingError(f"the lower end {pair[0]} is above the upper end {pair[1]}", code="wrong-interval")
    return pair


class _ReportModel(BaseModel):
    model_config = STRICT_CONFIG


class _WithInterval(_ReportModel):
    ci95: tuple[float, float] | None

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        if self.ci95 is not None:
            _require_ordered(self.ci95)
        return self


class Quality(_WithInterval):
    """One metric of one step, in `unit`."""

    value: float
    unit: str
    higher_is_better: bool
    n: int = Field(ge=1)
    signature: str
    chance: float | None = None
    parts: dict[str, float] = Field(default_factory=dict)

    @property
    def at_chance(self) -> bool:
        """Whether the interval contains the value without a model (chance), or is worse than it."""
        return is_chance_level(self.value, self.ci95, self.chance, self.higher_is_better)


class GenerationTimings(_ReportModel):
    """Parts of a median call of a generating model, ms; see docs/explanation/latency.md.

    encoding: None where it is part of a graph with the generation loop. time_to_first_token +
    time_per_output_token * further_tokens + detokenizing is the call, within 5 % of the p50.
    """

    tokenizing_ms: float
    encoding_ms: float | None
    time_to_first_token_ms: float
    time_per_output_token_ms: float | None
    further_tokens: float
    detokenizing_ms: float


class ClassifierTimings(_ReportModel):
    """Parts of a median call of a classifier, ms; the three sum up to it, within 5 % of the p50."""

    tokenizing_ms: float
    model_ms: float
    rest_ms: float


class RoundReport(_ReportModel):
    """Load during a round and the baseline's paired round; see docs/explanation/latency.md."""

    counted: bool
    speedup: float | None
    cpu_speedup: float | None = None
    baseline_ms: float | None
    processor_share: float
    baseline_processor_share: float | None
    lost_share: float
    other_processors: float
    cpu_steal: float
    pressure: float | None
    other_gpu_share: float | None = None


class LatencyReport(_ReportModel):
    """Times of one step at one batch size, from input to output. `rounds_ms`: each round's median call.

    stable: whether a speed may be claimed; where it is False, `cause` and `reason` (text) are why not.
    cpu_speedup: by processor time, known also where other work disturbs the wall clock. baseline_p50_ms: the
    baseline's median call in the same rounds. graph_ms: the median time of a call's graphs alone.
    """

    batch_size: int = Field(ge=1)
    threads: int | None = None
    texts: int | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    p50_ms: float = Field(ge=0)
    p90_ms: float | None = None
    p99_ms: float | None = None
    graph_ms: float | None = None
    cpu_ms: float | None = None
    throughput: float | None = None
    unit: str | None = None
    output_tokens_per_second: float | None = None
    speedup: float | None = None
    speedup_ci95: tuple[float, float] | None = None
    cpu_speedup: float | None = None
    cpu_speedup_ci95: tuple[float, float] | None = None
    baseline_p50_ms: float | None = None
    stable: bool | None = None
    cause: Literal["busy", "disagree"] | None = None
    reason: str | None = None
    parts: GenerationTimings | ClassifierTimings | None = None
    rounds_ms: list[float] | None = None
    rounds: list[RoundReport] | None = None

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        for ends in (self.speedup_ci95, self.cpu_speedup_ci95):
            if ends:
                _require_ordered(ends)
        if self.stable is False and not self.reason:
            raise SettingError("latency with stable: false needs a 'reason'", code="missing-reason")
        return self


class ScoreDifference(_WithInterval):
    """Difference between this step and another one (this minus other), on the same examples.

    p_value_holm: p_value corrected for all comparisons with the baseline in the report; None for other
    comparisons. n: compared examples.
    """

    difference: float
    n: int | None = Field(default=None, ge=1)
    p_value: float = Field(ge=0, le=1)
    p_value_holm: float | None = Field(default=None, ge=0, le=1)
    _is_random: bool = PrivateAttr(default=False)

    @property
    def is_random(self) -> bool:
        """Whether the graph draws random numbers, so that results differ between runs of the same weights."""
        return self._is_random

    def mark_random(self) -> None:
        """Mark that the graph draws random numbers."""
        self._is_random = True


class GateReport(_ReportModel):
    """A limit of the recipe and whether the step is within it.

    `value` is None where it was not measured (see `reason`); `passed` is None where it cannot be
    measured on this machine, or was disturbed. With `confidence` the `bound` of the interval was judged.
    undecided: without `confidence`, whether the 95 % interval exceeds the limit although the value is within
    it. n_needed: about how many examples would decide the limit, where there are too few. cause: the code of
    `reason`.
    """

    metric: str
    kind: str
    limit: float
    value: float | None
    passed: bool | None
    confidence: float | None = None
    bound: float | None = None
    undecided: bool = False
    n_needed: int | None = None
    cause: str | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _check_reason(self) -> Self:
        if self.passed is None and not self.reason:
            raise SettingError("a gate that was not evaluated needs a 'reason'", code="missing-reason")
        return self


class ScoresOnTest(_ReportModel):
    """Test scores of a step that was chosen on validation; `gates` as judged on test."""

    quality: dict[str, Quality]
    against_baseline: dict[str, ScoreDifference]
    gates: list[GateReport] = Field(default_factory=list)


class Agreement(_ReportModel):
    """How far a step's outputs equal the baseline's, on `n` examples; no references are used.

    equal: percent of equal outputs. bleu, chrf: of generated texts, with the baseline's as references.
    kl_divergence: KL(baseline || step), over `kl_n` examples. Of classes: of their probabilities, nats per
    example. Of texts: of the next-token distributions, nats per token, over `kl_tokens` tokens of the
    baseline's outputs. kl_reason: why it cannot be computed.
    """

    n: int = Field(ge=1)
    equal: float = Field(ge=0, le=100)
    bleu: float | None = None
    chrf: float | None = None
    kl_divergence: float | None = Field(default=None, ge=0)
    kl_n: int | None = Field(default=None, ge=1)
    kl_tokens: int | None = Field(default=None, ge=1)
    kl_reason: str | None = None
    signatures: dict[str, str] = Field(default_factory=dict)


class ConfusionCount(_ReportModel):
    """How many examples of a label got another one; `baseline_count`: from the baseline."""

    label: str
    predicted: str
    count: int = Field(ge=0)
    baseline_count: int | None = None


class Confusion(_ReportModel):
    """Predicted classes by label. counts: [label][predicted class], in the order of `labels`.

    With many labels `labels` and `counts` are empty, and `largest` has the most frequent wrong predictions.
    """

    labels: list[str] = Field(default_factory=list)
    counts: list[list[int]] = Field(default_factory=list)
    largest: list[ConfusionCount] = Field(default_factory=list)


class ChangedExample(_ReportModel):
    """An example that a step scores other than the baseline. row: its number in the data, from 1.

    value, baseline_value: the metric on this example alone. cut: whether texts are excerpts.
    """

    row: int = Field(ge=1)
    source: str
    text_pair: str | None = None
    references: list[str] = Field(default_factory=list)
    baseline_output: str
    output: str
    baseline_value: float
    value: float
    cut: bool = False


class Examples(_ReportModel):
    """The examples whose `metric` changed most from the baseline's; num_worse, num_better: of all `n`."""

    metric: str
    n: int = Field(ge=1)
    num_worse: int = Field(ge=0)
    num_better: int = Field(ge=0)
    worse: list[ChangedExample] = Field(default_factory=list)
    better: list[ChangedExample] = Field(default_factory=list)


class LayerRatio(_ReportModel):
    """The SQNR of one layer, dB; None: outputs equal to the baseline's. removed: the step lacks the layer."""

    name: str
    part: str
    sqnr_db: float | None
    removed: bool = False


class LayerSqnr(_ReportModel):
    """Signal-to-quantization-noise ratios of a step against the baseline, on `samples` samples.

    output_sqnr_db: of the outputs, each model on its own; None if they are equal, or see `reason`. layers: on
    the hidden states of the baseline, in model order. reason: why layers or outputs are not compared.
    """

    samples: int = Field(ge=0)
    output_sqnr_db: float | None
    layers: list[LayerRatio] = Field(default_factory=list)
    reason: str | None = None


_EmptyDict = BeforeValidator(lambda value: {} if value is None else value)
_EmptyList = BeforeValidator(lambda value: [] if value is None else value)
Differences = Annotated[dict[str, ScoreDifference], _EmptyDict]


def _message_as_json(error: Message | None) -> dict[str, Any] | None:
    return None if error is None else messages_to_json([error])[0]


_Error = Annotated[Message | None, PlainSerializer(_message_as_json)]
_Messages = Annotated[list[Message], _EmptyList, PlainSerializer(messages_to_json)]


class ClassReport(_ReportModel):
    """One class of a classifier; precision, recall and f1 in percent, 0 where they are undefined."""

    label: str
    n: int = Field(ge=0)
    correct: int = Field(ge=0)
    precision: float
    recall: float
    f1: float


class FoldScores(_ReportModel):
    """Scores of one metric in k-fold cross-validation: one value for each fold, and their spread.

    std: standard deviation with n - 1. against_baseline: paired, on the held-out samples of all folds.
    """

    values: list[float] = Field(min_length=2)
    mean: float
    std: float = Field(ge=0)
    against_baseline: ScoreDifference | None = None


class StepReport(_ReportModel):
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


class Verdict(_ReportModel):
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


class ReportData(_ReportModel):
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
