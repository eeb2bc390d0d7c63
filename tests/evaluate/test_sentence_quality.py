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
    return (VECTORS + scale * DRAW.normal(size=VECTORS.shape)).astype(np.float32)


def test_correlations_are_those_of_scipy():
    found = score_vectors(("spearman", "pearson"), VECTORS, TEXTS, GOLD)
    alike = [
        float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        for a, b in zip(VECTORS[:20], VECTORS[20:], strict=True)
    ]
    assert found["spearman"].value == pytest.approx(100 * stats.spearmanr(alike, GOLD).statistic, abs=1e-4)
    assert found["pearson"].value == pytest.approx(100 * stats.pearsonr(alike, GOLD).statistic, abs=1e-4)
    for score in found.values():
        assert score.n == 20
        assert score.ci95[0] < score.value < score.ci95[1]


def test_agreement_is_the_mean_cosine_with_the_reference():
    near = other(0.3)
    found = score_vectors(EMBEDDING_METRICS, near, TEXTS, reference=ReferenceVectors(VECTORS, "a" * 64))
    assert list(found) == ["agreement"]  # no scores, no correlation
    score = found["agreement"]
    by_hand = [
        a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        for a, b in zip(near.astype(float), VECTORS.astype(float), strict=True)
    ]
    assert score.value == pytest.approx(100 * np.mean(by_hand), abs=1e-6)
    assert score.ci95[0] < score.value < score.ci95[1]
    assert score.n == 40
    assert "reference:aaaaaaaaaaaa" in score.signature


def test_a_step_agrees_less_than_the_reference_itself_and_the_test_says_so():
    reference = ReferenceVectors(VECTORS, "a" * 64)
    own, step = (
        score_vectors(("agreement",), v, TEXTS, reference=reference)["agreement"]
        for v in (VECTORS, other(0.5))
    )
    assert own.value == pytest.approx(100)
    found = compare_steps(step.statistics, own.statistics)
    assert found["difference"] == pytest.approx(step.value - 100)
    assert found["ci95"][1] < 0
    assert found["p_value"] < 0.01


def test_agreement_with_another_reference_cannot_be_compared():
    one, two = (
        score_vectors(("agreement",), VECTORS, TEXTS, reference=ReferenceVectors(VECTORS, key * 64))[
            "agreement"
        ]
        for key in "ab"
    )
    with raises_code("other-signature", InputError):
        compare_steps(one.statistics, two.statistics)


def test_agreement_is_left_out_where_widths_differ_or_nothing_is_there():
    narrow = ReferenceVectors(VECTORS[:, :3], "a" * 64)
    assert score_vectors(EMBEDDING_METRICS, VECTORS, TEXTS, reference=narrow) == {}
    assert score_vectors(EMBEDDING_METRICS, VECTORS, TEXTS) == {}


def test_a_vector_of_zeros_has_no_direction():
    assert paired_cosines(np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)).tolist() == [0.0]


def test_unkncustom_metrics_and_missing_vectors_are_errors():
    with raises_code("unknown-metric", InputError) as caught:
        score_vectors(("spearmann",), VECTORS, TEXTS)
    assert all(name in str(caught.value) for name in ("'spearmann'", "'spearman'?"))
    with raises_code("count-mismatch", InputError) as caught:
        score_vectors(("agreement",), VECTORS, TEXTS[:-1])
    assert all(number in str(caught.value) for number in ("40", "39"))
