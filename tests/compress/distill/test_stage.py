"""Distillation of a tiny classifier: the objective, the student, the teachers that cannot teach."""

import dataclasses
import json

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

from smelt.compress.distill.objective import DistillObjective
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model
from smelt.training.extension import total_loss
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes

WORDS = ["good", "bad", "red", "blue", "dog", "cat"]


def classifier(folder, names=("neg", "pos"), seed=0):
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "model_max_length": 16})
    )
    config = BertConfig(
        vocab_size=11,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        initializer_range=0.3,
        id2label=dict(enumerate(names)),
        label2id={n: i for i, n in enumerate(names)},
    )
    torch.manual_seed(seed)
    BertForSequenceClassification(config).save_pretrained(folder)
    return artifact(folder)


def artifact(folder, kind="torch"):
    manifest = Manifest(
        key="0" * 64,
        format=kind,
        task="text-classification",
        stage="model",
        settings={},
        seed=0,
        parent=None,
        versions={},
    )
    return Artifact(folder, manifest)


def context(tmp_path, ancestors):
    # every label is the same: whatever else the student learns, it learns from the teacher
    rows = Split(
        "x", tuple(Example(f"{a} {b} {c}", label="pos") for a in WORDS for b in WORDS for c in WORDS)
    )
    out = tmp_path / "work" / "out"
    return harness.make_context(out, "text-classification", data={"train": rows}, seed=1, ancestors=ancestors)


def batch():
    ids = torch.tensor([[2, a, b, 3] for a in range(5, 11) for b in range(5, 11)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.ones(len(ids)).long()}


def test_objective_equals_formula(tmp_path):
    student, _ = load_model(classifier(tmp_path / "s", seed=1).path)
    teacher, _ = load_model(classifier(tmp_path / "t").path)
    settings = DistillSettings.model_validate({"temperature": 3.0, "losses": {"logits": 0.8, "labels": 0.3}})
    inputs = {k: v for k, v in batch().items() if k != "labels"}
    with torch.no_grad():
        zs, zt = student(**inputs).logits, teacher(**inputs).logits
        kl = F.kl_div((zs / 3).log_softmax(-1), (zt / 3).softmax(-1), reduction="batchmean")
        expected = 0.8 * 9 * kl + 0.3 * F.cross_entropy(zs, batch()["labels"])
    torch.testing.assert_close(
        total_loss(DistillObjective(teacher, settings)(student, batch())), expected, rtol=1e-5, atol=1e-6
    )


def test_thinner_student_approaches_teacher(tmp_path):
    source = classifier(tmp_path / "model")
    ctx = context(tmp_path, {"model": source})
    settings = DistillSettings.model_validate(
        {
            "student": {"layers": 2},
            "losses": {"logits": 1.0, "labels": 0.0},
            "max_steps": 60,
            "batch_size": 36,
            "learning_rate": 3e-3,
            "precision": "fp32",
            "dropout": 0.0,
        }
    )
    Distill()(source, settings, ctx)
    assert ctx.details["kept_layers"] == [0, 2]
    student, _ = load_model(ctx.out)
    teacher, _ = load_model(source.path)
    assert (len(student.bert.encoder.layer), student.config.num_hidden_layers) == (2, 2)
    untrained, _ = load_model(source.path)
    del untrained.bert.encoder.layer[1]

    def distance(model):
        with torch.no_grad():
            return float(total_loss(DistillObjective(teacher, settings)(model, batch())))

    assert distance(student) < 0.2 * distance(untrained)


@pytest.mark.parametrize(("losses", "setting", "dropout"), [
    ({"logits": 1.0, "labels": 0.0}, None, 0.0),
    ({"logits": 0.0, "reverse_kl": 1.0, "labels": 0.0}, None, 0.0),
    ({"logits": 1.0, "labels": 0.0}, 0.1, 0.1), ({"logits": 1.0, "labels": 0.5}, None, None),
    ({"logits": 1.0, "labels": 0.0, "hidden_states": 1.0}, None, None),
])  # fmt: skip
def test_logits_only_distillation_disables_dropout(tmp_path, losses, setting, dropout):
    """A model that is taught by itself has nothing to learn, and learns noise where there is dropout."""
    source = classifier(tmp_path / "model")
    ctx = context(tmp_path, {"model": source})
    # so low a rate: AdamW makes steps of their full size of gradients that are rounding alone
    short = {"max_steps": 4, "batch_size": 36, "learning_rate": 1e-9, "precision": "fp32", "num_evals": 0}
    Distill()(source, DistillSettings.model_validate(short | {"losses": losses, "dropout": setting}), ctx)
    details = ctx.details["training"]
    assert details.get("dropout") == dropout
    part = "reverse_kl" if "reverse_kl" in losses else "logits"
    loss = details["train_losses"][part] if "train_losses" in details else details["train_loss"]
    assert (loss < 1e-6) == (dropout == 0)


def test_each_phase_has_dropout_of_its_losses(tmp_path):
    source = classifier(tmp_path / "model")
    ctx = context(tmp_path, {"model": source})
    phases = [{"losses": {"hidden_states": 1.0}}, {"losses": {"logits": 1.0}}]
    short = {"max_steps": 2, "batch_size": 36, "learning_rate": 1e-3, "precision": "fp32", "num_evals": 0}
    Distill()(source, DistillSettings.model_validate(short | {"phases": phases}), ctx)
    assert [phase.get("dropout") for phase in ctx.details["phases"]] == [None, 0.0]


def test_unknown_teacher_is_rejected_with_step_names(tmp_path):
    source = classifier(tmp_path / "model")
    ctx = context(tmp_path, {"model": source, "prune": source})
    with raises_code("unknown-step", InputError) as caught:
        Distill()(source, DistillSettings(teacher="prun"), ctx)
    assert caught.value.setting == "teacher"
    assert all(step in str(caught.value) for step in ("'prun'", "model, prune", "'prune'"))


@pytest.mark.parametrize(("fact", "what"), [("new_head", "classifier"), ("untrained", "weights")])
def test_untrained_teacher_is_rejected_and_trained_one_suggested(tmp_path, fact, what):
    source = classifier(tmp_path / "model")
    source.manifest.details[fact] = True
    with raises_code("untrained-teacher", InputError) as caught:
        Distill()(source, DistillSettings(), context(tmp_path / "a", {"model": source}))
    assert what in str(caught.value)
    tuned = artifact(source.path)
    tuned = Artifact(source.path, tuned.manifest.model_copy(update={"stage": "finetune"}))
    ancestors = {"model": source, "pruned": artifact(source.path), "tuned": tuned}
    with raises_code("untrained-teacher", InputError) as caught:
        Distill()(tuned, DistillSettings(), context(tmp_path / "b", ancestors))
    assert "teacher: tuned" in str(caught.value)
    settings = DistillSettings(teacher="tuned", max_steps=1, precision="fp32")
    Distill()(tuned, settings, context(tmp_path / "c", ancestors))


def test_onnx_teacher_is_rejected(tmp_path):
    source = classifier(tmp_path / "model")
    ctx = context(tmp_path, {"model": artifact(source.path, "onnx")})
    with raises_code("wrong-format", InputError) as caught:
        Distill()(source, DistillSettings(), ctx)
    assert "onnx" in str(caught.value)


@pytest.mark.parametrize("names", [("a", "b", "c"), ("LABEL_0", "LABEL_1"), ("0", "1")])
def test_teacher_with_different_labels_is_rejected(tmp_path, names):
    source = classifier(tmp_path / "model")
    ctx = context(tmp_path, {"model": classifier(tmp_path / "other", names=names)})
    with raises_code("labels-mismatch", InputError):
        Distill()(source, DistillSettings(), ctx)


def test_teacher_without_label_names_teaches_student_of_numbers(tmp_path):
    """A student whose labels are read from samples 0 and 1, a teacher as transformers saves it."""
    source = classifier(tmp_path / "model", names=("0", "1"))
    ctx = context(tmp_path, {"model": classifier(tmp_path / "other", names=("LABEL_0", "LABEL_1"))})
    rows = Split("x", tuple(Example(f"{name} bad", label=i % 2) for i, name in enumerate(WORDS)))
    ctx = dataclasses.replace(ctx, data={"train": rows})
    Distill()(source, DistillSettings(max_steps=1), ctx)
    assert ctx.details["training"]["steps"] == 1


@pytest.mark.parametrize(("wrong", "code"), [
    ({"losses": {"logits": 0, "labels": 0}}, "no-loss"), ({"student": {"layers": 0}}, "nothing-kept"),
    ({"student": {"layers": []}}, "nothing-kept"),
])  # fmt: skip
def test_invalid_distill_settings_are_rejected(wrong, code):
    with raises_setting_codes(code):
        DistillSettings.model_validate(wrong)
