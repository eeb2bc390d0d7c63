"""Types of report.json: what a step has, such as scores, times and examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from smelt.core.errors import SettingError


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


STRICT_CONFIG = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _require_ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise SettingError(f"the lower end {pair[0]} is above the upper end {pair[1]}", code="wrong-interval")
    return pair


class ReportModel(BaseModel):
    """A part of report.json, without other fields."""

    model_config = STRICT_CONFIG


class _WithInterval(ReportModel):
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


class GenerationTimings(ReportModel):
    """Parts of a median call of a generating model, ms.

    encoding: the encoder, or a language model's prompt; None where it is part of a graph with the
    generation loop. time_to_first_token: from the start of the call, so with tokenizing and encoding.
    time_per_output_token: of each further token; further_tokens: their number. time_to_first_token +
    time_per_output_token * further_tokens + detokenizing is the call, within 5 % of the p50.
    """

    tokenizing_ms: float
    encoding_ms: float | None
    time_to_first_token_ms: float
    time_per_output_token_ms: float | None
    further_tokens: float
    detokenizing_ms: float


class ClassifierTimings(ReportModel):
    """Parts of a median call of a classifier, ms; the three sum up to it, within 5 % of the p50."""

    tokenizing_ms: float
    model_ms: float
    rest_ms: float


class RoundReport(ReportModel):
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


class LatencyReport(ReportModel):
    """Times of one step at one batch size, from input to output. `rounds_ms`: each round's median call.

    stable: whether a speed may be claimed; where it is False, `cause` and `reason` (text) are why not.
    cpu_speedup: by processor time; it is known also where other work disturbs the wall clock.
    baseline_p50_ms: the baseline's median call in the same rounds. graph_ms: the median time of a call's
    graphs alone.
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


class GateReport(ReportModel):
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


class ScoresOnTest(ReportModel):
    """Test scores of a step that was chosen on validation; `gates` as judged on test."""

    quality: dict[str, Quality]
    against_baseline: dict[str, ScoreDifference]
    gates: list[GateReport] = Field(default_factory=list)


class Agreement(ReportModel):
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


class ConfusionCount(ReportModel):
    """How many examples of a label got another one; `baseline_count`: from the baseline."""

    label: str
    predicted: str
    count: int = Field(ge=0)
    baseline_count: int | None = None


class Confusion(ReportModel):
    """Predicted classes by label. counts: [label][predicted class], in the order of `labels`.

    With many labels `labels` and `counts` are empty, and `largest` has the most frequent wrong predictions.
    """

    labels: list[str] = Field(default_factory=list)
    counts: list[list[int]] = Field(default_factory=list)
    largest: list[ConfusionCount] = Field(default_factory=list)


class ChangedExample(ReportModel):
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


class Examples(ReportModel):
    """The examples whose `metric` changed most from the baseline's; num_worse, num_better: of all `n`."""

    metric: str
    n: int = Field(ge=1)
    num_worse: int = Field(ge=0)
    num_better: int = Field(ge=0)
    worse: list[ChangedExample] = Field(default_factory=list)
    better: list[ChangedExample] = Field(default_factory=list)


class LayerRatio(ReportModel):
    """The SQNR of one layer, dB; None: outputs equal to the baseline's. removed: the step lacks the layer."""

    name: str
    part: str
    sqnr_db: float | None
    removed: bool = False


class LayerSqnr(ReportModel):
    """Signal-to-quantization-noise ratios of a step against the baseline, on `samples` samples.

    output_sqnr_db: of the outputs, each model on its own; None if they are equal, or see `reason`. layers: on
    the hidden states of the baseline, in model order. reason: why layers or outputs are not compared.
    """

    samples: int = Field(ge=0)
    output_sqnr_db: float | None
    layers: list[LayerRatio] = Field(default_factory=list)
    reason: str | None = None


class ClassReport(ReportModel):
    """One class of a classifier; precision, recall and f1 in percent, 0 where they are undefined."""

    label: str
    n: int = Field(ge=0)
    correct: int = Field(ge=0)
    precision: float
    recall: float
    f1: float


class FoldScores(ReportModel):
    """Scores of one metric in k-fold cross-validation: one value for each fold, and their spread.

    std: standard deviation with n - 1. against_baseline: paired, on the held-out samples of all folds.
    """

    values: list[float] = Field(min_length=2)
    mean: float
    std: float = Field(ge=0)
    against_baseline: ScoreDifference | None = None
