"""Scores of vectors against scipy and numpy, and what is left out where it cannot be told."""

import numpy as np
import pytest
from scipy import stats

from smelt.core.errors import InputError
from smelt.evaluate.label_quality import ReferenceVectors, score_vectors
from smelt.evaluate.metrics.registry import EMBEDDING_METRICS
from smelt.evaluate.significance import compare_steps
from smelt.tasks.sentence_similarity import paired_cosines
from tests.support.expected_errors import raises_code

DRAW = np.random.default_rng(0)
VECTORS = DRAW.normal(size=(40, 6)).astype(np.float32)
GOLD = [float(x) for x in DRAW.integers(0, 6, 20)]  # with ties
TEXTS = [f"text {i}" for i in range(40)]


def other(scale):
    noise = np.random.default_rng(1).normal(size=VECTORS.shape)
    return (VECTORS + scale * noise).astype(np.float32)


def test_correlations_equal_scipy():
    scores = score_vectors(("spearman", "pearson"), VECTORS, TEXTS, GOLD)
    similarities = [
        float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        for a, b in zip(VECTORS[:20], VECTORS[20:], strict=True)
    ]
    assert scores["spearman"].value == pytest.approx(
        100 * stats.spearmanr(similarities, GOLD).statistic, abs=1e-4
    )
    assert scores["pearson"].value == pytest.approx(
        100 * stats.pearsonr(similarities, GOLD).statistic, abs=1e-4
    )
    for score in scores.values():
        assert score.n == 20
        assert score.ci95[0] < score.value < score.ci95[1]


def test_agreement_equals_mean_cosine_with_reference():
    near_vectors = other(0.3)
    scores = score_vectors(
        EMBEDDING_METRICS, near_vectors, TEXTS, reference=ReferenceVectors(VECTORS, "a" * 64)
    )
    assert list(scores) == ["agreement"]  # no scores, no correlation
    score = scores["agreement"]
    by_hand = [
        a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        for a, b in zip(near_vectors.astype(float), VECTORS.astype(float), strict=True)
    ]
    assert score.value == pytest.approx(100 * np.mean(by_hand), abs=1e-6)
    assert score.ci95[0] < score.value < score.ci95[1]
    assert score.n == 40
    assert "reference:aaaaaaaaaaaa" in score.signature


def test_lower_agreement_is_significant():
    reference = ReferenceVectors(VECTORS, "a" * 64)
    reference_score, step = (
        score_vectors(("agreement",), v, TEXTS, reference=reference)["agreement"]
        for v in (VECTORS, other(0.5))
    )
    assert reference_score.value == pytest.approx(100)
    comparison = compare_steps(step.statistics, reference_score.statistics)
    assert comparison["difference"] == pytest.approx(step.value - 100)
    assert comparison["ci95"][1] < 0
    assert comparison["p_value"] < 0.01


def test_agreement_with_different_reference_is_rejected():
    first_score, second_score = (
        score_vectors(("agreement",), VECTORS, TEXTS, reference=ReferenceVectors(VECTORS, key * 64))[
            "agreement"
        ]
        for key in "ab"
    )
    with raises_code("other-signature", InputError):
        compare_steps(first_score.statistics, second_score.statistics)


def test_agreement_is_skipped_if_widths_differ_or_reference_is_missing():
    narrow = ReferenceVectors(VECTORS[:, :3], "a" * 64)
    assert score_vectors(EMBEDDING_METRICS, VECTORS, TEXTS, reference=narrow) == {}
    assert score_vectors(EMBEDDING_METRICS, VECTORS, TEXTS) == {}


def test_zero_vector_has_no_cosine():
    assert paired_cosines(np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)).tolist() == [0.0]


def test_unknown_metrics_and_missing_vectors_are_rejected():
    with raises_code("unknown-metric", InputError) as excinfo:
        score_vectors(("spearmann",), VECTORS, TEXTS)
    assert all(name in str(excinfo.value) for name in ("'spearmann'", "'spearman'?"))
    with raises_code("count-mismatch", InputError) as excinfo:
        score_vectors(("agreement",), VECTORS, TEXTS[:-1])
    assert all(number in str(excinfo.value) for number in ("40", "39"))
