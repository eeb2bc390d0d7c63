"""The fused losses against torch's own functions and autograd."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from smelt.training.losses import token_loss

pytestmark = pytest.mark.quick


@pytest.fixture
def case():
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5, 11, generator=g) * 3
    teacher = torch.randn(4, 5, 11, generator=g) * 3
    labels = torch.randint(0, 11, (4, 5), generator=g)
    labels[0, 3:] = -100
    labels[2] = -100
    return logits, teacher, labels


def gradient_of(loss, logits):
    leaf = logits.clone().requires_grad_(True)
    value = loss(leaf)
    (grad,) = torch.autograd.grad(value * 1.7, leaf)
    return value.detach(), grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torch(case, smoothing):
    logits, _, labels = case
    actual = gradient_of(lambda z: token_loss(z, labels, smoothing=smoothing), logits)
    expected = gradient_of(
        lambda z: F.cross_entropy(z.flatten(0, 1), labels.flatten(), label_smoothing=smoothing), logits
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_distillation_loss_equals_kl_div_times_squared_temperature(case):
    logits, teacher, labels = case
    mask, t = labels != -100, 2.5

    def reference(z):
        kl = F.kl_div((z[mask] / t).log_softmax(-1), (teacher[mask] / t).softmax(-1), reduction="batchmean")
        return 0.7 * t * t * kl + 0.4 * F.cross_entropy(z[mask], labels[mask])

    actual = gradient_of(
        lambda z: token_loss(z, labels, teacher, temperature=t, logits_weight=0.7, labels_weight=0.4), logits
    )
    torch.testing.assert_close(actual, gradient_of(reference, logits), rtol=1e-5, atol=1e-6)


def test_loss_does_not_depend_on_block_size(case, monkeypatch):
    logits, teacher, labels = case

    def run(z):
        return token_loss(z, labels, teacher, temperature=2.0, logits_weight=1.0, labels_weight=0.5)

    expected = gradient_of(run, logits)
    monkeypatch.setattr("smelt.training.losses._BLOCK_BYTES", 3 * 4 * 11)
    torch.testing.assert_close(gradient_of(run, logits), expected)


def test_teacher_with_infinite_logits_gives_finite_loss(case):
    logits, teacher, labels = case
    teacher = teacher.clone()
    teacher[..., 4] = float("-inf")
    loss, grad = gradient_of(lambda z: token_loss(z, labels, teacher, logits_weight=1.0), logits)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()


def test_gradient_of_padding_is_zero(case):
    logits, teacher, labels = case
    _, grad = gradient_of(lambda z: token_loss(z, labels, teacher, logits_weight=1.0), logits)
    assert grad[labels == -100].abs().max() == 0
    assert grad[labels != -100].abs().max() > 0


class Named(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_loss_without_grad_computes_no_gradient(case):
    logits, _, labels = case
    with Named() as trained:
        value = token_loss(logits.clone().requires_grad_(True), labels)
    with torch.no_grad(), Named() as plain:
        assert torch.equal(token_loss(logits, labels), value.detach())
    assert "exp_" in trained.names
    assert not {"exp_", "scatter_add_"} & set(plain.names)
