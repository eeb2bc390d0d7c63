"""Rare classes: weights of classes and balanced sampling, against scikit-learn's and torch's formulas."""

from collections import Counter

import pytest
import torch
from sklearn.utils.class_weight import compute_sample_weight
from torch.nn import functional as F

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.core.errors import InputError
from smelt.data.splits import Columns, Example, Split
from smelt.tasks.read_split import read_split
from smelt.tasks.samples import EncodedSample, collate, plan_batches
from smelt.training import trainer
from smelt.training.losses import balanced_class_weights, class_weighted_loss
from tests.support import harness
from tests.support.expected_errors import raises_setting_codes
from tests.support.models import taggers, tiny

pytestmark = pytest.mark.quick

TARGETS = [0, 0, 0, 2, 0, 2, 0, 0]


def test_balanced_weights_equal_scikit_learn():
    weights = balanced_class_weights(TARGETS, 4)
    expected = compute_sample_weight("balanced", TARGETS)
    assert weights[TARGETS].tolist() == pytest.approx(expected.tolist())
    assert weights[TARGETS].mean() == pytest.approx(1.0)
    assert weights[[1, 3]].tolist() == [1.0, 1.0]


def test_weights_of_several_labels_are_negatives_by_positives():
    targets = [(1.0, 0.0, 0.0, 1.0), (1.0, 1.0, 0.0, 1.0), (1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 1.0)]
    assert balanced_class_weights(targets, 4).tolist() == pytest.approx([1 / 3, 3.0, 1.0, 1.0])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_weighted_loss_is_the_cross_entropy_of_torch_divided_by_the_number_of_labels(smoothing):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 3, generator=generator)
    labels = torch.tensor([[0, 2, -100, 1, 1], [2, -100, -100, 0, 1]])
    weights = torch.tensor([0.5, 2.0, 1.5])
    each = F.cross_entropy(
        logits.transpose(1, 2), labels, weight=weights, label_smoothing=smoothing, reduction="none"
    )
    actual = class_weighted_loss(logits, labels, weights, smoothing)
    torch.testing.assert_close(actual, each.sum() / 7)


def test_weighted_loss_of_several_labels_equals_that_of_torch():
    logits, labels = torch.randn(4, 3, generator=torch.Generator().manual_seed(2)), torch.eye(4, 3)
    weights = torch.tensor([0.5, 2.0, 3.0])
    torch.testing.assert_close(
        class_weighted_loss(logits, labels, weights),
        torch.nn.BCEWithLogitsLoss(pos_weight=weights)(logits, labels),
    )


def split(labels):
    return Split(
        "x", tuple(Example(text, label=label) for text, label in zip(tiny.SENTENCES, labels, strict=False))
    )


def test_finetune_weights_the_classes_of_the_training_samples(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        trainer, "run_training", lambda *args, objective, **more: calls.append((args[0], objective))
    )
    labels = [0, 0, 0, 1]
    ctx = harness.make_context(
        tmp_path / "work" / "out", task="text-classification", data={"train": split(labels)}
    )
    src = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), "text-classification")
    Finetune()(src, FinetuneSettings(class_weights="balanced"), ctx)
    ((model, objective),) = calls
    batch = collate([EncodedSample([2, 7, 8, 3], None, 1), EncodedSample([2, 9, 3], None, 0)], model.config)
    model.eval()
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    each = F.cross_entropy(logits, batch["labels"], reduction="none")
    torch.testing.assert_close(objective(model, batch), (2.0 * each[0] + 2 / 3 * each[1]) / 2)
    assert list(ctx.details["class_weights"].values()) == [0.6667, 2.0]


def test_balanced_sampling_draws_each_class_equally_often():
    samples = [EncodedSample([1] * (2 + i % 7), None, int(i >= 950)) for i in range(1000)]
    counts = {}
    for balanced in (False, True):
        plan = plan_batches(samples, 10, None, epochs=4.0, steps=None, seed=3, balanced=balanced)
        assert len(plan) == 400
        counts[balanced] = Counter(samples[index % 1000].target for batch in plan for index in batch)
    assert counts[False] == {0: 3800, 1: 200}
    assert counts[True][1] == pytest.approx(2000, abs=4 * (4000 * 0.25) ** 0.5)


def test_training_draws_by_class(tmp_path, monkeypatch):
    drawn = []
    plan = trainer.plan_batches
    monkeypatch.setattr(
        trainer, "plan_batches", lambda *args, **more: drawn.append(more["balanced"]) or plan(*args, **more)
    )
    src = tiny.as_artifact(tiny.write_bert(tmp_path / "model"), "text-classification")
    for name, sampling in (("a", "balanced"), ("b", "uniform")):
        ctx = harness.make_context(
            tmp_path / name / "out", task="text-classification", data={"train": split([0, 0, 0, 1])}
        )
        Finetune()(src, FinetuneSettings(sampling=sampling, max_steps=1), ctx)
    assert drawn == [True, False]


def errors_of(stage, settings, task, data, config):
    errors = stage.check_rows(settings, task, data) + stage.check_model(settings, config)[0]
    return {(error.code, error.setting) for error in errors}


@pytest.mark.parametrize(
    ("settings", "task", "config", "codes"),
    [
        ({"sampling": "balanced"}, "text-classification", {"num_labels": 3}, set()),
        ({"class_weights": "balanced"}, "token-classification", {"num_labels": 3}, set()),
        ({"sampling": "balanced"}, "token-classification", {}, {("does-not-fit-task", "sampling")}),
        ({"sampling": "balanced"}, "translation", {}, {("does-not-fit-task", "sampling")}),
        ({"class_weights": "balanced"}, "translation", {}, {("does-not-fit-task", "class_weights")}),
        (
            {"sampling": "balanced"}, "text-classification", {"num_labels": 1},
            {("does-not-fit-model", "sampling")},
        ),
        (
            {"class_weights": "balanced"}, "text-classification", {"num_labels": 1},
            {("does-not-fit-model", "class_weights")},
        ),
    ],
)  # fmt: skip
def test_plan_refuses_classes_where_there_are_none(settings, task, config, codes):
    data = {"train": split([0, 1])}
    assert errors_of(Finetune, FinetuneSettings(**settings), task, data, config) == codes


def test_samples_without_labels_cannot_be_drawn_by_class():
    settings = DistillSettings(
        sampling="balanced", train_on="unlabeled", losses={"logits": 1.0, "labels": 0.0}
    )
    errors = Distill.check_rows(settings, "text-classification", {"train": split([0, 1])})
    assert ("missing-labels", "sampling") in {(error.code, error.setting) for error in errors}


def test_training_refuses_to_draw_samples_with_several_labels_by_class(tmp_path):
    config = {"problem_type": "multi_label_classification"}
    src = tiny.as_artifact(tiny.write_bert(tmp_path / "model", **config), "text-classification")
    ctx = harness.make_context(
        tmp_path / "out", task="text-classification", data={"train": split([(0,), (0, 1)])}
    )
    with pytest.raises(InputError) as caught:
        Finetune()(src, FinetuneSettings(sampling="balanced"), ctx)
    assert caught.value.code == "not-one-class"


def test_weights_and_sampling_are_not_combined():
    with raises_setting_codes("settings-conflict"):
        FinetuneSettings(class_weights="balanced", sampling="balanced")


def test_every_tag_of_a_sentence_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "run_training", lambda *args, **more: None)
    src = tiny.as_artifact(taggers.write_model(tmp_path / "model"), taggers.TASK)
    data = read_split(str(taggers.write_rows(tmp_path / "rows.jsonl")), taggers.TASK, Columns(), tmp_path)
    ctx = harness.make_context(tmp_path / "work" / "out", task=taggers.TASK, data={"train": data})
    Finetune()(src, FinetuneSettings(class_weights="balanced"), ctx)
    counts = Counter(tag for example in data.examples for tag in example.label)
    expected = {tag: counts.total() / (len(counts) * count) for tag, count in counts.items()}
    assert len(set(expected.values())) > 1
    assert {tag: ctx.details["class_weights"][tag] for tag in expected} == pytest.approx(expected, abs=1e-4)
