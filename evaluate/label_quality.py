"""Quality of classifiers with several labels or a number per text, and of sentence embeddings.

Embeddings are scored by the cosines of pairs against their scores, and of each vector with the baseline's.

Shapes: n = examples or pairs, K = labels, T = texts, D = dimension of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import combined_error
from smelt.core.files import json_hash
from smelt.data.label_thresholds import predicted_labels
from smelt.data.labels import (
    MULTI_LABEL,
    REGRESSION,
    class_names,
    class_targets,
    multi_label_targets,
    problem_type,
    regression_targets,
)
from smelt.data.splits import Example, Split
from smelt.data.tags import TagScheme
from smelt.evaluate.metrics.entities import TagSamples, count_entities
from smelt.evaluate.metrics.metric import (
    ComparedVectors,
    LabelSetSamples,
    MetricSettingValues,
    NumberSamples,
    Samples,
)
from smelt.evaluate.metrics.ranking import RankedSamples, several_outputs_error
from smelt.evaluate.metrics.registry import EMBEDDING_METRICS, base_metric, metrics_of
from smelt.evaluate.quality import MetricScore, check_inputs, score_labels, score_metrics
from smelt.generation.backend import check_finite_outputs
from smelt.tasks.sentence_similarity import paired_cosines


def score_label_sets(
    metrics: Sequence[str],
    predicted: Sequence[Sequence[int]],
    gold: Sequence[Sequence[int]],
    labels: int,
    logits: NDArray[np.float32] | None = None,
) -> dict[str, MetricScore]:
    """Score predicted sets of labels against the gold ones.

    Args:
        metrics: names of metrics of label sets; the result has their order.
        predicted: for each example the indices of its labels, 0 to K - 1; may be empty.
        gold: likewise.
        labels: K.
        logits: float32 [n, K]; for cross_entropy.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
        RunError: `non-finite-outputs`.
    """
    check_inputs(metrics, metrics_of(LabelSetSamples), len(predicted), len(gold))
    examples = json_hash([sorted(map(int, indices)) for indices in gold])
    sets = _multi_hot(predicted, labels), _multi_hot(gold, labels)
    return score_metrics(metrics, LabelSetSamples(examples, *sets, logits))


def score_regression(
    metrics: Sequence[str],
    predicted: Sequence[float] | Sequence[Sequence[float]],
    gold: Sequence[float] | Sequence[Sequence[float]],
) -> dict[str, MetricScore]:
    """Score predicted numbers against the gold ones.

    Args:
        metrics: names of metrics of numbers; the result has their order.
        predicted: n numbers, or n lists of C numbers.
        gold: as many.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
        RunError: `non-finite-outputs`.
    """
    check_inputs(metrics, metrics_of(NumberSamples), len(predicted), len(gold))
    check_finite_outputs(np.asarray(predicted, dtype=np.float64))
    samples = NumberSamples(json_hash(np.asarray(gold, np.float64).tolist()), predicted, gold)
    return score_metrics(metrics, samples)


def confusion_matrix(predicted: Sequence[int], labels: Sequence[int], num_labels: int) -> NDArray[np.int64]:
    """Return how often each label was predicted as each: int64 [K, K], row: label, column: prediction.

    Args:
        predicted: n label indices, 0 to K - 1.
        labels: n label indices, the correct ones.
        num_labels: K.
    """
    from sklearn.metrics import confusion_matrix

    counts = confusion_matrix(labels, predicted, labels=range(num_labels))
    return np.asarray(counts, dtype=np.int64)


MAX_CLASSES = 200  # classes with their own scores in a report


def class_scores(
    hits: NDArray[np.int64], predicted: NDArray[np.int64], present: NDArray[np.int64], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the scores of the most frequent classes.

    Each has label, n, correct, precision, recall and f1 (percent; 0 where nothing is predicted, or occurs).

    Args:
        hits: int64 [K], how often each label was predicted correctly.
        predicted: int64 [K], how often it was predicted.
        present: int64 [K], how often it occurs.
        names: K names.
    """
    precision, recall = (100 * hits / np.maximum(1, denominators) for denominators in (predicted, present))
    f1 = 100 * 2 * hits / np.maximum(1, predicted + present)
    return [
        {
            "label": names[i],
            "n": int(present[i]),
            "correct": int(hits[i]),
            "precision": float(precision[i]),
            "recall": float(recall[i]),
            "f1": float(f1[i]),
        }
        for i in np.argsort(-present, kind="stable")[:MAX_CLASSES]
    ]


def entity_scores(
    predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]], scheme: TagScheme
) -> list[dict[str, Any]]:
    """Return the scores by type of entity, as `class_scores`; arguments as of `score_tags`."""
    counts = count_entities(TagSamples("", predicted, gold, scheme))
    return class_scores(counts.hits, counts.predicted, counts.present, counts.types)


def _multi_hot(sets: Sequence[Sequence[int]], labels: int) -> np.ndarray:
    """Return int64 [n, K], 1 where the label is in the set."""
    out = np.zeros((len(sets), labels), dtype=np.int64)
    for row, class_indices in zip(out, sets, strict=True):
        row[list(class_indices)] = 1
    return out


Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class ReferenceVectors:
    """The vectors that others are compared with, float32 [T, D], and the key of their model."""

    vectors: Vectors
    key: str


def score_vectors(
    metrics: Sequence[str],
    vectors: Vectors,
    texts: Sequence[str],
    gold: Sequence[float] | None = None,
    reference: ReferenceVectors | None = None,
) -> dict[str, MetricScore]:
    """Score sentence embeddings.

    spearman and pearson are the correlations (times 100) of the cosines of pairs with their scores, as STS
    benchmarks report them. agreement is the mean cosine (times 100) of each text's vector with the
    reference's; it needs no scores. Metrics that cannot be computed are left out: correlations without
    `gold`, agreement without a reference or where its vectors have another dimension.

    Args:
        metrics: names from EMBEDDING_METRICS; the result has their order.
        vectors: float32 [T, D]; for pairs first the n first texts, then the n second ones.
        texts: T texts, in the same order.
        gold: n scores, where T is 2 n.
        reference: vectors of the same texts.

    Raises:
        InputError: an unknown metric, or no texts.
        RunError: `non-finite-outputs`.
    """
    check_finite_outputs(vectors)
    check_inputs(metrics, EMBEDDING_METRICS, len(vectors), len(texts))
    samples: list[Samples] = []
    if gold is not None:
        half = len(vectors) // 2
        cosines = paired_cosines(vectors[:half], vectors[half:]).tolist()
        samples.append(NumberSamples(json_hash([float(value) for value in gold]), cosines, gold))
    if reference is not None and reference.vectors.shape == vectors.shape:
        examples = json_hash(list(texts))
        samples.append(ComparedVectors(examples, vectors, reference.vectors, reference.key))
    return score_metrics(metrics, *samples)


def score_classifier(
    metrics: Sequence[str],
    config: Mapping[str, Any],
    logits: NDArray[np.float32],
    split: Split,
    settings: MetricSettingValues | None = None,
) -> tuple[dict[str, MetricScore], list[Any]]:
    """Score a classifier's logits, float32 [n, C], on the samples of `split`.

    settings: of metrics, as in the recipe: the class that F1, precision or recall is of.

    Returns:
        Scores by metric, and the prediction per sample: a class name, a list of names, a number, or a
        list of numbers. Without metrics the labels of the samples are not read.

    Raises:
        InputError: a label is not a class of the model, or a metric does not fit the problem type.
        RunError: `non-finite-outputs`: argmax of NaN would be a class.
    """
    check_finite_outputs(logits)
    names, problem = class_names(config), problem_type(config)
    ranked = [name for name in metrics if base_metric(name) in metrics_of(RankedSamples)]
    metrics = [name for name in metrics if name not in ranked]
    scores = _score_ranking(ranked, config, logits, split, settings) if ranked else {}
    if problem == REGRESSION:
        if metrics:
            gold_values = regression_targets(split.examples, names, split.origin)
            scores |= {
                name: score.model_copy(update={"parts": dict(zip(names, score.parts.values(), strict=False))})
                for name, score in score_regression(metrics, logits.tolist(), gold_values).items()
            }
        return scores, [_number_or_list(row) for row in logits.tolist()]
    if problem == MULTI_LABEL:
        predicted_sets = [[int(i) for i in row.nonzero()[0]] for row in predicted_labels(logits, config)]
        if metrics:
            gold = multi_label_targets(split.examples, names, split.origin)
            scores |= score_label_sets(metrics, predicted_sets, gold, len(names), logits)
        return scores, [[names[i] for i in row] for row in predicted_sets]
    predicted = [int(row.argmax()) for row in logits]
    if metrics:
        gold_classes = class_targets(split.examples, names, split.origin)
        labels = {
            name: metric_settings["label"]
            for name, metric_settings in (settings or {}).items()
            if "label" in metric_settings
        }
        label_classes = class_targets([Example("", label=x) for x in labels.values()], names, "")
        scores |= score_labels(
            metrics, predicted, gold_classes, logits, dict(zip(labels, label_classes, strict=True))
        )
    return scores, [names[i] for i in predicted]


def _number_or_list(values: list[float]) -> float | list[float]:
    return values[0] if len(values) == 1 else values


def _score_ranking(
    metrics: Sequence[str],
    config: Mapping[str, Any],
    logits: NDArray[np.float32],
    split: Split,
    settings: MetricSettingValues | None,
) -> dict[str, MetricScore]:
    """Score the order of the passages of each query, the first text.

    Classes are grades of relevance, from 0; the score is the expected grade.
    """
    from scipy.special import softmax

    names, problem = class_names(config), problem_type(config)
    relevance: Sequence[float]
    if problem == REGRESSION:
        if len(names) > 1:
            raise combined_error([several_outputs_error(", ".join(metrics), len(names))])
        values = logits[:, 0]
        relevance = [value for (value,) in regression_targets(split.examples, names, split.origin)]
    else:
        values = softmax(logits.astype(np.float64), axis=1) @ np.arange(len(names))
        relevance = class_targets(split.examples, names, split.origin)
    queries = [example.text for example in split.examples]
    gold = [float(value) for value in relevance]
    samples = RankedSamples(json_hash([queries, gold]), queries, values.tolist(), gold)
    return score_metrics(metrics, samples, settings=settings)


def class_counts(
    config: Mapping[str, Any], logits: NDArray[np.float32], split: Split
) -> list[dict[str, Any]] | None:
    """Return the scores by class of a classifier, as in report.json; None for a regression.

    Raises:
        RunError: `non-finite-outputs`.
    """
    names, problem = class_names(config), problem_type(config)
    if problem == REGRESSION:
        return None
    check_finite_outputs(logits)
    if problem == MULTI_LABEL:
        gold_matrix = _multi_hot(multi_label_targets(split.examples, names, split.origin), len(names))
        predicted_matrix = predicted_labels(logits, config).astype(np.int64)
        return class_scores(
            (predicted_matrix & gold_matrix).sum(axis=0),
            predicted_matrix.sum(axis=0),
            gold_matrix.sum(axis=0),
            names,
        )
    counts = confusion_matrix(
        logits.argmax(axis=1).tolist(), class_targets(split.examples, names, split.origin), len(names)
    )
    return class_scores(counts.diagonal(), counts.sum(axis=0), counts.sum(axis=1), names)


def gold_outputs(config: Mapping[str, Any], split: Split) -> list[Any]:
    """Return the labels of the samples in the form of a classifier's predictions (`score_classifier`).

    Raises:
        InputError: a label is not a class of the model.
    """
    names, problem = class_names(config), problem_type(config)
    if problem == REGRESSION:
        targets = regression_targets(split.examples, names, split.origin)
        return [_number_or_list(list(values)) for values in targets]
    if problem == MULTI_LABEL:
        label_sets = multi_label_targets(split.examples, names, split.origin)
        return [[names[i] for i in sorted(row)] for row in label_sets]
    return [names[i] for i in class_targets(split.examples, names, split.origin)]
