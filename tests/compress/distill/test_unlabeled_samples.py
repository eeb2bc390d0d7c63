"""A student learns on texts of which the teacher alone says what they are."""

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.distill.objective import DistillObjective
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.data.labels import MULTI_LABEL, NO_CLASS, NO_LABEL, REGRESSION, SINGLE_LABEL
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model
from smelt.tasks.samples import classifier_targets
from tests.support import harness
from tests.support.expected_errors import raises_setting_codes
from tests.support.models import embedders, tiny

TEXTS = Split("texts", tuple(Example(text) for text in tiny.SENTENCES * 4))
LABELED = Split("labeled", tuple(Example(text[::-1], label=i % 2) for i, text in enumerate(tiny.SENTENCES)))
SHORT = {
    "batch_size": 5, "learning_rate": 1e-2, "precision": "fp32", "dropout": 0.0, "num_evals": 1, "epochs": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "seen"), [("unlabeled", {"texts": 40}), ("both", {"labeled": 10, "texts": 40})]
)
def test_classifier_learns_teacher_labels_of_unlabeled_texts(tmp_path, rows, seen):
    losses = {"logits": 1, "labels": 0}
    settings = DistillSettings.model_validate(SHORT | {"train_on": rows, "losses": losses, "teacher": "big"})
    data = {"train": LABELED, "unlabeled": TEXTS, "validation": LABELED}
    teacher = tiny.as_artifact(tiny.write_bert(tmp_path / "big", seed=1), "text-classification")
    student = tiny.write_bert(tmp_path / "m", seed=2)
    ctx = harness.run_stage(
        Distill(), settings, student, tmp_path / "o/out", "text-classification", data=data,
        ancestors={"big": teacher},
    )  # fmt: skip
    start, end = [validation["loss"] for validation in ctx.details["training"]["validations"]]
    assert ctx.details["rows"] == seen
    assert ctx.details["training"]["rows"] == sum(seen.values())
    assert set(ctx.details["training"]["train_losses"]) == {"logits"}
    assert end < 0.7 * start


def test_labels_of_some_samples_add_their_cross_entropy(tmp_path):
    """Of three samples two have labels: KL of three and cross-entropy of two, both divided by three."""
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)
    labels = torch.tensor([1, NO_CLASS, 0])
    settings = DistillSettings(
        train_on="both", temperature=2.0, losses={"logits": 0.7, "labels": 0.4}, label_smoothing_factor=0.0
    )
    model, big = (load_model(tiny.write_bert(tmp_path / name))[0] for name in "mb")
    objective = DistillObjective(big, settings)
    outputs = {id(model): student, id(big): teacher}
    objective._run_model = lambda called, batch: outputs[id(called)]
    terms = objective(model, {"labels": labels})
    divergence = F.kl_div(
        (student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean"
    ) * 4  # fmt: skip
    cross_entropy = F.cross_entropy(student[[0, 2]], labels[[0, 2]], reduction="sum") / 3
    expected = 0.7 * divergence + 0.4 * cross_entropy
    assert float(terms["outputs"].value.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    gradient, wanted = (torch.autograd.grad(loss, student)[0] for loss in (terms["outputs"].value, expected))
    assert gradient.allclose(wanted, atol=1e-6)
    assert float(terms["outputs"].components["labels"]) == pytest.approx(0.4 * float(cross_entropy.detach()))
    none = objective(model, {"labels": torch.full((3,), NO_CLASS)})["outputs"]
    assert float(none.value.detach()) == pytest.approx(float(0.7 * divergence.detach()), rel=1e-5)


def bernoulli_divergence(teacher, student):
    """Return KL of two-class distributions from torch's own, mean over samples and classes."""
    one, other = (torch.distributions.Bernoulli(logits=z) for z in (teacher, student))
    return torch.distributions.kl_divergence(one, other).mean()


@pytest.mark.parametrize("problem", [MULTI_LABEL, REGRESSION])
def test_numbers_of_some_samples_add_their_loss(problem, tmp_path):
    """Of three samples two have labels: the teacher's loss of three, that of labels of two divided by 3."""
    torch.manual_seed(0)
    size = 2 if problem == MULTI_LABEL else 1
    names = {"num_labels": size, "problem_type": problem}
    model, big = (load_model(tiny.write_bert(tmp_path / name, **names))[0] for name in "mb")
    examples = [Example("x", label=1), Example("y", label=NO_LABEL), Example("z", label=0)]
    labels = torch.tensor(classifier_targets(examples, model.config))
    student, teacher = torch.randn(3, size, requires_grad=True), torch.randn(3, size)
    settings = DistillSettings(train_on="both", temperature=2.0, losses={"logits": 0.7, "labels": 0.4})
    objective = DistillObjective(big, settings)
    outputs = {id(model): student, id(big): teacher}
    objective._run_model = lambda called, batch: outputs[id(called)]
    term = objective(model, {"labels": labels})["outputs"]
    if problem == MULTI_LABEL:
        bits = torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # of the labels 1 and 0
        label_loss = F.binary_cross_entropy_with_logits(student[[0, 2]], bits, reduction="sum") / 6
        teacher_loss = 4 * bernoulli_divergence(teacher / 2, student / 2)
    else:
        label_loss = F.mse_loss(student[[0, 2]], torch.tensor([[1.0], [0.0]]), reduction="sum") / 3
        teacher_loss = F.mse_loss(student, teacher)
    expected = 0.7 * teacher_loss + 0.4 * label_loss
    assert float(term.value.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    gradient, wanted = (torch.autograd.grad(loss, student)[0] for loss in (term.value, expected))
    assert gradient.allclose(wanted, atol=1e-6)
    none = objective(model, {"labels": torch.full_like(labels, float("nan"))})["outputs"]
    assert float(none.value.detach()) == pytest.approx(float(0.7 * teacher_loss.detach()), rel=1e-5)


@pytest.mark.parametrize("problem", [SINGLE_LABEL, MULTI_LABEL, REGRESSION])
def test_classifier_learns_labels_of_labeled_texts_and_teacher_of_all(problem, tmp_path):
    """The teacher knows nothing: only labels can bring the loss on them down."""
    size = 1 if problem == REGRESSION else 2
    names = {"num_labels": size, "problem_type": problem}
    settings = DistillSettings.model_validate(
        SHORT | {"train_on": "both", "losses": {"logits": 0.1, "labels": 1.0}, "teacher": "big"}
    )
    data = {"train": LABELED, "unlabeled": TEXTS, "validation": LABELED}
    teacher = tiny.as_artifact(tiny.write_bert(tmp_path / "big", seed=1, **names), "text-classification")
    student = tiny.write_bert(tmp_path / "m", seed=2, **names)
    ctx = harness.run_stage(
        Distill(), settings, student, tmp_path / "o/out", "text-classification", data=data,
        ancestors={"big": teacher},
    )  # fmt: skip
    training = ctx.details["training"]
    assert training["rows"] == len(LABELED) + len(TEXTS)
    assert set(training["train_losses"]) == {"logits", "labels"}
    start, end = [validation["loss"] for validation in training["validations"]]
    assert end < 0.8 * start


def test_labels_of_some_samples_with_several_teachers_are_rejected():
    losses = {"logits": 1.0, "labels": 0.5}
    settings = DistillSettings(train_on="both", losses=losses)
    assert not Distill.check_rows(settings, "text-classification", {"unlabeled": TEXTS})
    with raises_setting_codes("settings-conflict"):
        DistillSettings(train_on="both", losses=losses, teacher=["a", "b"])


def test_embedder_trains_on_single_texts_and_pairs(tmp_path):
    pairs = Split("pairs", tuple(Example(t, text_pair=t[::-1], label=0.5) for t in tiny.SENTENCES))
    settings = DistillSettings.model_validate(
        SHORT | {"train_on": "both", "teacher": "big", "cache_logits": {}}
    )
    teacher = tiny.as_artifact(embedders.write_embedder(tmp_path / "big", seed=1), "sentence-similarity")
    data = {"train": pairs, "unlabeled": TEXTS}
    ctx = harness.run_stage(
        Distill(), settings, embedders.write_embedder(tmp_path / "m", seed=2), tmp_path / "o/out",
        "sentence-similarity", data=data, ancestors={"big": teacher},
    )  # fmt: skip
    assert ctx.details["training"]["rows"] == 2 * len(pairs) + len(TEXTS)
    assert ctx.details["cache_logits"]["rows_of_teacher"] == 2 * len(pairs) + len(TEXTS)


@pytest.mark.parametrize(("options", "task", "setting", "code", "value"), [
    ({"losses": {"labels": 0.5}, "train_on": "unlabeled"}, "text-classification", "losses.labels",
     "missing-labels", "0.5"),
    ({"losses": {"logits": 0}}, "text-classification", "losses.labels", "missing-labels", "{logits: 1.0}"),
    ({"losses": {"cosent": 1}}, "sentence-similarity", "losses.cosent", "missing-scores", "1"),
    ({"phases": [{"losses": {"logits": 1}}, {"losses": {"labels": 1, "logits": 0}}]}, "text-classification",
     "phases.1.losses.labels", "missing-labels", "1"),
    ({"losses": {"labels": 0}}, "translation", "train_on", "does-not-fit-task", "translation"),
])  # fmt: skip
def test_loss_needing_labels_is_rejected_before_training(options, task, setting, code, value):
    settings = DistillSettings.model_validate({"train_on": "both"} | options)
    errors = {error.setting: error for error in Distill.check_rows(settings, task, {"unlabeled": TEXTS})}
    assert errors[setting].code == code
    assert value in errors[setting].message


def test_required_splits_follow_train_on():
    settings = {"losses": {"labels": 0}}
    required_splits = {
        rows: Distill.needs_with(DistillSettings.model_validate(settings | {"train_on": rows}))
        for rows in ("labeled", "unlabeled", "both")
    }
    assert required_splits == {
        "labeled": {"train"}, "unlabeled": {"unlabeled"}, "both": {"train", "unlabeled"},
    }  # fmt: skip
