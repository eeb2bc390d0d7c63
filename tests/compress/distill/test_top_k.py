"""Divergences over the k largest and a tail, against torch's own on the k + 1 probabilities."""

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.distill.logit_cache import TopKLogits, top_k_logits, top_k_loss
from smelt.training.losses import token_loss

V, K, T = 11, 4, 2.0


@pytest.fixture
def both():
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 5, V, generator=draw)
    labels = torch.randint(V, (3, 5), generator=draw)
    labels[1, 2:] = -100
    return logits, 3 * torch.randn(3, 5, V, generator=draw), labels


def in_buckets(logits, ids):
    """The probabilities of k words and of all others, by summing them."""
    p = (logits / T).softmax(dim=-1)
    top_probabilities = p.gather(-1, ids)
    return torch.cat([top_probabilities, (1 - top_probabilities.sum(dim=-1, keepdim=True))], dim=-1)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, 0.4)])
def test_top_k_loss_and_gradient_equal_torch(both, weights):
    student_logits, teacher_logits, labels = (x.double() if x.is_floating_point() else x for x in both)
    ids = teacher_logits.topk(K, dim=-1).indices
    student_logits.requires_grad_()
    q, p = in_buckets(student_logits, ids), in_buckets(teacher_logits, ids)
    rows = labels != -100
    forward = F.kl_div(q.log(), p, reduction="none").sum(-1)[rows].mean()
    reverse = F.kl_div(p.log(), q, reduction="none").sum(-1)[rows].mean()
    expected = T**2 * (weights[0] * forward + weights[1] * reverse)
    (slope,) = torch.autograd.grad(expected, student_logits)

    leaf, reported = both[0].clone().requires_grad_(), {}
    loss = top_k_loss(
        leaf, labels, top_k_logits(both[1], K, T), temperature=T,
        logits_weight=weights[0], reverse_weight=weights[1], terms=reported,
    )  # fmt: skip
    loss.backward()
    assert loss.item() == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(leaf.grad, slope.float(), rtol=1e-4, atol=1e-6)
    assert sum(float(value) for value in reported.values()) == pytest.approx(float(expected), rel=1e-5)
    assert len(reported) == sum(weight > 0 for weight in weights)


def test_top_k_of_all_but_one_token_equals_full_divergence(both):
    student_logits, teacher_logits, labels = both
    leaf, expected_leaf = student_logits.clone().requires_grad_(), student_logits.clone().requires_grad_()
    top_k_loss(
        leaf, labels, top_k_logits(teacher_logits, V - 1, T), temperature=T, logits_weight=1.0
    ).backward()
    token_loss(
        expected_leaf, labels, teacher_logits, temperature=T, logits_weight=1.0, labels_weight=0.0
    ).backward()
    torch.testing.assert_close(leaf.grad, expected_leaf.grad, rtol=1e-4, atol=1e-6)


def test_saturated_teacher_has_empty_tail_and_finite_gradient():
    teacher_logits = torch.zeros(1, V)
    teacher_logits[0, 3] = 500.0
    student_logits = torch.zeros(1, V, requires_grad=True)
    top_k = top_k_logits(teacher_logits, 2, 1.0)
    assert isinstance(top_k, TopKLogits)
    loss = top_k_loss(
        student_logits, torch.tensor([3]), top_k, temperature=1.0, logits_weight=1.0, reverse_weight=1.0
    )
    loss.backward()
    assert bool(torch.isfinite(student_logits.grad).all())
    # log V of the student's uniform guess, and the other way round a large number and no infinite one
    assert float(loss) > float(torch.tensor(V).log())
