"""The distribution of a mask, against the numbers of its equations."""

import math

import pytest
import torch

from smelt.compress.prune.masked_parts import open_probability, sample_mask

pytestmark = pytest.mark.quick


def test_a_mask_is_the_hard_concrete_of_its_draw(monkeypatch):
    """Louizos et al. 2018, equations 10 and 11, with numbers."""
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.tensor([0.1, 0.5, 0.6, 0.9]))
    found = sample_mask(torch.tensor([0.0, 0.3, -0.2, 2.0]))
    wanted = []
    for u, log_alpha in zip((0.1, 0.5, 0.6, 0.9), (0.0, 0.3, -0.2, 2.0), strict=True):
        s = 1 / (1 + math.exp(-(math.log(u / (1 - u)) + log_alpha) / (2 / 3)))
        wanted.append(min(1.0, max(0.0, s * 1.2 - 0.1)))
    assert found.tolist() == pytest.approx(wanted, abs=1e-6)
    assert 0.0 == wanted[0] < wanted[1] < 1.0 == wanted[3]


def test_a_mask_is_open_as_often_as_is_said():
    torch.manual_seed(0)
    log_alpha = torch.tensor([-4.0, -2.0, 0.0, 2.0])
    seen = (sample_mask(log_alpha.expand(40_000, 4)) > 0).float().mean(dim=0)
    torch.testing.assert_close(open_probability(log_alpha), seen, atol=4 * 0.5 / 200, rtol=0)
