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


def test_values_are_ratios_of_sums_when_windows_differ_in_length():
    found = _scores()
    assert list(found) == ["bits_per_byte", "perplexity"]
    assert found["perplexity"].value == pytest.approx(math.exp(93 / 40))
    assert found["bits_per_byte"].value == pytest.approx(93 / math.log(2) / 175)
    assert (found["perplexity"].n, found["perplexity"].higher_is_better) == (40, False)
    assert found["perplexity"].signature.startswith("window:8|stride:8|ci:t, bootstrap over windows")


def test_interval_is_that_of_resampled_windows():
    low, high = _scores()["perplexity"].ci95
    drawn = np.random.default_rng(1).integers(0, 7, (20000, 7))
    values = np.exp(np.array(LOSSES)[drawn].sum(1) / np.array(TOKENS)[drawn].sum(1))
    effective = sum(TOKENS) ** 2 / np.square(TOKENS).sum()  # Kish's number of windows of equal length
    expected = student_interval(math.exp(93 / 40), values, 7, (1, math.inf), effective - 1)
    assert (low, high) == pytest.approx(expected, rel=0.02)


def test_difference_is_a_rise_when_the_model_got_worse():
    worse = _scores([loss * 1.1 for loss in LOSSES])["perplexity"].statistics
    found = compare_steps(worse, _scores()["perplexity"].statistics)
    assert found["difference"] == pytest.approx(math.exp(102.3 / 40) - math.exp(93 / 40))
    assert found["p_value"] == pytest.approx(2 / 2**7)  # of seven windows the least that signs can give
    with raises_code("other-examples", InputError):
        compare_steps(worse, _scores(examples=("y",))["perplexity"].statistics)


def test_same_text_in_other_windows_is_drawn_apart():
    """As after a vocabulary was trimmed: more tokens, windows that begin elsewhere."""
    losses, tokens, sizes = (
        [14.0, 21.0, 9.0, 11.0, 9.0, 12.0, 10.0, 11.0], [6, 7, 5, 5, 5, 6, 4, 5],
        [26, 25, 19, 21, 15, 24, 22, 23],
    )  # fmt: skip
    other = score_windows(["bits_per_byte"], losses, tokens, sizes, "window:8|stride:8", ["x"])
    found = compare_steps(other["bits_per_byte"].statistics, _scores()["bits_per_byte"].statistics)
    draw = np.random.default_rng(1)
    one, two = (
        np.array(n)[at].sum(1) / np.array(b)[at].sum(1) / math.log(2)
        for n, b, at in (
            (losses, sizes, draw.integers(0, 8, (20000, 8))), (LOSSES, SIZES, draw.integers(0, 7, (20000, 7)))
        )
    )  # fmt: skip
    assert found["difference"] == pytest.approx((97 / 175 - 93 / 175) / math.log(2))
    expected = student_interval(found["difference"], one - two, 7, (-math.inf, math.inf))
    assert found["ci95"] == pytest.approx(expected, abs=0.03)
    assert found["p_value"] > 0.05
    # also where there are as many windows: as wide as two draws, though row by row they have the same nats
    same = _scores()["bits_per_byte"].statistics
    moved = same.model_copy(update={"rows": [[nats, tokens + 1, size] for nats, tokens, size in same.rows]})
    low, high = compare_steps(moved, same)["ci95"]
    assert high - low > 0.1


def test_perplexity_stays_finite_when_a_model_is_broken():
    assert math.isfinite(_scores([1e6] * 7)["perplexity"].value)


def test_scores_are_refused_when_metric_or_windows_are_missing():
    with raises_code("unknown-metric", InputError) as caught:
        score_windows(["perplexty"], LOSSES, TOKENS, SIZES, "", [])
    assert "'perplexity'?" in str(caught.value)
    with raises_code("empty-data", InputError):
        score_windows(["perplexity"], [], [], [], "", [])
