"""Wanda, its score written out, compared with magnitude and chance."""

import numpy as np
import pytest
import torch

from smelt.calibration.statistics import empty_statistics
from smelt.compress.sparsify.methods import magnitude, random, wanda
from smelt.compress.sparsify.pattern import SparsityInput, SparsityPattern

pytestmark = pytest.mark.quick


@pytest.fixture
def given():
    """A weight [6, 8], and inputs of 20 tokens whose sizes differ."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(20, 8, generator=draw) * torch.arange(1.0, 9.0)
    found = empty_statistics(8, second=False)
    found.update(x[:12])
    found.update(x[12:])
    return torch.randn(6, 8, generator=draw), x.numpy(), found


@pytest.mark.parametrize("pattern", [SparsityPattern(0.5), SparsityPattern(0.5, 2, 4)])
def test_wanda_compares_weight_times_norm_in_each_row(pattern, given):
    weight, x, found = given
    made = wanda.sparsify_layer(SparsityInput(weight, found), pattern, torch.Generator()).numpy()
    wanted = weight.numpy().copy()
    scores = np.abs(wanted) * np.sqrt((x.astype(np.float64) ** 2).sum(axis=0))
    step = pattern.group or 8
    for i in range(6):
        for at in range(0, 8, step):
            for j in np.argsort(scores[i, at : at + step])[: step // 2]:
                wanted[i, at + j] = 0
    np.testing.assert_array_equal(made, wanted)
    assert not np.array_equal(
        made, magnitude.sparsify_layer(SparsityInput(weight), pattern, torch.Generator()).numpy()
    )


def test_magnitude_takes_the_least_of_the_whole_layer(given):
    weight = given[0]
    made = magnitude.sparsify_layer(SparsityInput(weight), SparsityPattern(0.25), torch.Generator())
    limit = np.sort(np.abs(weight.numpy()).ravel())[12]
    np.testing.assert_array_equal(made.numpy() == 0, np.abs(weight.numpy()) < limit)


def test_chance_is_drawn_by_the_seed(given):
    weight = given[0]
    once, again, other = (
        random.sparsify_layer(
            SparsityInput(weight), SparsityPattern(0.5), torch.Generator().manual_seed(seed)
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert (once == 0).sum() == 24
