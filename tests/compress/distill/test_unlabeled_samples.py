"""A student learns on texts of which the teacher alone says what they are."""

import pytest

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.data.splits import Example, Split
from tests.support import harness
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
    ({"losses": {"labels": 0.5}}, "text-classification", "losses.labels", "missing-labels", "0.5"),
    ({"losses": {"logits": 0}}, "text-classification", "losses.labels", "missing-labels", "{logits: 1.0}"),
    ({"losses": {"cosent": 1}}, "sentence-similarity", "losses.cosent", "missing-scores", "1"),
    ({"phases": [{"losses": {"logits": 1}}, {"losses": {"labels": 1}}]}, "text-classification",
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
