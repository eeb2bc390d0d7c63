"""The distance of states against torch's mean squared error on the tokens that are there."""

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.distill.inner_losses import hidden_state_loss

pytestmark = pytest.mark.quick


def test_hidden_state_loss_equals_mse_on_unpadded_tokens():
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(3, 5, 8, generator=g), torch.randn(3, 5, 8, generator=g)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
    torch.testing.assert_close(
        hidden_state_loss(student, teacher, mask), F.mse_loss(student[mask], teacher[mask])
    )
    padded = student.clone()
    padded[~mask] = torch.inf
    assert torch.equal(hidden_state_loss(padded, teacher, mask), hidden_state_loss(student, teacher, mask))
