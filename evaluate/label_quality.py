"""Quality of classifiers with several labels or a number per text, and of sentence embeddings.

Embeddings are scored by the cosines of pairs against their scores, and of each vector with the baseline's.

Shapes: n = examples or pairs, K = labels, T = texts, D = dimension of a vector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import json_hash
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
from smelt.evaluate.metrics import (
    AGREEMENT_METRIC,
    CORRELATION_METRICS,
    EMBEDDING_METRICS,
    METRICS_BY_PROBLEM,
    MetricSettingValues,
)
from smelt.evaluate.quality import (
    BOOTSTRAP_SIGNATURE,
    CROSS_ENTROPY,
    MetricScore,
    check_inputs,
    metric_score,
)
from smelt.evaluate.significance import Statistics, wilson_interval
from smelt.runtimes.backend import check_finite_outputs

LABEL_SET_METRICS = tuple(name for name in METRICS_BY_PROBLEM[MULTI_LABEL] if name != AGREEMENT_METRIC)
REGRESSION_METRICS = METRICS_BY_PROBLEM[REGRESSION]


def score_label_sets(
    metrics: Sequence[str],
    predicted: Sequence[Sequence[int]],
    gold: Sequence[Sequence[int]],
    labels: int,
    logits: NDArray[np.float32] | None = None,
) -> dict[str, MetricScore]:
    """Score predicted sets of labels against the gold ones.

    f1_micro counts all labels of all examples together, f1_macro is the mean F1 of the labels (0 for a label
    that is neither predicted nor present, as scikit-learn's zero_division=0); precision and recall likewise.
    subset_accuracy is the share of examples whose whole set is correct; cross_entropy is the mean of the
    binary cross-entropies of an example's labels, nats.

    Args:
        metrics: names from LABEL_SET_METRICS; the result has their order.
        predicted: for each example the indices of its labels, 0 to K - 1; may be empty.
        gold: likewise.
        labels: K.
        logits: float32 [n, K]; for cross_entropy.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
        RunError: `non-finite-outputs`.
    """
    check_inputs(metrics, LABEL_SET_METRICS, len(predicted), len(gold))
    guess, truth = _multi_hot(predicted, labels), _multi_hot(gold, labels)
    examples = json_hash([sorted(map(int, found)) for found in gold])
    both = np.concatenate([guess, truth], axis=1).tolist()
    hits = (guess == truth).all(axis=1)
    library = f"version:scikit-learn {version('scikit-learn')}"
    scores = {}
    for metric in metrics:
        if metric == "subset_accuracy":
            rows: list[list[int | float]] = [[int(hit), 1] for hit in hits]
            statistics = Statistics(metric=metric, signature="ci:wilson", examples=examples, rows=rows)
            found = metric_score(statistics, interval=wilson_interval(int(hits.sum()), len(rows)))
            [(_, most)] = Counter(map(tuple, truth.tolist())).most_common(1)
            scores[metric] = found.model_copy(update={"chance": 100 * most / len(rows)})
            continue
        if metric == CROSS_ENTROPY:
            assert logits is not None
            scores[metric] = _score_binary_cross_entropy(check_finite_outputs(logits), truth, examples)
            continue
        average = metric.rpartition("_")[2]
        signature = f"average:{average}|threshold:0.5|empty:0|{BOOTSTRAP_SIGNATURE}|formula:{library}"
        scores[metric] = metric_score(
            Statistics(metric=metric, signature=signature, examples=examples, rows=both)
        )
    return scores


def _score_binary_cross_entropy(
    logits: NDArray[np.float32], truth: NDArray[np.int64], examples: str
) -> MetricScore:
    """Return the mean binary cross-entropy of all labels; chance: of the labels' frequencies."""
    from scipy.special import log_expit, xlogy

    values = logits.astype(np.float64)
    losses = -np.where(truth == 1, log_expit(values), log_expit(-values)).mean(axis=1)
    signature = f"logits:float32|labels:mean|average:mean|{BOOTSTRAP_SIGNATURE}"
    rows: list[list[int | float]] = [[float(loss)] for loss in losses]
    score = metric_score(Statistics(metric=CROSS_ENTROPY, signature=signature, examples=examples, rows=rows))
    share = truth.mean(axis=0)
    chance = float(-(xlogy(share, share) + xlogy(1 - share, 1 - share)).mean())
    return score.model_copy(update={"chance": chance})


def score_regression(
    metrics: Sequence[str], predicted: Sequence[float], gold: Sequence[float]
) -> dict[str, MetricScore]:
    """Score predicted numbers against the gold ones.

    pearson and spearman (ties share the mean of their ranks) are correlations times 100, as GLUE reports
    them; where one side is constant they are undefined and set to 0. mse is the mean squared error, in
    the labels' unit squared; lower is better.

    Args:
        metrics: names from REGRESSION_METRICS; the result has their order.
        predicted: n numbers.
        gold: n numbers.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
        RunError: `non-finite-outputs`.
    """
    check_inputs(metrics, REGRESSION_METRICS, len(predicted), len(gold))
    check_finite_outputs(np.asarray(predicted, dtype=np.float64))
    examples = json_hash([float(value) for value in gold])
    rows: list[list[int | float]] = [[float(p), float(g)] for p, g in zip(predicted, gold, strict=True)]
    settings = {"pearson": "x100|constant:0", "spearman": "x100|ties:mean rank|constant:0", "mse": "mean"}
    scores = {}
    for metric in metrics:
        signature = f"{settings[metric]}|{BOOTSTRAP_SIGNATURE}"
        statistics = Statistics(metric=metric, signature=signature, examples=examples, rows=rows)
        scores[metric] = metric_score(statistics)
    return scores


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
    precision, recall = (100 * hits / np.maximum(1, below) for below in (predicted, present))
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


def _multi_hot(sets: Sequence[Sequence[int]], labels: int) -> np.ndarray:
    """Return int64 [n, K], 1 where the label is in the set."""
    out = np.zeros((len(sets), labels), dtype=np.int64)
    for row, found in zip(out, sets, strict=True):
        row[list(found)] = 1
    return out


Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class ReferenceVectors:
    """The vectors that others are compared with, float32 [T, D], and the key of their model."""

    vectors: Vectors
    key: str


def paired_cosines(one: Vectors, other: Vectors) -> NDArray[np.float64]:
    """Return the cosine of each row of `one` with the same row of `other`: [n, D], [n, D] -> [n].

    The cosine of a zero vector is set to 0.
    """
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    products = (a * b).sum(axis=1)
    found = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return np.asarray(np.clip(found, -1, 1))


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
    for metric in metrics:
        if metric not in EMBEDDING_METRICS:
            known = ", ".join(EMBEDDING_METRICS)
            raise InputError(
                f"Unknown embedding metric '{metric}'; known:"
                f" {known}.{did_you_mean(metric, EMBEDDING_METRICS)}",
                code="unknown-metric",
            )
    if not len(texts) == len(vectors) > 0:
        raise InputError(
            f"{len(vectors)} vectors for {len(texts)} texts; one for each text is required.",
            code="count-mismatch",
        )
    found: dict[str, MetricScore] = {}
    for metric in metrics:
        if metric == AGREEMENT_METRIC and reference is not None and reference.vectors.shape == vectors.shape:
            found[metric] = _score_agreement(vectors, texts, reference)
        elif metric in CORRELATION_METRICS and gold is not None:
            half = len(vectors) // 2
            found |= score_regression([metric], paired_cosines(vectors[:half], vectors[half:]).tolist(), gold)
    return found


def _score_agreement(vectors: Vectors, texts: Sequence[str], reference: ReferenceVectors) -> MetricScore:
    signature = f"mean cosine|x100|reference:{reference.key[:12]}|{BOOTSTRAP_SIGNATURE}"
    rows: list[list[int | float]] = [[value] for value in paired_cosines(vectors, reference.vectors).tolist()]
    examples = json_hash(list(texts))
    return metric_score(
        Statistics(metric=AGREEMENT_METRIC, signature=signature, examples=examples, rows=rows)
    )


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
        Scores by metric, and the prediction per sample: a class name, a list of names, or a number. Without
        metrics the labels of the samples are not read.

    Raises:
        InputError: a label is not a class of the model, or a metric does not fit the problem type.
        RunError: `non-finite-outputs`: argmax of NaN would be a class.
    """
    from smelt.evaluate.quality import score_labels

    check_finite_outputs(logits)
    names, problem = class_names(config), problem_type(config)
    scores: dict[str, MetricScore] = {}
    if problem == REGRESSION:
        numbers = [float(row[0]) for row in logits]
        if metrics:
            scores = score_regression(metrics, numbers, regression_targets(split.examples, split.origin))
        return scores, numbers
    if problem == MULTI_LABEL:
        found = [[int(i) for i in row.nonzero()[0]] for row in logits > 0]  # a probability above 0.5
        if metrics:
            gold = multi_label_targets(split.examples, names, split.origin)
            scores = score_label_sets(metrics, found, gold, len(names), logits)
        return scores, [[names[i] for i in row] for row in found]
    predicted = [int(row.argmax()) for row in logits]
    if metrics:
        wanted = class_targets(split.examples, names, split.origin)
        labels = {name: given["label"] for name, given in (settings or {}).items() if "label" in given}
        chosen = class_targets([Example("", label=x) for x in labels.values()], names, "")
        scores = score_labels(metrics, predicted, wanted, logits, dict(zip(labels, chosen, strict=True)))
    return scores, [names[i] for i in predicted]


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
        truth = _multi_hot(multi_label_targets(split.examples, names, split.origin), len(names))
        guess = (logits > 0).astype(np.int64)
        return class_scores((guess & truth).sum(axis=0), guess.sum(axis=0), truth.sum(axis=0), names)
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
        return [float(value) for value in regression_targets(split.examples, split.origin)]
    if problem == MULTI_LABEL:
        found = multi_label_targets(split.examples, names, split.origin)
        return [[names[i] for i in sorted(row)] for row in found]
    return [names[i] for i in class_targets(split.examples, names, split.origin)]
