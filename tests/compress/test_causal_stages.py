"""Every torch stage on every decoder-only family: its loss, and save, load, same outputs."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.tasks.encode_split import encode_split
from smelt.tasks.read_split import read_split
from smelt.tasks.samples import collate
from smelt.training.losses import label_objective
from tests.support import harness
from tests.support.models import causal, every_family, tiny


@pytest.fixture(scope="module", params=["gpt2", "llama", "opt"])
def folder(request, tmp_path_factory):
    make = causal.write_model if request.param in causal.FAMILIES else every_family.write_model
    folder = make(tmp_path_factory.mktemp(request.param), request.param)
    causal.write_lines(folder / "t.txt", 2)
    return folder


@pytest.fixture
def ctx(folder, tmp_path):
    split = read_split("t.txt", "language-modeling", Columns(), folder)
    source = tiny.as_artifact(folder, "language-modeling")
    return harness.make_context(tmp_path / "out", source.manifest.task, split, ancestors={"model": source})


def _round_trip(stage, settings, ctx):
    """Run a stage; compare what it held in memory with what a load gives."""
    with harness.saved_models(harness.logits) as saved_logits:
        stage(ctx.ancestors["model"], settings, ctx)
    model, edits = load_model(ctx.out)
    torch.testing.assert_close(harness.logits(model), saved_logits[0], atol=1e-6, rtol=1e-6)
    return model, edits


def test_causal_loss_equals_transformers(folder, ctx):
    model, _ = load_model(folder)
    rows = encode_split(ctx.data["train"], model.config, load_tokenizer(folder), ctx, max_length=20)
    assert {len(row.input_ids) for row in rows[:-1]} == {21}
    batch = collate(rows[:3], model.config)
    ids = torch.tensor([row.input_ids for row in rows[:3]])
    expected = AutoModelForCausalLM.from_pretrained(folder).eval()(ids, labels=ids).loss
    torch.testing.assert_close(label_objective()(model.eval(), batch), expected)
    ragged = collate([rows[0], rows[-1]], model.config)
    short = len(rows[-1].input_ids) - 1
    assert ragged["attention_mask"].sum(dim=1).tolist() == [20, short]
    assert (ragged["labels"][1, short:] == -100).all()


def test_finetuned_model_has_lower_loss_after_reload(folder, ctx):
    settings = FinetuneSettings(max_steps=6, batch_size=8, learning_rate=3e-3, num_evals=1, precision="fp32")
    model, edits = _round_trip(Finetune(), settings, ctx)
    assert edits == []
    AutoModelForCausalLM.from_pretrained(ctx.out)  # what training alone changes needs nothing of smelt
    rows = encode_split(ctx.data["train"], model.config, load_tokenizer(folder), ctx)
    batch = collate(rows[:4], model.config)
    before, _ = load_model(folder)
    with torch.no_grad():
        assert label_objective()(model, batch) < label_objective()(before, batch) - 0.1
