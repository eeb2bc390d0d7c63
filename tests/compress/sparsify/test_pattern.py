"""Patterns of zeros, on scores that can be read off."""

import pytest
import torch
from refusals import refused

from smelt.compress.sparsify.pattern import Pattern, read_pattern
from smelt.core.errors import SettingError

SCORES = torch.tensor([[8.0, 1.0, 2.0, 7.0], [5.0, 6.0, 3.0, 4.0]])


def test_a_fraction_is_taken_of_the_matrix_or_of_each_row():
    assert Pattern(0.5).gone(SCORES, "row").tolist() == [
        [False, True, True, False],
        [False, False, True, True],
    ]
    assert Pattern(0.25).gone(SCORES, "matrix").tolist() == [[False, True, True, False], [False] * 4]
    assert Pattern(0.3).gone(SCORES, "row").sum() == 2  # rounded down


@pytest.mark.parametrize(("kept", "group"), [(2, 4), (1, 4), (1, 2)])
def test_n_of_each_m_neighbours_stay(kept, group):
    scores = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    gone = Pattern(1 - kept / group, kept, group).gone(scores, "matrix")
    for row, marks in zip(scores.view(-1, group), gone.view(-1, group), strict=True):
        assert set(row[~marks].tolist()) == set(row.topk(kept).values.tolist())


def test_of_equal_scores_exactly_as_many_go():
    assert Pattern(0.5).gone(torch.zeros(4, 6), "matrix").sum() == 12
    assert Pattern(0.5, 2, 4).gone(torch.zeros(4, 8), "row").sum() == 16


def test_rows_that_cannot_be_divided_do_not_fit():
    assert Pattern(0.5, 2, 4).fits(12)
    assert not Pattern(0.5, 2, 4).fits(10)
    assert Pattern(0.5).fits(7)


@pytest.mark.parametrize("text", ["2", "4:2", "0:4", "4:4", "a:b", "2:4:8", "", "-1:4"])
def test_what_is_no_pattern_is_said(text):
    with refused("wrong-pattern", SettingError):
        read_pattern(text)
    assert read_pattern("2:4") == (2, 4)
