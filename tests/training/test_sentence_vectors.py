"""The losses of vectors against their formulas, written out with loops and numbers."""

import math

import numpy as np
import pytest
import torch

from smelt.compress.distill.objective import pairwise_similarity_loss, vector_distance_loss
from smelt.training.losses import cosent_loss


def drawn(rows, width, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_cosent_loss_equals_formula():
    vectors, scores = drawn(10, 6), torch.tensor([[0.0], [3.5], [3.5], [5.0], [1.0]])
    rows = vectors.numpy()
    cosines = [cosine(rows[i], rows[i + 5]) for i in range(5)]
    total = sum(
        math.exp(20 * (cosines[j] - cosines[i])) for i in range(5) for j in range(5) if scores[i] > scores[j]
    )
    assert float(cosent_loss(vectors, scores)) == pytest.approx(math.log(1 + total), rel=1e-9)


def test_cosent_loss_does_not_depend_on_score_scale():
    vectors, scores = drawn(8, 4), torch.tensor([0.1, 0.9, 0.4, 0.2])
    assert torch.equal(cosent_loss(vectors, scores), cosent_loss(vectors, 5 * scores - 3))


def test_cosent_loss_of_equal_scores_is_zero_and_differentiable():
    vectors = drawn(4, 3).requires_grad_()
    loss = cosent_loss(vectors, torch.ones(2))
    loss.backward()
    assert float(loss.detach()) == 0
    assert vectors.grad is not None
    assert float(vectors.grad.abs().max()) == 0


def test_vector_distance_loss_is_mean_squared_distance():
    student, teacher = drawn(5, 7), drawn(5, 7, seed=1)
    expected = np.mean([np.sum((a - b) ** 2) for a, b in zip(student.numpy(), teacher.numpy(), strict=True)])
    assert float(vector_distance_loss(student, teacher)) == pytest.approx(float(expected), rel=1e-12)
    assert float(vector_distance_loss(student, teacher)) == pytest.approx(
        7 * float(torch.nn.functional.mse_loss(student, teacher)), rel=1e-12
    )


def test_pairwise_similarity_loss_compares_all_cosines_for_any_width():
    student, teacher = drawn(4, 3), drawn(4, 9, seed=1)
    a, b = student.numpy(), teacher.numpy()
    expected = np.mean([(cosine(a[i], a[j]) - cosine(b[i], b[j])) ** 2 for i in range(4) for j in range(4)])
    assert float(pairwise_similarity_loss(student, teacher)) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("loss", [vector_distance_loss, pairwise_similarity_loss])
def test_teacher_receives_no_gradient(loss):
    student, teacher = drawn(4, 3).requires_grad_(), drawn(4, 3, seed=1).requires_grad_()
    loss(student, teacher).backward()
    assert student.grad is not None
    assert teacher.grad is None


def test_cosines_are_float32_under_autocast():
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(6, 8, generator=draw) for _ in range(2))
    expected = pairwise_similarity_loss(student, teacher)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pairwise_similarity_loss(student, teacher), expected)
