"""DistilBERT's loss on angles against torch's own, as its distiller.py calls it."""

import pytest
import torch
from torch import nn

from smelt.compress.distill.inner_losses import cosine_loss

pytestmark = pytest.mark.quick


def test_is_torchs_cosine_embedding_loss_on_the_tokens_that_are_there():
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(3, 5, 8, generator=g), torch.randn(3, 5, 8, generator=g)
    there = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
    target = torch.ones(int(there.sum()))
    wanted = nn.CosineEmbeddingLoss(reduction="mean")(student[there], teacher[there], target)
    torch.testing.assert_close(cosine_loss(student, teacher, there), wanted)
