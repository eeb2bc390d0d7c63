"""mAP equals scikit-learn's average precision, with ties and on resamples."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from smelt.evaluate.label_quality import score_label_sets
from smelt.evaluate.metrics.average_precision import MEAN_AVERAGE_PRECISION

pytestmark = pytest.mark.quick


def drawn(seed, ties):
    draw = np.random.default_rng(seed)
    gold = (draw.random((40, 3)) < 0.3).astype(np.int64)
    gold[:3] = np.eye(3)
    logits = (gold + draw.normal(0, 1.5, gold.shape)).astype(np.float32)
    return gold, logits.round() if ties else logits


def score(gold, logits):
    gold_sets = [list(np.flatnonzero(row)) for row in gold]
    predicted = [list(np.flatnonzero(row)) for row in logits > 0]
    return score_label_sets(["map"], predicted, gold_sets, gold.shape[1], logits)["map"]


@pytest.mark.parametrize("ties", [False, True])
def test_value_and_chance_equal_scikit_learn(ties):
    gold, logits = drawn(3, ties)
    result = score(gold, logits)
    assert result.value == pytest.approx(100 * average_precision_score(gold, logits, average="macro"))
    assert result.chance == pytest.approx(100 * gold.mean())
    low, high = result.ci95
    assert low < result.value < high


@pytest.mark.parametrize("ties", [False, True])
def test_resample_equals_scikit_learn_with_sample_weights(ties):
    gold, logits = drawn(4, ties)
    weights = np.random.default_rng(0).multinomial(len(gold), [1 / len(gold)] * len(gold), size=5)
    rows = np.concatenate([logits.astype(np.float64), gold], axis=1)
    values = MEAN_AVERAGE_PRECISION.value(rows, weights.astype(np.float64))
    for value, weight in zip(values, weights, strict=True):
        expected = average_precision_score(gold, logits, average="macro", sample_weight=weight)
        assert value == pytest.approx(100 * expected)


def test_absent_label_is_left_out_of_mean():
    gold, logits = drawn(5, False)
    gold[:, 1] = 0
    expected = average_precision_score(gold[:, [0, 2]], logits[:, [0, 2]], average="macro")
    assert score(gold, logits).value == pytest.approx(100 * expected)
