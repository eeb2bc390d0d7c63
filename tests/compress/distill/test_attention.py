"""The distance of scores against TinyBERT's own formula."""

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.distill.inner_losses import attention_loss

pytestmark = pytest.mark.quick


def scores():
    g = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 5, 5, generator=g), torch.randn(2, 4, 5, 5, generator=g)


def test_attention_loss_without_padding_equals_tinybert():
    student, teacher = scores()
    # task_distill.py: torch.where(att <= -1e2, zeros, att) in both, then MSELoss
    mask = torch.zeros(2, 1, 5, 5)
    student_scores, teacher_scores = (
        torch.where(x + mask <= -1e2, 0.0, x + mask) for x in (student, teacher)
    )
    everything = torch.ones(1, 1, 5, 5).bool()
    loss = attention_loss(student, teacher, everything, torch.ones(2, 5).bool())
    torch.testing.assert_close(loss, F.mse_loss(student_scores, teacher_scores))


def test_padding_does_not_change_attention_loss():
    student, teacher = scores()
    short = attention_loss(
        student[1:, :, :3, :3], teacher[1:, :, :3, :3], torch.ones(1, 1, 3, 3).bool(), torch.ones(1, 3).bool()
    )
    mask = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
    loss = attention_loss(student, teacher, mask[:, None, None, :], mask)
    torch.testing.assert_close(loss, short)


def test_causal_attention_loss_uses_visible_keys_only():
    student, teacher = scores()
    visible = torch.ones(5, 5).tril().bool()[None, None]
    squares = (student - teacher) ** 2
    query_losses = [squares[:, :, q, : q + 1].mean() for q in range(5)]
    loss = attention_loss(student, teacher, visible, torch.ones(2, 5).bool())
    torch.testing.assert_close(loss, torch.stack(query_losses).mean())
