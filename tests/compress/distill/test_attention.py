"""The distance of scores against TinyBERT's own formula."""

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.distill.inner_losses import attention_loss

pytestmark = pytest.mark.quick


def scores():
    g = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 5, 5, generator=g), torch.randn(2, 4, 5, 5, generator=g)


def test_without_padding_it_is_what_task_distill_computes():
    student, teacher = scores()
    # task_distill.py: torch.where(att <= -1e2, zeros, att) in both, then MSELoss
    mask = torch.zeros(2, 1, 5, 5)
    ours, theirs = (torch.where(x + mask <= -1e2, 0.0, x + mask) for x in (student, teacher))
    everything = torch.ones(1, 1, 5, 5).bool()
    found = attention_loss(student, teacher, everything, torch.ones(2, 5).bool())
    torch.testing.assert_close(found, F.mse_loss(ours, theirs))


def test_padding_changes_nothing():
    student, teacher = scores()
    short = attention_loss(
        student[1:, :, :3, :3], teacher[1:, :, :3, :3], torch.ones(1, 1, 3, 3).bool(), torch.ones(1, 3).bool()
    )
    there = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
    found = attention_loss(student, teacher, there[:, None, None, :], there)
    torch.testing.assert_close(found, short)


def test_a_decoder_compares_what_each_query_sees():
    student, teacher = scores()
    seen = torch.ones(5, 5).tril().bool()[None, None]
    squares = (student - teacher) ** 2
    each = [squares[:, :, q, : q + 1].mean() for q in range(5)]
    found = attention_loss(student, teacher, seen, torch.ones(2, 5).bool())
    torch.testing.assert_close(found, torch.stack(each).mean())
