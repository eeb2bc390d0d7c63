"""The distance of states against torch's mean squared error on the tokens that are there."""

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.distill.inner_losses import hidden_state_loss

pytestmark = pytest.mark.quick


def test_is_the_mean_squared_error_of_the_tokens_that_are_there():
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(3, 5, 8, generator=g), torch.randn(3, 5, 8, generator=g)
    there = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
    torch.testing.assert_close(
        hidden_state_loss(student, teacher, there), F.mse_loss(student[there], teacher[there])
    )
    padded = student.clone()
    padded[~there] = torch.inf
    assert torch.equal(hidden_state_loss(padded, teacher, there), hidden_state_loss(student, teacher, there))
