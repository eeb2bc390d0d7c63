"""Which weights come out of a training: those of the best validation, the ones that went in among them."""

import dataclasses
import math
import re
from functools import partial

import pytest
import torch

from smelt.compress.finetune import FinetuneSettings
from smelt.core.artifact import Artifact
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model
from smelt.tasks.samples import EncodedSample
from smelt.training import trainer as training_loop
from smelt.training.checkpoint_selector import CheckpointSelector, Validation
from smelt.training.extension import TrainingExtension
from smelt.training.losses import label_objective
from smelt.training.train import _may_be_best_after_start, starts_random
from smelt.training.trainer import run_training
from tests.support import harness
from tests.support.models import tiny

ROWS = [EncodedSample([2, 5, 7, 3], None, 1), EncodedSample([2, 6, 8, 3], None, 0)]


@pytest.fixture
def model(tmp_path):
    return load_model(tiny.write_bert(tmp_path / "model"))[0]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def run(model, tmp_path, monkeypatch, losses, scores=None, turned=(), probe=None, extension=None, **settings):
    """Train with validations that find `losses`; return details, warnings and the weights at each of them."""
    snapshots, remaining_losses = [], list(losses)

    def mean_loss(m, batches, objective, precision, device):
        snapshots.append(weights(m.model))
        return remaining_losses.pop(0)

    monkeypatch.setattr(training_loop, "mean_loss", mean_loss)
    out = tmp_path / "work" / "out"
    ctx = dataclasses.replace(
        harness.make_context(out, "text-classification"), negated_metrics=frozenset(turned)
    )
    values = iter(scores or ())
    chosen = FinetuneSettings(
        **{"batch_size": 2, "precision": "fp32", "learning_rate": 1e-3, "max_steps": 4, "num_evals": 4}
        | {"warmup_steps": 0, "lr_scheduler_type": "constant"}
        | settings
    )
    run_training(
        model, ROWS, ROWS, objective=label_objective(), settings=chosen, ctx=ctx,
        score=(lambda: next(values)) if scores else None,
        probe=probe, extension=extension,
    )  # fmt: skip
    assert remaining_losses == []
    return ctx.details["training"], ctx.warnings, snapshots


def test_random_initial_weights_are_not_selected(model, tmp_path, monkeypatch):
    """The loss of random weights may be the least although what was learned scores better."""
    extension = TrainingExtension(
        may_be_best=partial(_may_be_best_after_start, TrainingExtension().may_be_best)
    )
    details, _, snapshots = run(
        model, tmp_path, monkeypatch, [0.69, 0.74, 0.71, 0.75, 0.76], extension=extension
    )
    assert details["kept_step"] == 2
    assert same(weights(model), snapshots[2])


@pytest.mark.parametrize(("best", "warned"), [(70.0, False), (100.0, False), (300.0, True)])
def test_loss_disagreeing_with_metric_warns(model, tmp_path, monkeypatch, best, warned):
    metrics = iter([{"accuracy": value} for value in (52.5, 60.0, best, 51.0, 50.0)])
    losses = [0.69, 0.70, 0.71, 0.72, 0.73]
    details, warnings, _ = run(model, tmp_path, monkeypatch, losses, probe=lambda: next(metrics))
    assert details["kept_step"] == 0
    assert [metrics["other_metrics"]["accuracy"] for metrics in details["validations"]] == [
        52.5,
        60.0,
        best,
        51.0,
        50.0,
    ]
    messages = [
        message.message for message in warnings if message.code == "loss-disagrees"
    ]  # 2 rows: the limit is 50 points
    found_warnings = [
        ("0.69" in text and "52.5" in text, "step 2" in text and f"accuracy {best:g}" in text)
        for text in messages
    ]
    assert found_warnings == ([(True, True)] if warned else [])


def test_warns_when_best_loss_is_above_initial_loss(model, tmp_path, monkeypatch):
    extension = TrainingExtension(
        may_be_best=partial(_may_be_best_after_start, TrainingExtension().may_be_best)
    )
    for losses, count in (([0.69, 0.74, 0.71, 0.75, 0.76], 1), ([0.69, 0.60, 0.71, 0.75, 0.76], 0)):
        _, warnings, _ = run(model, tmp_path / str(count), monkeypatch, losses, extension=extension)
        assert message_codes(warnings).count("worse-than-random") == count


def test_weights_of_best_validation_are_kept(model, tmp_path, monkeypatch):
    details, warnings, snapshots = run(model, tmp_path, monkeypatch, [3.0, 2.0, 1.0, 1.5, 2.5])
    assert not any(same(snapshots[index], snapshots[index + 1]) for index in range(4)), (
        "the weights did not move"
    )
    assert same(weights(model), snapshots[2])
    assert (details["kept_step"], details["validation_loss"], warnings) == (2, 1.0, [])
    assert details["validations"] == [
        {"step": step, "loss": loss} for step, loss in enumerate([3.0, 2.0, 1.0, 1.5, 2.5])
    ]


def test_worse_training_restores_initial_weights_and_warns(model, tmp_path, monkeypatch):
    before = weights(model)
    details, warnings, snapshots = run(model, tmp_path, monkeypatch, [1.0, 1.5, 1.25, 2.0, 3.0])
    assert not same(snapshots[-1], before)
    assert same(weights(model), before)
    assert (details["kept_step"], details["validation_loss"]) == (0, 1.0)
    (warning,) = warnings
    assert warning.code == "no-improvement"
    assert re.findall(r"[\d.]*\d", warning.message)[:3] == ["1", "1.25", "2"]


def test_last_weights_are_kept_without_validations(model, tmp_path, monkeypatch):
    details, warnings, _ = run(model, tmp_path, monkeypatch, [], num_evals=0)
    assert (details["kept_step"], details["validation_loss"], details["validations"], warnings) == (
        4,
        None,
        [],
        [],
    )


def test_score_takes_precedence_over_loss(model, tmp_path, monkeypatch):
    losses, scores = [0.1, 2.0, 3.0, 1.5, 0.5], [50.0, 80.0, 70.0, 80.0, 60.0]
    details, warnings, snapshots = run(
        model, tmp_path, monkeypatch, losses, scores, metric_for_best_model="accuracy"
    )
    assert same(weights(model), snapshots[3])
    assert (details["kept_step"], details["validation_loss"], warnings) == (3, 1.5, [])
    assert details["validations"][1] == {"step": 1, "loss": 2.0, "score": 80.0}


def test_warning_names_selection_metric(model, tmp_path, monkeypatch):
    scores = [50.0, 40.0, 45.0, 30.0, 20.0]
    _, (warning,), _ = run(
        model, tmp_path, monkeypatch, [5.0, 4.0, 3.0, 2.0, 1.0], scores, metric_for_best_model="f1"
    )
    assert warning.code == "no-improvement"
    assert re.findall(r"f1|[\d.]*\d", warning.message)[:4] == ["f1", "50", "45", "2"]


def test_negated_metric_is_reported_with_original_sign(model, tmp_path, monkeypatch):
    """A stage gets it with its sign turned round, so that more is better; people never see that."""
    scores = [-50.0, -70.0, -60.0, -80.0, -90.0]
    losses = [5.0, 4.0, 3.0, 2.0, 1.0]
    details, (warning,), _ = run(
        model,
        tmp_path,
        monkeypatch,
        losses,
        scores,
        metric_for_best_model="perplexity",
        turned={"perplexity"},
    )
    assert warning.code == "no-improvement"
    assert re.findall(r"perplexity|[\d.]*\d", warning.message)[:4] == ["perplexity", "50", "60", "2"]
    assert [validation["score"] for validation in details["validations"]] == [50.0, 70.0, 60.0, 80.0, 90.0]


def test_averaged_weights_are_validated_and_kept(model, tmp_path, monkeypatch):
    before = weights(model)
    _, _, snapshots = run(
        model, tmp_path, monkeypatch, [4.0, 3.0, 2.0, 1.0, 5.0], ema_decay=0.28, dropout=0.0
    )
    assert same(snapshots[0], before)
    assert same(weights(model), snapshots[3])
    plain, _ = load_model(tmp_path / "model")
    _, _, unaveraged = run(plain, tmp_path / "plain", monkeypatch, [4.0, 3.0, 2.0, 1.0, 5.0], dropout=0.0)
    assert same(snapshots[1], unaveraged[1])  # the average begins with the first update
    average = snapshots[1]
    for step, decay in ((2, 3 / 12), (3, 0.28)):  # of few updates (1 + n) / (10 + n), where that is less
        average = {name: decay * average[name] + (1 - decay) * unaveraged[step][name] for name in average}
        torch.testing.assert_close(snapshots[step], average)


def test_non_finite_loss_is_never_best():
    assert not Validation(0, math.nan).beats(None)
    assert Validation(1, 2.0).beats(None)
    assert not Validation(2, math.nan).beats(Validation(1, 2.0))


def test_last_good_text_names_best_step_or_initial_weights(model):
    keeper = CheckpointSelector(model, None, lambda *args: None)
    assert not re.findall(r"\d", keeper.last_good_text())
    keeper.best = Validation(0, 0.5)
    assert re.findall(r"[\d.]*\d", keeper.last_good_text()) == ["0.500"]  # its loss, and no step
    keeper.best = Validation(7, 0.5)
    assert re.findall(r"[\d.]*\d", keeper.last_good_text()) == ["7", "0.500", "7"]
    assert "max_steps: 7" in keeper.last_good_text()


def test_resumed_training_logs_previous_curve_again(model):
    """Each run has a tracker run of its own, which would otherwise begin in the middle of the curve."""
    first = CheckpointSelector(model, None, lambda *args: None)
    first.curve = {"step": [1, 2], "train_loss": [3.0, 2.0], "learning_rate": [0.1, 0.2]}
    first.validations = [Validation(0, 4.0), Validation(2, 2.5)]
    logged = []
    resumed = CheckpointSelector(model, None, lambda *args: None, None, lambda *point: logged.append(point))
    resumed.load_state(first.state_dict())
    resumed.on_train_begin(None, None, None)
    assert logged == [
        ({"validation_loss": 4.0}, 0),
        ({"train_loss": 3.0, "learning_rate": 0.1}, 1),
        ({"train_loss": 2.0, "learning_rate": 0.2}, 2),
        ({"validation_loss": 2.5}, 2),
    ]


@pytest.mark.parametrize(("chain", "random"), [
    ([{"new_head": True}], True), ([{"untrained": True}], True), ([{"new_head": True}, {}], True),
    ([{"new_head": True}, {"training": {}}], False), ([{"untrained": True}, {"training": {}}, {}], False),
    ([{}], False),
])  # fmt: skip
def test_weights_are_random_until_trained(tmp_path, chain, random):
    folder, artifacts = tiny.write_bert(tmp_path / "m"), []
    for number, details in enumerate(chain, start=1):
        model_artifact = tiny.as_artifact(folder, "text-classification")
        parent = artifacts[-1].key if artifacts else None
        changed = {"details": details, "key": f"{number:064x}", "parent": parent}
        artifacts.append(Artifact(model_artifact.path, model_artifact.manifest.model_copy(update=changed)))
    other = tiny.as_artifact(folder, "text-classification")  # a teacher from another branch, trained
    names = {f"s{n}": artifact for n, artifact in enumerate(artifacts)} | {"teacher": other}
    ctx = harness.make_context(tmp_path / "out", "text-classification", ancestors=names)
    assert starts_random(artifacts[-1], ctx) is random
