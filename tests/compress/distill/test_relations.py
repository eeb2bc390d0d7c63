"""MiniLMv2's relations, recomputed token by token."""

import pytest
import torch

from smelt.compress.distill.inner_losses import relation_loss

pytestmark = pytest.mark.quick


def by_hand(student, teacher, lengths, heads, causal):
    """KL(teacher || student) of softmax(a_i . a_j / sqrt(d)) for each text, head and token alone."""
    divergences = []
    for row, length in enumerate(lengths):
        for head in range(heads):
            for i in range(length):
                last = i + 1 if causal else length
                logs = []
                for x in (teacher, student):
                    d = x.shape[-1] // heads
                    a = x[row, :length, head * d : (head + 1) * d]
                    logs.append(((a[:last] @ a[i]) / d**0.5).log_softmax(0))
                divergences.append((logs[0].exp() * (logs[0] - logs[1])).sum())
    return torch.stack(divergences).mean()


@pytest.mark.parametrize("causal", [False, True])
def test_relation_loss_equals_token_by_token_divergence(causal):
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(3, 5, 12, generator=g), torch.randn(3, 5, 24, generator=g)
    lengths = [5, 1, 3]
    mask = torch.arange(5)[None] < torch.tensor(lengths)[:, None]
    leaf = student.clone().requires_grad_()
    loss = relation_loss(leaf, teacher, mask, 6, causal)
    torch.testing.assert_close(loss.detach(), by_hand(student, teacher, lengths, 6, causal))
    loss.backward()
    other = student.clone().requires_grad_()
    by_hand(other, teacher, lengths, 6, causal).backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_fully_padded_sample_has_zero_gradient():
    leaf = torch.randn(1, 3, 4).requires_grad_()
    relation_loss(leaf, torch.randn(1, 3, 4), torch.zeros(1, 3).bool(), 2, False).backward()
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_relation_loss_is_float32_under_autocast():
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 5, 8, generator=draw) for _ in range(2))
    mask = torch.ones(2, 5, dtype=torch.bool)
    expected = relation_loss(student, teacher, mask, 2, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(relation_loss(student, teacher, mask, 2, False), expected)
