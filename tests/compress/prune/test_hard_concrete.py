"""The distribution of a mask, against the numbers of its equations."""

import math

import pytest
import torch

from smelt.compress.prune.masked_parts import open_probability, sample_mask

pytestmark = pytest.mark.quick


def test_sampled_mask_equals_hard_concrete_formula(monkeypatch):
    """Louizos et al. 2018, equations 10 and 11, with numbers."""
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.tensor([0.1, 0.5, 0.6, 0.9]))
    mask = sample_mask(torch.tensor([0.0, 0.3, -0.2, 2.0]))
    expected = []
    for u, log_alpha in zip((0.1, 0.5, 0.6, 0.9), (0.0, 0.3, -0.2, 2.0), strict=True):
        s = 1 / (1 + math.exp(-(math.log(u / (1 - u)) + log_alpha) / (2 / 3)))
        expected.append(min(1.0, max(0.0, s * 1.2 - 0.1)))
    assert mask.tolist() == pytest.approx(expected, abs=1e-6)
    assert 0.0 == expected[0] < expected[1] < 1.0 == expected[3]


def test_open_probability_equals_sampled_frequency():
    torch.manual_seed(0)
    log_alpha = torch.tensor([-4.0, -2.0, 0.0, 2.0])
    open_frequency = (sample_mask(log_alpha.expand(40_000, 4)) > 0).float().mean(dim=0)
    torch.testing.assert_close(open_probability(log_alpha), open_frequency, atol=4 * 0.5 / 200, rtol=0)
