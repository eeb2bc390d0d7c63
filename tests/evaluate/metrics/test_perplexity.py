"""Perplexity and bits per byte: the formulas, their intervals, paired differences."""

import math

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.evaluate.quality import score_windows
from smelt.evaluate.significance import compare_steps
from tests.support.expected_errors import raises_code
from tests.support.expected_intervals import student_interval

LOSSES = [10.0, 30.0, 8.0, 12.0, 11.0, 9.0, 13.0]
TOKENS, SIZES = [5, 10, 4, 5, 6, 3, 7], [20, 50, 15, 21, 25, 14, 30]


def _scores(losses=LOSSES, examples=("x",)):
    return score_windows(
        ["bits_per_byte", "perplexity"], losses, TOKENS, SIZES, "window:8|stride:8", list(examples)
    )


def test_values_are_ratios_of_sums_for_windows_of_different_length():
    scores = _scores()
    assert list(scores) == ["bits_per_byte", "perplexity"]
    assert scores["perplexity"].value == pytest.approx(math.exp(93 / 40))
    assert scores["bits_per_byte"].value == pytest.approx(93 / math.log(2) / 175)
    assert (scores["perplexity"].n, scores["perplexity"].higher_is_better) == (40, False)
    assert scores["perplexity"].signature.startswith("window:8|stride:8|ci:t, bootstrap over windows")


def test_interval_equals_window_bootstrap():
    low, high = _scores()["perplexity"].ci95
    resampled = np.random.default_rng(1).integers(0, 7, (20000, 7))
    values = np.exp(np.array(LOSSES)[resampled].sum(1) / np.array(TOKENS)[resampled].sum(1))
    effective = sum(TOKENS) ** 2 / np.square(TOKENS).sum()  # Kish's number of windows of equal length
    expected = student_interval(math.exp(93 / 40), values, 7, (1, math.inf), effective - 1)
    assert (low, high) == pytest.approx(expected, rel=0.02)


def test_worse_model_has_positive_perplexity_difference():
    worse_statistics = _scores([loss * 1.1 for loss in LOSSES])["perplexity"].statistics
    comparison = compare_steps(worse_statistics, _scores()["perplexity"].statistics)
    assert comparison["difference"] == pytest.approx(math.exp(102.3 / 40) - math.exp(93 / 40))
    assert comparison["p_value"] == pytest.approx(2 / 2**7)  # of seven windows the least that signs can give
    with raises_code("other-examples", InputError):
        compare_steps(worse_statistics, _scores(examples=("y",))["perplexity"].statistics)


def test_different_windows_are_resampled_independently():
    """As after a vocabulary was trimmed: more tokens, windows that begin elsewhere."""
    losses, tokens, sizes = (
        [14.0, 21.0, 9.0, 11.0, 9.0, 12.0, 10.0, 11.0], [6, 7, 5, 5, 5, 6, 4, 5],
        [26, 25, 19, 21, 15, 24, 22, 23],
    )  # fmt: skip
    other = score_windows(["bits_per_byte"], losses, tokens, sizes, "window:8|stride:8", ["x"])
    comparison = compare_steps(other["bits_per_byte"].statistics, _scores()["bits_per_byte"].statistics)
    draw = np.random.default_rng(1)
    first_values, second_values = (
        np.array(n)[indices].sum(1) / np.array(b)[indices].sum(1) / math.log(2)
        for n, b, indices in (
            (losses, sizes, draw.integers(0, 8, (20000, 8))), (LOSSES, SIZES, draw.integers(0, 7, (20000, 7)))
        )
    )  # fmt: skip
    assert comparison["difference"] == pytest.approx((97 / 175 - 93 / 175) / math.log(2))
    expected = student_interval(
        comparison["difference"], first_values - second_values, 7, (-math.inf, math.inf)
    )
    assert comparison["ci95"] == pytest.approx(expected, abs=0.03)
    assert comparison["p_value"] > 0.05
    # also where there are as many windows: as wide as two draws, though row by row they have the same nats
    base_statistics = _scores()["bits_per_byte"].statistics
    changed_statistics = base_statistics.model_copy(
        update={"rows": [[nats, tokens + 1, size] for nats, tokens, size in base_statistics.rows]}
    )
    low, high = compare_steps(changed_statistics, base_statistics)["ci95"]
    assert high - low > 0.1


def test_perplexity_of_broken_model_is_finite():
    assert math.isfinite(_scores([1e6] * 7)["perplexity"].value)


def test_missing_metric_or_windows_are_rejected():
    with raises_code("unknown-metric", InputError) as excinfo:
        score_windows(["perplexty"], LOSSES, TOKENS, SIZES, "", [])
    assert "'perplexity'?" in str(excinfo.value)
    with raises_code("empty-data", InputError):
        score_windows(["perplexity"], [], [], [], "", [])
