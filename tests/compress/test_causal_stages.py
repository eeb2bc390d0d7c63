"""Every torch stage on every decoder-only family: its loss, and save, load, same outputs."""

import causal
import every_family
import harness
import pytest
import tiny
import torch
from expected_errors import raises_code
from transformers import AutoModelForCausalLM

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import InputError
from smelt.data.examples import read_split
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.models.families.model_blocks import blocks_of
from smelt.training.extension import label_objective
from smelt.training.samples import collate, encode_split

IDS = torch.randint(1, 290, (2, 11), generator=torch.Generator().manual_seed(0))


def _products(folder):
    """Linear layers of a block."""
    return {"gpt2": 4, "opt": 6}.get(folder.name[:-1], 7)


@pytest.fixture(scope="module", params=[*causal.FAMILIES, "opt"])
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
    with harness.saved_models(harness.logits) as kept:
        stage(ctx.ancestors["model"], settings, ctx)
    model, edits = load_model(ctx.out)
    torch.testing.assert_close(harness.logits(model), kept[0], atol=1e-6, rtol=1e-6)
    return model, edits


def test_loss_is_that_of_transformers_when_windows_are_a_batch(folder, ctx):
    model, _ = load_model(folder)
    rows = encode_split(ctx.data["train"], model.config, load_tokenizer(folder), ctx, max_length=20)
    assert {len(row.input_ids) for row in rows[:-1]} == {21}
    batch = collate(rows[:3], model.config)
    ids = torch.tensor([row.input_ids for row in rows[:3]])
    wanted = AutoModelForCausalLM.from_pretrained(folder).eval()(ids, labels=ids).loss
    torch.testing.assert_close(label_objective()(model.eval(), batch), wanted)
    ragged = collate([rows[0], rows[-1]], model.config)
    short = len(rows[-1].input_ids) - 1
    assert ragged["attention_mask"].sum(dim=1).tolist() == [20, short]
    assert (ragged["labels"][1, short:] == -100).all()


def test_finetuned_model_predicts_the_text_better_when_loaded_again(folder, ctx):
    settings = FinetuneSettings(max_steps=6, batch_size=8, learning_rate=3e-3, num_evals=1, precision="fp32")
    model, edits = _round_trip(Finetune(), settings, ctx)
    assert edits == []
    AutoModelForCausalLM.from_pretrained(ctx.out)  # what training alone changes needs nothing of smelt
    rows = encode_split(ctx.data["train"], model.config, load_tokenizer(folder), ctx)
    batch = collate(rows[:4], model.config)
    before, _ = load_model(folder)
    with torch.no_grad():
        assert label_objective()(model, batch) < label_objective()(before, batch) - 0.1


def test_student_keeps_the_layers_that_are_named(folder, ctx):
    settings = DistillSettings(
        student={"layers": [1]}, max_steps=1, batch_size=4, num_evals=0, learning_rate=1e-9, precision="fp32"
    )
    model, _ = _round_trip(Distill(), settings, ctx)
    whole, _ = load_model(folder)
    name = blocks_of(model)[0].stack.module_path
    layers, old = model.get_submodule(name), whole.get_submodule(name)
    assert len(layers) == 1
    first = next(p for n, p in layers[0].named_parameters() if p.dim() > 1)
    second = next(p for n, p in old[1].named_parameters() if p.dim() > 1)
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        model(IDS, use_cache=True)  # its cache counts one layer
    AutoModelForCausalLM.from_pretrained(ctx.out)


def test_teacher_is_refused_when_its_vocabulary_is_another(folder, ctx, tmp_path):
    other = causal.write_model(tmp_path / "other", "gpt2", vocab_size=310)
    ctx.ancestors["big"] = tiny.as_artifact(other, "language-modeling")
    with raises_code("vocabulary-mismatch", InputError) as caught:
        Distill()(ctx.ancestors["model"], DistillSettings(teacher="big"), ctx)
    assert "310" in str(caught.value)


def test_low_rank_model_is_the_same_when_loaded_again(folder, ctx):
    _, edits = _round_trip(
        Factorize(), FactorizeSettings(method="svd", optimize_for="size", keep_ratio=0.5), ctx
    )
    layers = 2 * _products(folder)
    assert sum(edit["op"] == "low_rank" for edit in edits) == layers


def test_int8_model_is_the_same_when_loaded_again(folder, ctx):
    model, edits = _round_trip(Quantize(), QuantizeSettings(scheme="int8-dynamic"), ctx)
    layers = 2 * _products(folder)
    assert sum(edit["op"] == "quantize" for edit in edits) == layers + 2  # and embedding, head
    tied = "llama" not in folder.name
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.matrix is words.matrix) == tied
    whole = harness.logits(load_model(folder)[0])
    assert (harness.logits(model) - whole).abs().mean() < 0.1 * whole.std()
