"""RIA, its score written out, and rows and columns of zeros."""

import numpy as np
import pytest
import torch

from smelt.calibration.statistics import empty_statistics
from smelt.compress.sparsify.methods import ria
from smelt.compress.sparsify.pattern import SparsityInput, SparsityPattern

pytestmark = pytest.mark.quick


@pytest.fixture
def given():
    """A weight [6, 8], and inputs of 20 tokens whose sizes differ."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(20, 8, generator=draw) * torch.arange(1.0, 9.0)
    statistics = empty_statistics(8, second=False)
    statistics.update(x)
    return torch.randn(6, 8, generator=draw), x.numpy(), statistics


def written_out_scores(weight, x):
    """The score of Zhang et al. 2024 at the power ½, one weight at a time, float64 [N, K]."""
    scores = np.zeros(weight.shape)
    for i, j in np.ndindex(weight.shape):
        size = abs(float(weight[i, j]))
        relative = size / np.abs(weight[i]).sum() + size / np.abs(weight[:, j]).sum()
        scores[i, j] = relative * np.linalg.norm(x[:, j]) ** 0.5
    return scores


def test_ria_ranks_relative_importance_times_root_of_input_norm_in_the_layer(given):
    weight, x, statistics = given
    sparse = ria.sparsify_layer(SparsityInput(weight, statistics), SparsityPattern(0.5), torch.Generator())
    scores = written_out_scores(weight.numpy(), x)
    kept = scores >= np.sort(scores.ravel())[24]
    np.testing.assert_array_equal(sparse.numpy(), np.where(kept, weight.numpy(), 0))


def test_ria_compares_the_groups_of_a_pattern(given):
    weight, x, statistics = given
    sparse = ria.sparsify_layer(
        SparsityInput(weight, statistics), SparsityPattern(0.5, 2, 4), torch.Generator()
    )
    groups = written_out_scores(weight.numpy(), x).reshape(6, 2, 4)
    kept = (groups >= np.sort(groups, axis=-1)[:, :, 2:3]).reshape(6, 8)
    np.testing.assert_array_equal(sparse.numpy(), np.where(kept, weight.numpy(), 0))


def test_rows_and_columns_of_zeros_go_first(given):
    weight, _, statistics = given
    weight[2], weight[:, 5] = 0, 0
    sparse = ria.sparsify_layer(SparsityInput(weight, statistics), SparsityPattern(0.5), torch.Generator())
    assert (sparse == 0).sum() == 24
    assert (sparse[2] == 0).all()
    assert (sparse[:, 5] == 0).all()
