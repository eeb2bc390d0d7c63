"""Score outputs: build the samples, ask each metric for its rows, and add value, n, interval and chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from smelt.core.errors import InputError
from smelt.core.files import json_hash
from smelt.data.tags import TagScheme
from smelt.evaluate.metrics.entities import TagSamples
from smelt.evaluate.metrics.metric import (
    ChoiceSamples,
    ClassSamples,
    ComparedOutputs,
    MaskedSamples,
    MetricSettingValues,
    ResponseSamples,
    Samples,
    TextSamples,
    WindowSamples,
)
from smelt.evaluate.metrics.registry import (
    AGREEMENT_METRIC,
    TEXT_METRICS,
    find_metric,
    metrics_of,
    require_known_metrics,
)
from smelt.evaluate.significance import Statistics, metric_interval, metric_value
from smelt.generation.backend import check_finite_outputs


class MetricScore(BaseModel):
    """One metric on one set of examples.

    value: 0-100, in `unit`. ci95: lower and upper end of the 95 % interval, None where there are
    too few examples. signature: version and settings that the value depends on. chance: the value without a
    model (see `Metric.chance_level`), None where there is no such value. parts: see `Metric.parts`.
    statistics: per example, for `significance.compare_steps`; not part of `model_dump`, store it with
    `score.statistics.dump()`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    metric: str
    value: float
    unit: str
    higher_is_better: bool = True
    n: int
    ci95: tuple[float, float] | None
    signature: str
    chance: float | None = None
    parts: dict[str, float] = Field(default_factory=dict)
    statistics: Statistics = Field(exclude=True, repr=False)

    def to_report(self) -> dict[str, Any]:
        """Return the entry of report.json under `quality.METRIC`."""
        return self.model_dump(mode="json", exclude={"metric"})


def score_metrics(
    metrics: Sequence[str], *samples: Samples, settings: MetricSettingValues | None = None
) -> dict[str, MetricScore]:
    """Score samples by each metric that can score them; other metrics are left out.

    Args:
        metrics: names, also as `variant_name`; the result has their order.
        samples: of one kind or several; a metric scores the kind that it is for.
        settings: by metric.
    """
    scores = {}
    for name in metrics:
        metric = find_metric(name)
        matching_samples = next(
            (candidate for candidate in samples if isinstance(candidate, metric.samples)), None
        )
        if matching_samples is None:
            continue
        metric_rows = metric.example_rows(matching_samples, (settings or {}).get(name, {}))
        if metric_rows is None:
            continue
        statistics = Statistics(
            metric=name,
            signature=metric_rows.signature,
            examples=matching_samples.examples,
            rows=metric_rows.rows,
        )
        score = metric_score(statistics, metric_rows.value)
        changes = {"chance": metric_rows.chance, "unit": metric_rows.unit, "n": metric_rows.count}
        scores[name] = score.model_copy(
            update={field: value for field, value in changes.items() if value is not None}
        )
    return scores


def metric_score(statistics: Statistics, value: float | None = None) -> MetricScore:
    """Return the score of `statistics`; value: where the reference library rounds it differently."""
    metric = find_metric(statistics.metric)
    return MetricScore(
        metric=statistics.metric,
        value=metric_value(statistics) if value is None else value,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        n=len(statistics.rows),
        ci95=metric_interval(statistics),
        signature=statistics.signature,
        chance=metric.chance_level(statistics.rows),
        parts=metric.parts(statistics.rows),
        statistics=statistics,
    )


def check_inputs(metrics: Sequence[str], known: Sequence[str], outputs: int, expected: int) -> None:
    """Check that the metrics are `known`, and that there is one output for each example.

    Raises:
        InputError: they are not.
    """
    require_known_metrics(metrics, known)
    if outputs != expected:
        raise InputError(
            f"{outputs} predictions for {expected} examples; one for each example is required.",
            code="count-mismatch",
        )
    if not expected:
        raise InputError("No examples to score; the data needs at least one example.", code="empty-data")


def score_texts(
    metrics: Sequence[str],
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    settings: MetricSettingValues | None = None,
    language: str | None = None,
    base: Path = Path(),
    device: str = "cpu",
) -> dict[str, MetricScore]:
    """Score generated texts.

    Args:
        metrics: names of metrics of texts; the result has their order.
        predictions: n texts.
        references: for each prediction one or more references; their number may differ.
        settings: by metric.
        language: of the references, an ISO 639 code, where it is known.
        base: the folder that paths in `settings` are relative to.
        device: auto, cpu or cuda, for metrics with a model.

    Raises:
        InputError: an unknown metric, no examples, an example without a reference, or as the metrics.
        MissingDependencyError: what a metric needs is not installed.
    """
    check_inputs(metrics, TEXT_METRICS, len(predictions), len(references))
    for index, texts in enumerate(references, start=1):
        if isinstance(texts, str) or not texts:
            raise InputError(
                f"Example {index} needs a list with at least one reference text, got {texts!r}.",
                code="missing-references",
            )
    examples = json_hash([list(texts) for texts in references])
    samples = TextSamples(examples, predictions, references, language, base, device)
    return score_metrics(metrics, samples, settings=settings)


def score_labels(
    metrics: Sequence[str],
    predicted: Sequence[int],
    gold: Sequence[int],
    logits: NDArray[np.float32] | None = None,
    only: Mapping[str, int] | None = None,
) -> dict[str, MetricScore]:
    """Score predicted classes against the gold ones.

    Args:
        metrics: names of metrics of classes, also as `variant_name`.
        predicted: n class numbers.
        gold: n class numbers.
        logits: float32 [n, C]; for cross_entropy.
        only: by metric the class that it scores; other metrics score all.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
        RunError: `non-finite-outputs`.
    """
    check_inputs(metrics, metrics_of(ClassSamples), len(predicted), len(gold))
    samples = ClassSamples(json_hash([int(label) for label in gold]), predicted, gold, logits)
    settings = {name: {"label": label} for name, label in (only or {}).items()}
    return score_metrics(metrics, samples, settings=settings)


def score_responses(
    metrics: Sequence[str],
    losses: Sequence[float],
    tokens: Sequence[int],
    sizes: Sequence[int],
    examples: object,
    vocabulary: int | None,
) -> dict[str, MetricScore]:
    """Score reference responses, given their prompts. Intervals and tests resample responses.

    Args:
        metrics: names of metrics of responses.
        losses: for each example the sum of the negative log-likelihoods of its response's tokens, nats.
        tokens: for each example the number of these tokens.
        sizes: for each example the UTF-8 bytes of its response.
        examples: prompts and responses (JSON-able); only scores on equal examples can be compared in pairs.
        vocabulary: number of tokens; it equals the perplexity of a uniform model.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
        RunError: `non-finite-outputs`.
    """
    check_inputs(metrics, metrics_of(ResponseSamples), len(losses), len(tokens))
    check_finite_outputs(np.asarray(losses, dtype=np.float64))
    settings = "refs:first|tokens:response and its end"
    samples = ResponseSamples(json_hash(examples), losses, tokens, sizes, settings, vocabulary)
    return score_metrics(metrics, samples)


def score_choices(
    metrics: Sequence[str],
    losses: Sequence[Sequence[float]],
    choices: Sequence[Sequence[str]],
    answers: Sequence[int],
    examples: object,
) -> dict[str, MetricScore]:
    """Score choices by their likelihood.

    Args:
        metrics: names of metrics of choices; the result has their order.
        losses: for each example the negative log-likelihood of each choice, nats.
        choices: for each example the choices.
        answers: for each example the index of the right choice.
        examples: prompts, choices and answers (JSON-able); only scores on equal examples can be compared.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
        RunError: `non-finite-outputs`: argmin of NaN would be a choice.
    """
    check_inputs(metrics, metrics_of(ChoiceSamples), len(losses), len(choices))
    check_finite_outputs(np.asarray([sum(choice_losses) for choice_losses in losses], dtype=np.float64))
    return score_metrics(metrics, ChoiceSamples(json_hash(examples), losses, choices, answers))


def score_windows(
    metrics: Sequence[str],
    losses: Sequence[float],
    tokens: Sequence[int],
    sizes: Sequence[int],
    windows: str,
    examples: object,
    vocabulary: int | None = None,
) -> dict[str, MetricScore]:
    """Score a text that was predicted window by window.

    Args:
        metrics: names of metrics of windows; the result has their order.
        losses: the sum of the negative log-likelihoods of each window's tokens, nats.
        tokens: how many tokens each window predicts.
        sizes: UTF-8 bytes of these tokens.
        windows: how the text was cut, for the signature.
        examples: the predicted tokens (JSON-able); only scores on equal examples can be compared in pairs.
        vocabulary: number of tokens; it equals the perplexity of a uniform model.

    Raises:
        InputError: an unknown metric, no windows, or lengths that differ.
        RunError: `non-finite-outputs`.
    """
    check_inputs(metrics, metrics_of(WindowSamples), len(losses), len(tokens))
    check_finite_outputs(np.asarray(losses, dtype=np.float64))
    samples = WindowSamples(json_hash(examples), losses, tokens, sizes, windows, vocabulary)
    return score_metrics(metrics, samples)


def score_masked_windows(
    metrics: Sequence[str],
    losses: Sequence[float],
    tokens: Sequence[int],
    correct: Sequence[int],
    windows: str,
    examples: object,
    vocabulary: int | None = None,
) -> dict[str, MetricScore]:
    """Score the masked tokens of windows of text; `score_windows` has the arguments with the same names.

    Args:
        metrics: names of metrics of masked tokens; the result has their order.
        losses: the sum of the negative log-likelihoods of each window's masked tokens, nats.
        tokens: how many masked tokens each window has.
        correct: how many of them the model finds most likely.
        windows: how the text was cut and masked, for the signature.
        examples: the text (JSON-able).
        vocabulary: number of tokens.

    Raises:
        InputError: an unknown metric, no windows, no masked token, or lengths that differ.
        RunError: `non-finite-outputs`.
    """
    known = (*metrics_of(WindowSamples), *metrics_of(MaskedSamples))
    check_inputs(metrics, known, len(losses), len(tokens))
    if not sum(tokens):
        raise InputError("No token was masked; the text needs more tokens.", code="too-few-tokens")
    check_finite_outputs(np.asarray(losses, dtype=np.float64))
    sizes = [0] * len(losses)
    samples = MaskedSamples(json_hash(examples), losses, tokens, sizes, windows, vocabulary, correct)
    return score_metrics(metrics, samples)


def score_tags(
    metrics: Sequence[str],
    predicted: Sequence[Sequence[str]],
    gold: Sequence[Sequence[str]],
    scheme: TagScheme = TagScheme(),  # noqa: B008 - immutable
) -> dict[str, MetricScore]:
    """Score the tags of words, and the entities that they mark. Intervals and tests resample sentences.

    Args:
        metrics: names of metrics of tags; the result has their order.
        predicted: for each sentence the tag of each word.
        gold: likewise.
        scheme: how the tags are read.

    Raises:
        InputError: an unknown metric, no sentences, or lengths that differ.
    """
    check_inputs(metrics, metrics_of(TagSamples), len(predicted), len(gold))
    for number, (tags, gold_tags) in enumerate(zip(predicted, gold, strict=True), 1):
        if len(tags) != len(gold_tags):
            raise InputError(
                f"Sentence {number}: {len(tags)} predicted tags for {len(gold_tags)} words; one for each word"
                " is required.",
                code="count-mismatch",
            )
    return score_metrics(
        metrics, TagSamples(json_hash([list(tags) for tags in gold]), predicted, gold, scheme)
    )


Output = str | Sequence[str]  # a generated text, a class name, or the names of a set of classes


def score_agreement(
    outputs: Sequence[Output], expected: Sequence[Output], classes: bool, key: str, examples: object
) -> MetricScore:
    """Score outputs against the baseline's as the metric `agreement`, 0 to 100; 100 for equal outputs.

    Texts: the mean of sacrebleu's sentence-level chrF. Classes: the percentage of equal predictions.

    Args:
        outputs: n generated texts, class names or lists of class names.
        expected: likewise, of the baseline.
        classes: whether the outputs are classes.
        key: of the baseline's artifact, for the signature.
        examples: the inputs (JSON-able); only scores on equal ones can be compared in pairs.

    Raises:
        InputError: no examples, or lengths that differ.
    """
    check_inputs((), (), len(outputs), len(expected))
    samples = ComparedOutputs(json_hash(examples), outputs, expected, classes, key)
    return score_metrics([AGREEMENT_METRIC], samples)[AGREEMENT_METRIC]
