"""A loss of several parts: each counts by its own items, and the report distinguishes them."""

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.finetune import FinetuneSettings
from smelt.tasks.samples import EncodedSample
from smelt.training.extension import LossTerm, count_batch_items, mean_loss, total_loss
from smelt.training.losses import multi_label_loss, token_loss
from smelt.training.trainer import run_training
from tests.support import harness

pytestmark = pytest.mark.quick

# Sources and targets of very different lengths: a share of the ones is no share of the others.
ROWS = [
    EncodedSample([3, 4], None, [5, 6, 7, 8, 9, 2]),
    EncodedSample([3, 4, 5, 6, 7, 8, 2], None, [2]),
    EncodedSample([4], None, [5, 2]),
]


class Model(torch.nn.Module):
    """Two numbers; the losses are as the test says."""

    def __init__(self):
        super().__init__()
        self.source, self.target = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))
        self.config = type(
            "Config", (), {"pad_token_id": 0, "decoder_start_token_id": 1, "model_type": "x"}
        )()
        self.config._attn_implementation = "eager"

    def set_attn_implementation(self, name):
        pass


def objective(model, batch):
    """Means of the ids that go in and of those that come out, times a weight of each."""
    inputs, labels = batch["input_ids"], batch["labels"]
    source = inputs[batch["attention_mask"] == 1].float().mean()
    target = labels[labels != -100].float().mean()
    return {
        "source": LossTerm((1 + model.source) * source, "inputs"),
        "mixed": LossTerm((1 + model.target) * target, components={"a": target * 0.25, "b": target * 0.75}),
    }


def train(tmp_path, **settings):
    model, gradients = Model(), {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: gradients.update({name: float(p.grad)}))
    ctx = harness.make_context(tmp_path / "work" / "out")
    options = {
        "precision": "fp32",
        "max_steps": 1,
        "num_evals": 0,
        "learning_rate": 1e-9,
        "max_grad_norm": 1e9,
    }
    run_training(
        model, ROWS, None, objective=objective, ctx=ctx, settings=FinetuneSettings(**(options | settings))
    )
    return gradients, ctx.details["training"]


def test_each_loss_term_is_averaged_over_its_items_for_any_batching(tmp_path):
    tokens = [i for row in ROWS for i in row.input_ids]
    words = [i for row in ROWS for i in row.target]
    expected = {"source": sum(tokens) / len(tokens), "target": sum(words) / len(words)}
    full_gradients, details = train(tmp_path / "1", batch_size=3)
    accumulated, accumulated_details = train(tmp_path / "3", batch_size=1, gradient_accumulation_steps=3)
    assert full_gradients == pytest.approx(expected)
    assert accumulated == pytest.approx(expected)
    for training in (details, accumulated_details):
        assert training["train_losses"] == pytest.approx(
            {"source": expected["source"], "a": 0.25 * expected["target"], "b": 0.75 * expected["target"]}
        )
        assert training["train_loss"] == pytest.approx(sum(expected.values()))


def test_validation_loss_does_not_depend_on_batching():
    from smelt.tasks.samples import collate

    model = Model()
    single_batch = [collate(ROWS, model.config)]
    separate_batches = [collate([row], model.config) for row in ROWS]
    losses = [
        mean_loss(model, batches, objective, "fp32", torch.device("cpu"))
        for batches in (single_batch, separate_batches)
    ]
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0] == pytest.approx(float(total_loss(objective(model, single_batch[0])).detach()))
    assert count_batch_items(single_batch[0]) == {"labels": 9, "inputs": 10}


def test_fused_loss_terms_sum_to_loss_and_reverse_kl_equals_torch():
    g = torch.Generator().manual_seed(1)
    logits, teacher = torch.randn(6, 9, generator=g) * 2, torch.randn(6, 9, generator=g) * 2
    labels = torch.tensor([1, 2, -100, 3, -100, 0])
    mask, t = labels != -100, 1.5
    leaf, reported = logits.clone().requires_grad_(), {}
    loss = token_loss(
        leaf, labels, teacher, temperature=t, logits_weight=0.5, reverse_weight=0.7, terms=reported
    )
    loss.backward()
    other = logits.clone().requires_grad_()
    q, p = ((x[mask] / t).log_softmax(-1) for x in (other, teacher))
    parts = {
        "labels": F.cross_entropy(other[mask], labels[mask]),
        "logits": 0.5 * t * t * F.kl_div(q, p, reduction="batchmean", log_target=True),
        "reverse_kl": 0.7 * t * t * F.kl_div(p, q, reduction="batchmean", log_target=True),
    }
    sum(parts.values()).backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert {n: float(v) for n, v in reported.items()} == pytest.approx(
        {n: float(v.detach()) for n, v in parts.items()}, rel=1e-5
    )
    assert float(loss.detach()) == pytest.approx(sum(float(v) for v in reported.values()))


def test_multi_label_reverse_kl_equals_formula():
    g = torch.Generator().manual_seed(2)
    z, t = torch.randn(3, 4, generator=g), torch.randn(3, 4, generator=g)
    reported = {}
    multi_label_loss(z, torch.ones(3, 4), t, logits_weight=1.0, reverse_weight=2.0, terms=reported)
    q, p = z.sigmoid(), t.sigmoid()
    kl = (q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()).mean()
    assert float(reported["reverse_kl"]) == pytest.approx(2 * float(kl), rel=1e-4)
    assert set(reported) == {"labels", "logits", "reverse_kl"}
