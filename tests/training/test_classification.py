"""The losses of several labels a text and of regression, against torch's own."""

import pytest
import torch
from torch.distributions import Bernoulli, kl_divergence
from torch.nn import functional as F
from transformers import BertConfig

from smelt.data.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from smelt.tasks.samples import model_problem_type
from smelt.training.losses import classification_loss, multi_label_loss, regression_loss, token_loss

pytestmark = pytest.mark.quick


@pytest.fixture
def case():
    g = torch.Generator().manual_seed(1)
    logits, teacher = (3 * torch.randn(6, 4, generator=g) for _ in range(2))
    return logits, teacher, torch.randint(0, 2, (6, 4), generator=g).float()


def gradient_of(loss, logits):
    leaf = logits.clone().requires_grad_(True)
    value = loss(leaf)
    (grad,) = torch.autograd.grad(value, leaf)
    return value.detach(), grad


def test_multi_label_distillation_equals_bernoulli_divergence(case):
    logits, teacher, labels = case
    t = 2.5

    def reference(z):
        coins = kl_divergence(Bernoulli(logits=teacher / t), Bernoulli(logits=z / t))
        return 0.7 * t * t * coins.mean() + 0.4 * F.binary_cross_entropy_with_logits(z, labels)

    actual = gradient_of(
        lambda z: multi_label_loss(z, labels, teacher, temperature=t, logits_weight=0.7, labels_weight=0.4),
        logits,
    )
    torch.testing.assert_close(actual, gradient_of(reference, logits), rtol=1e-4, atol=1e-6)


def test_label_smoothing_moves_multi_labels_toward_half(case):
    logits, _, labels = case
    expected = F.binary_cross_entropy_with_logits(logits, torch.where(labels > 0, 0.95, 0.05))
    torch.testing.assert_close(multi_label_loss(logits, labels, smoothing=0.1), expected)


def test_regression_loss_equals_mse(case):
    logits, teacher, labels = (t[:, :1] for t in case)
    torch.testing.assert_close(regression_loss(logits, labels), torch.nn.MSELoss()(logits, labels))
    actual = gradient_of(
        lambda z: regression_loss(z, labels, teacher, logits_weight=0.7, labels_weight=0.4), logits
    )
    expected = gradient_of(lambda z: 0.7 * F.mse_loss(z, teacher) + 0.4 * F.mse_loss(z, labels), logits)
    torch.testing.assert_close(actual, expected)


def test_config_and_label_type_select_loss(case):
    logits, teacher, labels = case
    several = BertConfig(num_labels=4, problem_type=MULTI_LABEL)
    number = BertConfig(num_labels=1)
    single = BertConfig(num_labels=4)
    assert [model_problem_type(c) for c in (several, number, single)] == [
        MULTI_LABEL,
        REGRESSION,
        SINGLE_LABEL,
    ]
    parts = {"temperature": 2.0, "logits_weight": 1.0, "labels_weight": 0.5}
    assert classification_loss(several, logits, labels, teacher, **parts) == multi_label_loss(
        logits, labels, teacher, **parts
    )
    assert classification_loss(number, logits[:, :1], labels[:, :1]) == regression_loss(
        logits[:, :1], labels[:, :1]
    )
    classes = labels.argmax(dim=1)
    assert classification_loss(single, logits, classes, teacher, **parts) == token_loss(
        logits, classes, teacher, **parts
    )


@pytest.mark.parametrize("problem", [SINGLE_LABEL, MULTI_LABEL, REGRESSION])
def test_loss_equals_transformers(problem):
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    outputs = 1 if problem == REGRESSION else 3
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=outputs, problem_type=problem,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    labels = {
        SINGLE_LABEL: torch.tensor([2, 0]),
        MULTI_LABEL: torch.tensor([[1.0, 0, 1], [0, 0, 0]]),
        REGRESSION: torch.tensor([[0.5], [-1.0]]),
    }[problem]
    out = model(torch.tensor([[1, 2, 3], [4, 5, 6]]), labels=labels)
    torch.testing.assert_close(classification_loss(config, out.logits, labels), out.loss)
