"""DistilBERT's loss on angles against torch's own, as its distiller.py calls it."""

import pytest
import torch
from torch import nn

from smelt.compress.distill.inner_losses import cosine_loss

pytestmark = pytest.mark.quick


def test_cosine_loss_equals_torch_on_unpadded_tokens():
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(3, 5, 8, generator=g), torch.randn(3, 5, 8, generator=g)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
    target = torch.ones(int(mask.sum()))
    expected = nn.CosineEmbeddingLoss(reduction="mean")(student[mask], teacher[mask], target)
    torch.testing.assert_close(cosine_loss(student, teacher, mask), expected)
