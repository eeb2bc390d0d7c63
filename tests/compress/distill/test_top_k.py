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
    mine = p.gather(-1, ids)
    return torch.cat([mine, (1 - mine.sum(dim=-1, keepdim=True))], dim=-1)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, 0.4)])
def test_value_and_slope_are_those_of_torch_over_the_buckets(both, weights):
    ours, theirs, labels = (x.double() if x.is_floating_point() else x for x in both)
    ids = theirs.topk(K, dim=-1).indices
    ours.requires_grad_()
    q, p = in_buckets(ours, ids), in_buckets(theirs, ids)
    rows = labels != -100
    forward = F.kl_div(q.log(), p, reduction="none").sum(-1)[rows].mean()
    reverse = F.kl_div(p.log(), q, reduction="none").sum(-1)[rows].mean()
    expected = T**2 * (weights[0] * forward + weights[1] * reverse)
    (slope,) = torch.autograd.grad(expected, ours)

    mine, reported = both[0].clone().requires_grad_(), {}
    found = top_k_loss(
        mine, labels, top_k_logits(both[1], K, T), temperature=T,
        logits_weight=weights[0], reverse_weight=weights[1], terms=reported,
    )  # fmt: skip
    found.backward()
    assert found.item() == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(mine.grad, slope.float(), rtol=1e-4, atol=1e-6)
    assert sum(float(value) for value in reported.values()) == pytest.approx(float(expected), rel=1e-5)
    assert len(reported) == sum(weight > 0 for weight in weights)


def test_with_all_words_but_one_it_is_the_whole_divergence(both):
    ours, theirs, labels = both
    found, expected = ours.clone().requires_grad_(), ours.clone().requires_grad_()
    top_k_loss(found, labels, top_k_logits(theirs, V - 1, T), temperature=T, logits_weight=1.0).backward()
    token_loss(expected, labels, theirs, temperature=T, logits_weight=1.0, labels_weight=0.0).backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_a_teacher_that_is_sure_leaves_an_empty_tail():
    theirs = torch.zeros(1, V)
    theirs[0, 3] = 500.0
    ours = torch.zeros(1, V, requires_grad=True)
    kept = top_k_logits(theirs, 2, 1.0)
    assert isinstance(kept, TopKLogits)
    found = top_k_loss(ours, torch.tensor([3]), kept, temperature=1.0, logits_weight=1.0, reverse_weight=1.0)
    found.backward()
    assert bool(torch.isfinite(ours.grad).all())
    # log V of the student's uniform guess, and the other way round a large number and no infinite one
    assert float(found) > float(torch.tensor(V).log())
