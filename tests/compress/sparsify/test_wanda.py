"""Wanda, its score written out, compared with magnitude and chance."""

import numpy as np
import pytest
import torch

from smelt.calibration.statistics import empty_statistics
from smelt.compress.sparsify.methods import magnitude, random, wanda
from smelt.compress.sparsify.pattern import SparsityInput, SparsityPattern

pytestmark = pytest.mark.quick


@pytest.fixture
def layer_inputs():
    """A weight [6, 8], and inputs of 20 tokens whose sizes differ."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(20, 8, generator=draw) * torch.arange(1.0, 9.0)
    statistics = empty_statistics(8, second=False)
    statistics.update(x[:12])
    statistics.update(x[12:])
    return torch.randn(6, 8, generator=draw), x.numpy(), statistics


@pytest.mark.parametrize("pattern", [SparsityPattern(0.5), SparsityPattern(0.5, 2, 4)])
def test_wanda_ranks_weight_times_input_norm_per_row(pattern, layer_inputs):
    weight, x, statistics = layer_inputs
    sparse = wanda.sparsify_layer(SparsityInput(weight, statistics), pattern, torch.Generator()).numpy()
    expected = weight.numpy().copy()
    scores = np.abs(expected) * np.sqrt((x.astype(np.float64) ** 2).sum(axis=0))
    step = pattern.group or 8
    for i in range(6):
        for start in range(0, 8, step):
            for j in np.argsort(scores[i, start : start + step])[: step // 2]:
                expected[i, start + j] = 0
    np.testing.assert_array_equal(sparse, expected)
    assert not np.array_equal(
        sparse, magnitude.sparsify_layer(SparsityInput(weight), pattern, torch.Generator()).numpy()
    )


def test_magnitude_removes_smallest_weights_of_layer(layer_inputs):
    weight = layer_inputs[0]
    sparse = magnitude.sparsify_layer(SparsityInput(weight), SparsityPattern(0.25), torch.Generator())
    limit = np.sort(np.abs(weight.numpy()).ravel())[12]
    np.testing.assert_array_equal(sparse.numpy() == 0, np.abs(weight.numpy()) < limit)


def test_random_zeros_depend_on_seed(layer_inputs):
    weight = layer_inputs[0]
    first, repeated, other = (
        random.sparsify_layer(
            SparsityInput(weight), SparsityPattern(0.5), torch.Generator().manual_seed(seed)
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)
    assert (first == 0).sum() == 24
