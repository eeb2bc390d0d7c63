"""MRR and nDCG of queries equal scikit-learn's and those of all orders of ties."""

import itertools
import random

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from smelt.data.splits import Example, Split
from smelt.evaluate.label_quality import score_classifier
from smelt.evaluate.metrics.ranking import MRR, NDCG, RankedSamples
from smelt.evaluate.quality import score_metrics
from tests.support.expected_errors import raises_code

REGRESSION_CONFIG = {"num_labels": 1, "problem_type": "regression", "id2label": {0: "relevance"}}


def drawn(seed, queries=12, passages=6, grades=(0, 0, 1), levels=4):
    """Passages with few different scores, so that most have equals, in a random order of all queries."""
    draw = random.Random(seed)
    rows = [
        (f"query {number}", draw.randrange(levels) / 2, draw.choice(grades))
        for number in range(queries)
        for _ in range(draw.randint(1, passages))
    ]
    draw.shuffle(rows)
    return RankedSamples("", *map(list, zip(*rows, strict=True)))


def by_query(samples):
    """The scores and grades of each query with a relevant passage."""
    queries = {}
    for query, score, grade in zip(samples.queries, samples.scores, samples.relevance, strict=True):
        queries.setdefault(query, []).append((score, grade))
    return [pairs for pairs in queries.values() if any(grade > 0 for _, grade in pairs)]


def mean_over_orders(pairs, k):
    """The mean reciprocal rank over all orders of passages, of which the scores fall."""
    values = [
        next((1 / rank for rank, (_, grade) in enumerate(order[:k], 1) if grade > 0), 0.0)
        for order in itertools.permutations(pairs)
        if all(first >= second for (first, _), (second, _) in itertools.pairwise(order))
    ]
    return sum(values) / len(values)


@pytest.mark.quick
@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("grades", [(0, 0, 1), (0, 1, 2, 3)])
def test_ndcg_equals_scikit_learn_with_ties(k, grades):
    samples = drawn(k, passages=14, grades=grades)
    score = score_metrics(["ndcg"], samples, settings={"ndcg": {"k": k}})["ndcg"]
    expected = [
        ndcg_score([[grade for _, grade in pairs]], [[score for score, _ in pairs]], k=k)
        if len(pairs) > 1
        else 1
        for pairs in by_query(samples)
    ]
    assert score.value == pytest.approx(100 * np.mean(expected))
    assert score.n == len(expected) < 12 + (grades != (0, 0, 1))
    equal = [ndcg_score([[g for _, g in pairs]], [[0] * len(pairs)], k=k) if len(pairs) > 1 else 1
             for pairs in by_query(samples)]  # fmt: skip
    assert score.chance == pytest.approx(100 * np.mean(equal))


@pytest.mark.quick
@pytest.mark.parametrize("k", [1, 2, 10])
def test_mrr_equals_mean_over_all_orders_of_ties(k):
    samples = drawn(10 + k)
    score = score_metrics(["mrr"], samples, settings={"mrr": {"k": k}})["mrr"]
    expected = [mean_over_orders(pairs, k) for pairs in by_query(samples)]
    assert score.value == pytest.approx(100 * np.mean(expected))
    equal = [mean_over_orders([(0, grade) for _, grade in pairs], k) for pairs in by_query(samples)]
    assert score.chance == pytest.approx(100 * np.mean(equal))


@pytest.mark.quick
def test_worked_case_counts_only_first_ten():
    """Relevant passages at ranks 1, 2 and 11, and a query without any: MRR@10 of MS MARCO's formula."""
    queries, scores, relevance = [], [], []
    for number, rank in enumerate((1, 2, 11, None)):
        for position in range(1, 13):
            queries.append(f"q{number}")
            scores.append(-float(position))
            relevance.append(float(position == rank))
    scores_by_metric = score_metrics(["mrr", "ndcg"], RankedSamples("", queries, scores, relevance))
    assert scores_by_metric["mrr"].value == pytest.approx(100 * (1 + 1 / 2 + 0) / 3)
    assert scores_by_metric["ndcg"].value == pytest.approx(100 * (1 + 1 / np.log2(3) + 0) / 3)
    assert scores_by_metric["mrr"].n == 3
    assert "k:10" in scores_by_metric["mrr"].signature


@pytest.mark.quick
def test_data_without_relevant_passages_has_no_score():
    assert score_metrics(["mrr"], RankedSamples("", ["a", "a"], [1.0, 2.0], [0, 0])) == {}


@pytest.mark.quick
@pytest.mark.parametrize("classes", [1, 2, 3])
def test_classifier_is_ranked_by_number_or_expected_class(classes):
    """A number, and classes as grades of relevance; groups are the first texts."""
    labels = [0, 1, 1, 0] if classes < 3 else [0, 2, 1, 0]
    pairs = zip(("a", "b", "a", "b"), labels, strict=True)
    examples = tuple(Example(q, text_pair=str(i), label=y) for i, (q, y) in enumerate(pairs))
    logits = np.array([[0.2], [0.1], [0.9], [0.5]], dtype=np.float32)
    config = dict(REGRESSION_CONFIG)
    if classes > 1:
        logits = logits * np.arange(classes, dtype=np.float32)
        names = {i: str(i) for i in range(classes)}
        config = {"num_labels": classes, "id2label": names, "problem_type": "single_label_classification"}
    split = Split("made", examples)
    scores, predictions = score_classifier(["mrr", "ndcg"], config, logits, split)
    assert scores["mrr"].value == pytest.approx(75)  # of a at rank 1, of b at rank 2
    assert scores["ndcg"].value == pytest.approx(100 * (1 + 1 / np.log2(3)) / 2)
    assert len(predictions) == 4
    other, _ = score_classifier(["mrr"], config, -logits, split)
    assert other["mrr"].value == pytest.approx(75)
    worst = score_classifier(["mrr"], config, logits[[2, 1, 0, 3]], split)[0]
    assert worst["mrr"].value == pytest.approx(50)


@pytest.mark.quick
def test_single_texts_are_refused_by_plan(tmp_path):
    pair = Example("query", text_pair="passage", label=1)
    for metric in (MRR, NDCG):
        metric.check({}, tmp_path, {"test": Split("t", (pair,))})
        with raises_code("no-pairs"):
            metric.check({}, tmp_path, {"test": Split("t", (pair, Example("alone", label=0)))})
