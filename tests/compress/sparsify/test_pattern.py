"""Patterns of zeros, on scores that can be read off."""

import pytest
import torch

from smelt.compress.sparsify.pattern import SparsityPattern, parse_pattern
from smelt.core.errors import SettingError
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

SCORES = torch.tensor([[8.0, 1.0, 2.0, 7.0], [5.0, 6.0, 3.0, 4.0]])


def test_sparsity_applies_to_matrix_or_each_row():
    assert SparsityPattern(0.5).zero_mask(SCORES, "row").tolist() == [
        [False, True, True, False],
        [False, False, True, True],
    ]
    assert SparsityPattern(0.25).zero_mask(SCORES, "matrix").tolist() == [
        [False, True, True, False],
        [False] * 4,
    ]
    assert SparsityPattern(0.3).zero_mask(SCORES, "row").sum() == 2  # rounded down


@pytest.mark.parametrize(("num_kept", "group"), [(2, 4), (1, 4), (1, 2)])
def test_n_of_each_m_neighboring_weights_are_kept(num_kept, group):
    scores = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    removed = SparsityPattern(1 - num_kept / group, num_kept, group).zero_mask(scores, "matrix")
    for row, marks in zip(scores.view(-1, group), removed.view(-1, group), strict=True):
        assert set(row[~marks].tolist()) == set(row.topk(num_kept).values.tolist())


def test_equal_scores_give_exact_sparsity():
    assert SparsityPattern(0.5).zero_mask(torch.zeros(4, 6), "matrix").sum() == 12
    assert SparsityPattern(0.5, 2, 4).zero_mask(torch.zeros(4, 8), "row").sum() == 16


def test_pattern_fits_only_divisible_rows():
    assert SparsityPattern(0.5, 2, 4).fits(12)
    assert not SparsityPattern(0.5, 2, 4).fits(10)
    assert SparsityPattern(0.5).fits(7)


@pytest.mark.parametrize("text", ["2", "4:2", "0:4", "4:4", "a:b", "2:4:8", "", "-1:4"])
def test_invalid_pattern_is_rejected(text):
    with raises_code("wrong-pattern", SettingError):
        parse_pattern(text)
    assert parse_pattern("2:4") == (2, 4)
