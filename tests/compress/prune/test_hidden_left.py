"""What the mask of the hidden width leaves: the model that is really narrower computes what masks did."""

import json

import pytest
import torch
import transformers

from smelt.compress.distill.stage import Distill, DistillSettings
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings, provided_by_training
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model, save_model
from smelt.models.families.registry import FAMILIES
from smelt.models.hidden_width import hidden_width
from smelt.tasks.read_split import read_split
from tests.support import harness, usability_checks
from tests.support.expected_errors import raises_code
from tests.support.models import causal, embedders, every_family, images, learned_mask_models, seq2seq, tiny
from tests.support.models.every_family import SEPARATE_BLOCKS


def agrees(masks, model, edits, source, out, outputs):
    """Compare what a model computes with masks, stored while they are there, and when they have settled."""
    with masks._masked_training():
        masked = outputs(model)
    near = {"rtol": 1e-4, "atol": 1e-4 * float(masked.abs().max())}
    assert not torch.allclose(outputs(model), masked, atol=1e-2 * float(masked.abs().max()))
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    edits_before = list(edits)
    (out / "meanwhile").mkdir(parents=True)
    with masks.as_stored():
        torch.testing.assert_close(outputs(model), masked, **near)
        save_model(model, edits, out / "meanwhile", source)
    after = dict(model.named_parameters())
    assert all(after[name] is p and torch.equal(p, value) for name, (p, value) in before.items())
    assert edits == edits_before
    with masks._masked_training():
        assert torch.equal(outputs(model), masked)
    ctx = harness.make_context(out)
    masks.finalize(ctx)
    assert (
        ctx.details["learned_masks"]["width_after"]
        == hidden_width(model)
        < ctx.details["learned_masks"]["width_before"]
    )
    (out / "cut").mkdir()
    save_model(model, edits, out / "cut", source)
    for folder in ("meanwhile", "cut"):
        reloaded, _ = load_model(out / folder)
        torch.testing.assert_close(outputs(reloaded), masked, **near)
    return ctx


@pytest.mark.parametrize("family", [name for name in SEPARATE_BLOCKS if name != "mixtral"])  # refused
def test_pruned_width_computes_masked_outputs(family, tmp_path):
    masks, model, edits = learned_mask_models.masks_of_family(family, parts=("attention", "ffn"))
    values = masks.hidden.final_mask()
    assert int(((values > 0) & (values < 1)).sum()) > 4
    source = every_family.model_with_layers(family, 2)
    ctx = agrees(masks, model, edits, source, tmp_path / "out", harness.logits)
    assert any(edit["op"] == "skip" for edit in edits) or FAMILIES[family].architecture == "seq2seq"
    assert ctx.details["learned_masks"]["width_after"] % 8 == 0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "t5", "gpt2"])
def test_width_mask_supports_tied_and_untied_output_layers(family, tied, tmp_path):
    if family == "t5":
        source = seq2seq.write_t5(tmp_path / "model", gated=not tied)
    else:
        source = causal.write_model(tmp_path / "model", family=family, tie_word_embeddings=tied)
    masks, model, edits = learned_mask_models.masks_of_model(source)
    head = model.get_output_embeddings()
    assert (head.weight is model.get_input_embeddings().weight) == tied
    assert list(masks.hidden._tied_outputs()) == ([head] if tied else [])
    agrees(masks, model, edits, source, tmp_path / "out", harness.logits)


@pytest.mark.parametrize("divided", [False, True])
def test_width_mask_applies_to_image_patches(divided, tmp_path):
    source = images.write_model(tmp_path / "model")
    if divided:
        thin = FactorizeSettings(method="tucker", keep_ratio=0.5)
        shown = images.read_rows(images.write_rows(tmp_path / "rows.jsonl"))
        source = harness.run_stage(Factorize(), thin, source, tmp_path / "thin", images.TASK, shown).out
    masks, model, edits = learned_mask_models.masks_of_model(source)
    pixels = torch.randn(2, 3, *[model.config.image_size] * 2)

    def outputs(model):
        with torch.no_grad():
            return model(pixels).logits

    agrees(masks, model, edits, source, tmp_path / "out", outputs)


def test_low_rank_and_shared_layers_are_masked_once(tmp_path):
    source = every_family.model_with_layers("marian", 2)
    shared = every_family.run_stage(
        ShareWeights(), ShareWeightsSettings(groups=1), source, "marian", tmp_path / "shared"
    ).out
    thin = every_family.run_stage(
        Factorize(), FactorizeSettings(targets=["embeddings"], rank=12), shared, "marian", tmp_path / "thin"
    ).out
    pairs = every_family.run_stage(
        Factorize(), FactorizeSettings(optimize_for="size", rank=6), thin, "marian", tmp_path / "pairs"
    ).out
    masks, model, edits = learned_mask_models.masks_of_model(pairs)
    assert model.model.encoder.layers[0].fc1 is model.model.encoder.layers[1].fc1
    agrees(masks, model, edits, pairs, tmp_path / "out", harness.logits)


def test_config_stores_width_when_family_allows(tmp_path):
    masks, model, edits = learned_mask_models.masks_of_family("llama", targets=["width"])
    source = every_family.model_with_layers("llama", 2)
    masks.finalize(harness.make_context(tmp_path))
    save_model(model, edits, tmp_path, source)
    assert edits == []
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == hidden_width(model)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(harness.logits(plain), harness.logits(model))


def test_width_is_unchanged_when_no_channel_is_closed(tmp_path):
    masks, model, edits = learned_mask_models.masks_of_family("bert", targets=["width"])
    learned_mask_models.open_channels(masks, range(32))
    before = harness.logits(model)
    ctx = harness.make_context(tmp_path)
    masks.finalize(ctx)
    assert edits == []
    assert torch.equal(harness.logits(model), before)
    assert (ctx.details["learned_masks"]["width_before"], ctx.details["learned_masks"]["width_after"]) == (
        32,
        32,
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    home = tmp_path_factory.mktemp("rows")
    return tiny.read_pairs(home)


def test_width_training_reaches_budget(rows, tmp_path):
    source = tiny.write_marian(tmp_path / "model", num_layers=1)
    settings = FinetuneSettings(
        max_steps=120,
        batch_size=4,
        learning_rate=3e-3,
        precision="fp32",
        num_evals=4,
        learned_masks={
            "targets": learned_mask_models.MASK_TARGETS,
            "keep_ratio": 0.5,
            "warmup": 0.6,
            "learning_rate": 0.3,
            "multiple_of": 4,
        },
    )
    ctx = harness.run_stage(Finetune(), settings, source, tmp_path / "out", data=rows)
    details = ctx.details["learned_masks"]
    assert details["kept"] == pytest.approx(0.5, abs=0.06)
    assert not {"more-kept-than-asked", "fewer-kept-than-asked"} & set(message_codes(ctx.warnings))
    assert ctx.details["training"]["kept_step"] >= 90
    model = harness.load_output_model(ctx)
    assert hidden_width(model) == details["width_after"] < details["width_before"] == 32
    retrain_settings = FinetuneSettings(max_steps=1, batch_size=4, precision="fp32", num_evals=1)
    later = harness.run_stage(Finetune(), retrain_settings, ctx.out, tmp_path / "again", data=rows)
    recorded = {v["step"]: v["loss"] for v in ctx.details["training"]["validations"]}
    best_loss = recorded[ctx.details["training"]["kept_step"]]
    assert later.details["training"]["validations"][0]["loss"] == pytest.approx(best_loss, rel=1e-3)


@pytest.mark.parametrize("name", ["hidden_states"])
def test_masked_student_trains_with_hidden_state_loss(name, rows, tmp_path):
    settings = DistillSettings(
        max_steps=4,
        batch_size=4,
        precision="fp32",
        num_evals=0,
        losses={"logits": 1, "labels": 0.5, name: 1},
        learned_masks={"targets": ["width"], "learning_rate": 5, "warmup": 0.5},
    )
    source = every_family.model_with_layers("marian", 2)
    ctx = harness.run_stage(Distill(), settings, source, tmp_path / "out", data=rows)
    assert ctx.details["learned_masks"]["width_after"] == hidden_width(harness.load_output_model(ctx)) < 32
    details = ctx.details["training"]["train_losses"]
    assert {f"{name}.encoder_layers", "logits", "budget"} <= details.keys()


@pytest.mark.parametrize("family", ["marian"])
def test_width_pruned_model_can_be_exported(family, tmp_path):
    masks, model, edits = learned_mask_models.masks_of_family(family)
    source, out = every_family.model_with_layers(family, 2), tmp_path / "cut"
    masks.finalize(harness.make_context(out))
    save_model(model, edits, out, source)
    usability_checks.check_export(out, family, tmp_path / "graphs")


@pytest.mark.parametrize(("stage", "settings"), [(Finetune, FinetuneSettings), (Distill, DistillSettings)])
def test_width_masks_are_rejected_for_embedders(stage, settings, tmp_path):
    width_settings = settings.model_validate({"learned_masks": {"targets": ["width"]}})
    errors = stage.check_rows(width_settings, "sentence-similarity", {})
    assert [(error.setting, error.code) for error in errors] == [("learned_masks.targets", "fixed-width")]
    assert "[heads, ffn]" in errors[0].message
    assert stage.check_rows(settings.model_validate({"learned_masks": {}}), "sentence-similarity", {}) == []
    assert stage.check_rows(width_settings, "text-classification", {}) == []
    source = embedders.write_embedder(tmp_path / "model")
    home = tmp_path / "rows"
    home.mkdir()
    data = read_split(str(embedders.write_rows(home / "rows.jsonl")), "sentence-similarity", Columns(), home)
    with raises_code("fixed-width", InputError) as caught:
        harness.run_stage(stage(), width_settings, source, tmp_path / "out", "sentence-similarity", data)
    assert caught.value.setting == "learned_masks.targets"


def test_width_only_masks_keep_layers_uniform():
    assert provided_by_training(FinetuneSettings(learned_masks={"targets": ["width"]})) == {"training"}
    assert provided_by_training(
        FinetuneSettings(learned_masks={"targets": learned_mask_models.MASK_TARGETS})
    ) == {
        "training",
        "widths",
    }
