"""Choices among nearly equal candidates, which rounding must not decide."""

import math

import numpy as np
import pytest
import torch

from smelt.core.near_ties import first_within_tolerance, is_better, round_significant

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("errors", [[3.0, 1.0, 1.0, 2.0], [3.0, 1.000001, 1.0, 2.0], [3.0, 1.0, 1.000001]])
def test_first_of_nearly_equal_errors_is_chosen(errors):
    assert first_within_tolerance(errors) == 1
    draw = np.random.default_rng(0)
    for _ in range(20):
        assert first_within_tolerance(np.array(errors) * (1 + 1e-6 * draw.standard_normal(len(errors)))) == 1


def test_clearly_smaller_error_is_chosen():
    assert first_within_tolerance([1.0, 0.999]) == 1
    assert first_within_tolerance([-1.0, -1.001, -1.001]) == 1  # losses may be negative
    assert first_within_tolerance([0.0, 0.0]) == 0
    assert first_within_tolerance([math.inf, 2.0]) == 1
    assert first_within_tolerance([math.inf, math.inf]) == 0


def test_is_better_compares_elementwise():
    best = torch.tensor([1.0, 1.0, 1.0, torch.inf])
    assert is_better(torch.tensor([0.999999, 0.999, 1.1, 5.0]), best).tolist() == [False, True, False, True]
    assert is_better(5.0, math.inf)


def test_scores_differing_by_rounding_are_equal():
    assert round_significant(0.0123412) == round_significant(0.0123449) == 0.0123
    assert round_significant(0.0) == 0.0
