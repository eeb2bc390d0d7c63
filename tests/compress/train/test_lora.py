"""Adapters: what trains, what is stored, and where there can be none."""

import causal
import every_family
import harness
import pytest
import tiny
import torch

from smelt.compress.distill.logits import Distill
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.compress.share.layers import Share, ShareSettings
from smelt.compress.train import lora
from smelt.compress.train.lora import Adapters, targets_of
from smelt.compress.train.settings import LoraSettings
from smelt.core.data import Columns, read_split
from smelt.core.errors import InputError, MissingDependencyError
from smelt.families.registry import FAMILIES
from smelt.runtime.models.checkpoint import load_model

pytest.importorskip("peft", reason="peft (the extra lora) is not installed")
SHORT = {"max_steps": 15, "batch_size": 4, "learning_rate": 1e-2, "precision": "fp32", "lora": {"rank": 2}}


def changed(before, after):
    """Which parameters are others, by name, and the rank of what was added to each matrix."""
    old, found = dict(before.named_parameters()), {}
    for name, parameter in after.named_parameters():
        difference = (parameter - old[name]).detach()
        if float(difference.abs().max()) > 0:
            matrix = difference.dim() == 2
            found[name] = int(torch.linalg.matrix_rank(difference.double(), rtol=1e-4)) if matrix else None
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_family_the_blocks_products_have_adapters_that_begin_with_nothing(family):
    model, _ = load_model(every_family.of_layers(family, 2))
    names, before = [name for name, _ in model.named_parameters()], harness.logits(model)
    adapters = Adapters(model, LoraSettings(rank=2))
    assert torch.equal(harness.logits(model), before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    heads = ("classifier", "head", "pre_classifier", "bert.pooler")
    assert all("lora_" in name or name.startswith(heads) for name in trained)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    apart = harness.logits(model)
    assert not torch.allclose(apart, before, atol=1e-3)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with adapters.stored():
        torch.testing.assert_close(harness.logits(model), apart, rtol=1e-3, atol=1e-3)
        assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
    adapters.settle()
    torch.testing.assert_close(harness.logits(model), apart, rtol=1e-3, atol=1e-3)
    assert [name for name, _ in model.named_parameters()] == names
    assert not hasattr(model, "peft_config")


@pytest.fixture
def rows(tmp_path):
    return read_split(str(tiny.pairs(tmp_path / "rows.jsonl")), "translation", Columns(), tmp_path)


def test_only_products_change_and_by_no_more_than_the_rank(tmp_path, rows):
    source = tiny.marian(tmp_path / "model")
    ctx = harness.run(Finetune(), FinetuneSettings(**SHORT), source, tmp_path / "out", data=rows)
    ranks = changed(load_model(source)[0], harness.model_of(ctx))
    assert len(ranks) == 2 * 6 + 2 * 10  # four products of each attention, two of each feed-forward part
    assert set(ranks.values()) == {2}
    facts = ctx.facts["lora"]
    assert facts["layers"] == 32
    assert facts["optimizer_bytes"] == 12 * facts["trained_weights"] < facts["optimizer_bytes_of_all_weights"]
    start, *later = [found["loss"] for found in ctx.facts["training"]["validations"]]
    assert min(later) < 0.9 * start


def test_adapters_that_save_nothing_are_warned_of(tmp_path):
    model, _ = load_model(tiny.bert(tmp_path / "model"))  # products of 32 x 32, and 32 x 64
    assert Adapters(model, LoraSettings(rank=15)).warnings() == []
    again, _ = load_model(tmp_path / "model")
    (said,) = Adapters(again, LoraSettings(rank=16)).warnings()
    assert "rank 16 gives 8 of 12 layers adapters that have no fewer weights than they (" in said
    assert said.endswith("; below 16 every adapter is smaller than its layer")


def test_a_checkpoint_is_scored_as_it_is_stored(tmp_path, rows):
    seen = []

    def score(artifact, split):
        model, _ = load_model(artifact.path)
        seen.append(set(dict(model.named_parameters())))
        return {"bleu": float(len(seen))}

    source = tiny.marian(tmp_path / "model")
    settings = FinetuneSettings(**(SHORT | {"select": "bleu", "evals": 2, "max_steps": 2}))
    ctx = harness.run(Finetune(), settings, source, tmp_path / "out", data=rows, score=score)
    names = set(dict(load_model(source)[0].named_parameters()))
    assert seen == [names] * 3
    assert ctx.facts["training"]["kept_step"] == 2


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (Share(), ShareSettings(what=["ffn"])),
        (Factorize(), FactorizeSettings(method="svd", aim="size", rank=6)),
    ],
)
def test_what_was_shared_stays_shared_and_pairs_stay_pairs(tmp_path, rows, stage, settings):
    before = harness.run(stage, settings, tiny.marian(tmp_path / "model"), tmp_path / "a", data=rows)
    ctx = harness.run(
        Distill(), DistillSettings(**SHORT), before.out, tmp_path / "b", data=rows,
        ancestors={"model": tiny.artifact(tmp_path / "model")},
    )  # fmt: skip
    one, other = load_model(before.out)[0], load_model(ctx.out)[0]
    assert [n for n, _ in one.named_parameters()] == [n for n, _ in other.named_parameters()]
    assert changed(one, other)
    assert set(changed(one, other).values()) == {2}


def test_a_layer_in_two_places_has_one_adapter(tmp_path, rows):
    made = harness.run(Share(), ShareSettings(what=["ffn"]), tiny.marian(tmp_path / "model"), tmp_path / "a")
    model = harness.model_of(made)
    one, other = (f"model.encoder.layers.{n}.fc1" for n in (0, 1))
    assert model.get_submodule(one) is model.get_submodule(other)
    adapters = Adapters(model, LoraSettings(rank=2))
    assert hasattr(model.get_submodule(one), "lora_A")
    assert model.get_submodule(one) is model.get_submodule(other)
    with adapters.stored():
        assert not hasattr(model.get_submodule(other), "lora_A")
        assert model.get_submodule(one) is model.get_submodule(other)


def test_the_head_of_a_classifier_trains_too(tmp_path):
    rows = read_split(str(tiny.labelled(tmp_path / "r.jsonl")), "text-classification", Columns(), tmp_path)
    source = tiny.bert(tmp_path / "model")
    settings = FinetuneSettings(**(SHORT | {"lora": {"rank": 1, "targets": ["attention"]}}))
    ctx = harness.run(Finetune(), settings, source, tmp_path / "out", "text-classification", rows)
    found = changed(load_model(source)[0], harness.model_of(ctx))
    assert {"classifier.weight", "classifier.bias"} < set(found)
    assert not [name for name in found if "intermediate" in name]
    assert found["bert.encoder.layer.0.attention.self.query.weight"] == 1


def test_integer_codes_and_unknown_models_have_no_adapters(tmp_path, rows):
    source = tiny.marian(tmp_path / "model")
    quantized = harness.run(Quantize(), QuantizeSettings(), source, tmp_path / "q", data=rows).out
    with pytest.raises(InputError, match=r"lora: '.*' is a LatentLinear: adapters beside integer codes"):
        harness.run(Finetune(), FinetuneSettings(**SHORT), quantized, tmp_path / "out", data=rows)
    model, _ = load_model(causal.model(tmp_path / "gpt2", "gpt2"))
    model.config.model_type = "strange"
    with pytest.raises(InputError, match="smelt does not know the layers of a strange model"):
        targets_of(model, ["attention"])


@pytest.mark.parametrize(("found", "words"), [("0.17.9", "0.17.9 is installed"), (None, "not installed")])
def test_an_older_peft_is_named(monkeypatch, found, words):
    def version(name):
        if found is None:
            raise lora.PackageNotFoundError
        return found

    monkeypatch.setattr(lora, "version", version)
    with pytest.raises(MissingDependencyError, match=words):
        lora.require_peft()
