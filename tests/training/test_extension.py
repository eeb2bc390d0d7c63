"""What a technique may add to the training: each part has its effect, and none is left behind."""

import contextlib

import pytest
import torch

from smelt.compress.finetune import FinetuneSettings
from smelt.models.checkpoint import load_model
from smelt.tasks.samples import EncodedSample
from smelt.training import trainer as training_loop
from smelt.training.extension import ParameterGroup, TrainingExtension
from smelt.training.losses import label_objective
from smelt.training.trainer import run_training
from tests.support import harness
from tests.support.models import tiny

ROWS = [EncodedSample([2, 5, 7, 3], None, 1), EncodedSample([2, 6, 8, 3], None, 0)]
PLAIN = {
    "batch_size": 2, "precision": "fp32", "max_steps": 3, "warmup_steps": 0, "lr_scheduler_type": "constant",
    "num_evals": 0,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    return load_model(tiny.write_bert(tmp_path / "model"))[0]


def run(model, tmp_path, extension, objective=None, score=None, **settings):
    ctx = harness.make_context(tmp_path / "work" / "out", "text-classification")
    run_training(
        model, ROWS, ROWS, objective=objective or label_objective(), ctx=ctx, score=score,
        extension=extension, settings=FinetuneSettings(**(PLAIN | {"learning_rate": 1e-3} | settings)),
    )  # fmt: skip
    return ctx.details["training"]


def test_extension_modules_are_trained_and_removed(model, tmp_path):
    scale, scored = torch.nn.Linear(1, 1, bias=False), []
    before = scale.weight.item()

    def objective(m, batch):
        return label_objective()(m, batch) * scale(torch.ones(1)).exp().squeeze()

    names = set(model.state_dict())

    def score():
        scored.append(set(model.state_dict()))
        return float(len(scored))

    run(model, tmp_path, TrainingExtension(modules={"scale": scale}), objective, score, num_evals=2)
    assert scale.weight.item() != before
    assert scored == [names] * 3, "a checkpoint was scored with what is not stored"
    assert set(model.state_dict()) == names
    assert scale.weight.grad is None
    assert not scale.training


def test_parameter_groups_have_own_rate_and_direction(model, tmp_path):
    up, down = (torch.nn.ParameterDict({"x": torch.nn.Parameter(torch.zeros(()))}) for _ in range(2))
    classifier = model.classifier.bias
    start = classifier.detach().clone()

    def objective(m, batch):
        return label_objective()(m, batch) + up["x"] + down["x"]

    groups = [
        ParameterGroup([up["x"]], learning_rate=0.5, weight_decay=0.0, maximize=True),
        ParameterGroup([down["x"]], learning_rate=0.25, weight_decay=0.0),
        ParameterGroup([classifier], learning_rate=0.0),
    ]
    extension = TrainingExtension(modules={"up": up, "down": down}, groups=groups)
    run(model, tmp_path, extension, objective, max_grad_norm=1e9)
    # Adam moves by the rate where the gradient is always the same
    assert (up["x"].item(), down["x"].item()) == pytest.approx((1.5, -0.75), rel=1e-4)
    assert torch.equal(classifier.detach(), start)


def test_hooks_receive_update_number(model, tmp_path):
    events = []

    @contextlib.contextmanager
    def around():
        events.append("in")
        yield
        events.append("out")

    weight = model.classifier.weight
    shown = weight.detach().clone()

    def after(step, total):
        moved = not torch.equal(weight.detach(), shown)
        events.append(("after", step, total, moved))
        with torch.no_grad():
            weight.copy_(shown)

    extension = TrainingExtension(
        training_context=around,
        before_step=lambda step, total: events.append(("before", step, total)),
        after_step=after,
    )
    run(model, tmp_path, extension, max_steps=2)
    assert events == [
        "in",
        ("before", 1, 2),
        ("after", 1, 2, True),
        ("before", 2, 2),
        ("after", 2, 2, True),
        "out",
    ]
    assert torch.equal(weight.detach(), shown), "what was done after the last update did not stay"


def test_only_eligible_checkpoints_are_selected(model, tmp_path, monkeypatch):
    losses = iter([1.0, 2.0, 3.0, 2.5])
    monkeypatch.setattr(training_loop, "mean_loss", lambda *args: next(losses))
    details = run(model, tmp_path, TrainingExtension(may_be_best=lambda step: step >= 2), num_evals=3)
    assert (details["kept_step"], details["validation_loss"]) == (3, 2.5)
    assert [validation["step"] for validation in details["validations"]] == [0, 1, 2, 3]
