"""Training a tiny classifier and a tiny translator: what is kept, what is left behind, what stays fixed."""

import contextlib
import io
import math
import re
from dataclasses import replace

import pytest
import torch

from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.core.errors import InputError, RunError
from smelt.core.messages import warning
from smelt.data.splits import Columns, Example, Split
from smelt.evaluate.report.view import sort_warnings
from smelt.models.checkpoint import load_model
from smelt.tasks.read_split import read_split
from smelt.tasks.samples import EncodedSample
from smelt.training import trainer as training_loop
from smelt.training.losses import label_objective
from smelt.training.train import train
from smelt.training.trainer import run_training
from smelt.training.training_state import pick_precision
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import causal, tiny


def context(tmp_path, task, data, **more):
    out = tmp_path / "work" / "out"
    return harness.make_context(out, task, data=data, seed=1, **more)


@pytest.fixture
def classifier(tmp_path):
    labels = {"neg": 0, "pos": 1}
    folder = tiny.write_bert(tmp_path / "bert", id2label={i: n for n, i in labels.items()}, label2id=labels)
    return tiny.as_artifact(folder, "text-classification")


def sentiment(count):
    return Split(
        "x", tuple(Example(f"{w} dogs", label=y) for w, y in [("red", "pos"), ("old", "neg")] * count)
    )


def test_finetune_learns_labels_and_leaves_no_files(classifier, tmp_path):
    calls = []
    ctx = context(
        tmp_path,
        "text-classification",
        {"train": sentiment(16), "validation": sentiment(2)},
        progress=lambda done, total, note="": calls.append((done, total, note)),
    )
    settings = FinetuneSettings(max_steps=30, learning_rate=1e-2, batch_size=8, precision="fp32", dropout=0.0)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        Finetune()(classifier, settings, ctx)
    assert output.getvalue() == ""
    assert [p.name for p in ctx.out.parent.iterdir()] == ["out"]
    assert (calls[-1][:2], len(calls)) == ((30, 30), 30)
    assert calls[-1][2].startswith("loss ")
    assert ctx.details["training"]["validation_loss"] < 0.1 < math.log(2)
    model, _ = load_model(ctx.out)
    assert not model.training
    assert model.config.num_labels == 2


def test_marian_padding_row_and_positions_are_not_trained(tmp_path):
    translator = tiny.as_artifact(tiny.write_marian(tmp_path / "marian"))
    ctx = context(tmp_path, "translation", {"train": tiny.read_pairs(tmp_path)})
    before, _ = load_model(translator.path)
    pad = before.config.pad_token_id
    assert before.model.shared.weight[pad].abs().max() == 0
    Finetune()(translator, FinetuneSettings(max_steps=8, learning_rate=1e-2, precision="fp32"), ctx)
    after, _ = load_model(ctx.out)
    assert after.model.shared.weight[pad].abs().max() == 0
    assert (after.model.shared.weight - before.model.shared.weight).abs().amax(dim=1)[:pad].min() > 0
    positions = after.model.encoder.embed_positions.weight
    assert torch.equal(positions, before.model.encoder.embed_positions.weight)
    assert after.lm_head.weight.data_ptr() == after.model.shared.weight.data_ptr()


def test_harmful_training_keeps_initial_weights(classifier, tmp_path):
    # validation wants the opposite of the training rows, so every step makes it worse
    other = Split(
        "x", tuple(Example(e.text, label="neg" if e.label == "pos" else "pos") for e in sentiment(4).examples)
    )
    ctx = context(tmp_path, "text-classification", {"train": sentiment(16), "validation": other})
    settings = FinetuneSettings(
        max_steps=20, num_evals=4, learning_rate=3e-3, batch_size=8, precision="fp32", dropout=0.0
    )
    Finetune()(classifier, settings, ctx)
    assert ctx.details["training"]["kept_step"] == 0
    losses = [validation["loss"] for validation in ctx.details["training"]["validations"]]
    assert losses[0] == min(losses) < losses[-1]
    before, after = (load_model(folder)[0].state_dict() for folder in (classifier.path, ctx.out))
    assert all(torch.equal(before[name], after[name]) for name in before)
    (warning,) = ctx.warnings
    assert warning.code == "no-improvement"


def test_validation_samples_are_spread_over_file_and_seeded(classifier, tmp_path, monkeypatch):
    # a file that is sorted by its labels: the head of it holds one class only
    rows = [
        Example(f"{adjective} dogs", label=label)
        for adjective, label in [("red", "pos"), ("old", "neg")] * 50
    ]
    rows.sort(key=lambda e: e.label)
    validations = []
    monkeypatch.setattr(
        training_loop, "run_training", lambda model, rows, validation, **more: validations.append(validation)
    )
    for seed in (1, 1, 2):
        data = {"train": sentiment(2), "validation": Split("x", tuple(rows))}
        ctx = replace(context(tmp_path / str(len(validations)), "text-classification", data), seed=seed)
        train(load_model(classifier.path)[0], classifier, FinetuneSettings(max_validation_samples=10), ctx)
    assert [len(validation_rows) for validation_rows in validations] == [10, 10, 10]
    assert [sum(row.target for row in validation_rows) for validation_rows in validations] == [5, 5, 5]
    assert validations[0] == validations[1]


def test_language_model_validation_windows_cover_all_text(tmp_path, monkeypatch):
    text = causal.write_lines(tmp_path / "text.txt", 12)
    split = read_split(str(text), "language-modeling", Columns(), tmp_path)
    source = tiny.as_artifact(causal.write_model(tmp_path / "model", "gpt2"), "language-modeling")
    model, calls = load_model(source.path)[0], []
    monkeypatch.setattr(
        training_loop,
        "run_training",
        lambda model, rows, validation, **more: calls.append((rows, validation)),
    )
    ctx = context(tmp_path, "language-modeling", {"train": split, "validation": split})
    train(model, source, FinetuneSettings(max_validation_samples=3, max_length=16), ctx)
    ((windows, chosen),) = calls
    assert len(windows) > 100 > len(split)
    indices = [windows.index(row) for row in chosen]
    assert [3 * index // len(windows) for index in indices] == [0, 1, 2]


def test_moving_average_replaces_weights(classifier, tmp_path):
    model, _ = load_model(classifier.path)
    plain, _ = load_model(classifier.path)
    rows = [EncodedSample([2, 5, 3], None, 1), EncodedSample([2, 6, 3], None, 0)]
    for which, ema in ((model, 0.5), (plain, None)):
        ctx = context(tmp_path / str(ema), "text-classification", {})
        settings = FinetuneSettings(
            max_steps=2,
            lr_scheduler_type="constant",
            warmup_steps=0,
            precision="fp32",
            dropout=0.0,
            ema_decay=ema,
            batch_size=2,
        )
        run_training(which, rows, None, objective=label_objective(), settings=settings, ctx=ctx)
    first, _ = load_model(classifier.path)
    ctx = context(tmp_path / "one", "text-classification", {})
    settings = FinetuneSettings(
        max_steps=1, lr_scheduler_type="constant", warmup_steps=0, precision="fp32", dropout=0.0, batch_size=2
    )
    run_training(first, rows, None, objective=label_objective(), settings=settings, ctx=ctx)
    decay = min(0.5, 3 / 12)
    expected = decay * first.classifier.weight + (1 - decay) * plain.classifier.weight
    torch.testing.assert_close(model.classifier.weight, expected, rtol=1e-5, atol=1e-7)


def test_non_finite_loss_stops_training(classifier, tmp_path):
    model, _ = load_model(classifier.path)
    model.classifier.weight.data.fill_(float("nan"))
    ctx = context(tmp_path, "text-classification", {})
    with raises_code("non-finite-loss", RunError) as caught:
        run_training(
            model,
            [EncodedSample([2, 5, 3], None, 1)],
            None,
            objective=label_objective(),
            settings=FinetuneSettings(max_steps=3, precision="fp32"),
            ctx=ctx,
        )
    assert re.findall(r"\d+", str(caught.value))[:2] == ["1", "3"]
    assert not model.training
    assert [p.name for p in ctx.out.parent.iterdir()] == ["out"]


def test_dropout_and_attention_are_restored(classifier, tmp_path):
    model, _ = load_model(classifier.path)
    before = model.config._attn_implementation, model.bert.embeddings.dropout.p
    states = []

    def objective(m, batch):
        states.append((m.config._attn_implementation, m.bert.embeddings.dropout.p))
        return label_objective()(m, batch)

    settings = FinetuneSettings(max_steps=1, precision="fp32", dropout=0.33)
    run_training(
        model,
        [EncodedSample([2, 5, 3], None, 1)],
        None,
        objective=objective,
        settings=settings,
        ctx=context(tmp_path, "text-classification", {}),
    )
    assert states == [("eager", 0.33)]
    assert (model.config._attn_implementation, model.bert.embeddings.dropout.p) == before


def test_truncated_samples_are_counted(classifier, tmp_path):
    long = Split("x", (*sentiment(2).examples, Example("dogs " * 40, label="pos")))
    ctx = context(tmp_path, "text-classification", {"train": long})
    Finetune()(classifier, FinetuneSettings(max_steps=1, precision="fp32"), ctx)
    (message,) = ctx.warnings
    assert message.code == "truncated-texts"
    assert re.findall(r"\d+", message.message) == ["1", "5", "32"]
    other = warning("else", "else")
    assert sort_warnings([message, other]) == [other, message]  # a report knows this code


def test_auto_precision_without_bf16_uses_fp32(monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setattr("smelt.training.training_state.bf16_speedup", lambda: 0.0)
    assert pick_precision("auto", device) == "fp32"
    with raises_code("no-bf16", InputError) as caught:
        pick_precision("bf16", device)
    assert caught.value.setting == "precision"


@pytest.mark.parametrize(("gain", "auto"), [(0.6, "fp32"), (1.1, "fp32"), (1.8, "bf16")])
def test_auto_precision_uses_bf16_if_faster(monkeypatch, gain, auto):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr("smelt.training.training_state.bf16_speedup", lambda: gain)
    assert pick_precision("auto", torch.device("cpu")) == auto
    assert pick_precision("bf16", torch.device("cpu")) == "bf16"
