"""Intervals of few examples contain the true value as often as they say, and tests reject as rarely."""

import interval_coverage
import pytest

SAMPLES = 500  # of one seed; all 4,000: python benchmarks/interval_coverage.py


@pytest.mark.parametrize("population", ["perplexity", "rougeL near 100"])
@pytest.mark.parametrize("n", [6, 12])
def test_interval_of_few_examples_has_95_percent_coverage(population, n):
    score, difference, rejected = interval_coverage.simulate(population, n, SAMPLES)
    assert 0.93 <= score <= 0.97
    assert difference >= 0.93
    assert rejected <= 0.06


def test_five_examples_are_not_tested():
    assert interval_coverage.simulate("rougeL", 5, 1) is None
