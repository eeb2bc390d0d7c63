"""Masks of whole attentions and feed-forward parts, against CoFi's equation and the parts that really go."""

import math

import pytest
import torch

from smelt.compress.finetune import Finetune, FinetuneSettings, check_training, provided_by_training
from smelt.compress.prune.learned_masks import LearnedMasks
from smelt.compress.prune.settings import LearnedMasksSettings
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model, save_model
from smelt.models.families.registry import FAMILIES
from smelt.models.layers import skip_sublayer
from tests.support import harness, usability_checks
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family, tiny
from tests.support.models.every_family import SEPARATE_BLOCKS

KINDS = ("attention", "cross-attention", "ffn")


def kinds_of(family):
    return KINDS if FAMILIES[family].architecture == "seq2seq" else KINDS[::2]


def masks_of(family, **settings):
    model, edits = load_model(every_family.model_with_layers(family, 3))
    options = {"multiple_of": 1, "parts": kinds_of(family)} | settings
    masks = LearnedMasks(model, LearnedMasksSettings(**options), edits)
    torch.manual_seed(0)
    with torch.no_grad():
        for log_alpha in [*masks.units.values(), *masks.parts.values()]:
            log_alpha.copy_(torch.randn(len(log_alpha)) * 4)
    return masks, model, edits


def close(masks, *removed):
    """Close the parts of these names (`encoder_layers 0 attention`), and leave all others half open."""
    with torch.no_grad():
        for number, log_alpha in masks.parts.items():
            (position,) = masks.masked[int(number)].positions
            log_alpha.fill_(-3.0 if f"{position.stack} {position.name}" in removed else 0.5)


def cdf_qz(x, loga):
    """The reference code (CoFiPruning, models/l0_module.py), as it stands there."""
    xn = (x - -0.1) / (1.1 - -0.1)
    logits = math.log(xn) - math.log(1 - xn)
    return torch.sigmoid(logits * (2.0 / 3.0) - loga).clamp(min=1e-6, max=1 - 1e-6)


def test_expected_number_of_parts_of_each_kind_is_kept():
    """The count of _deterministic_z of l0_module.py, over the layers: size - round(size - sum(1 - cdf))."""
    masks, _, _ = masks_of("llama")
    alphas = {"attention": (-1.0, 3.0, -0.4), "ffn": (-1.5, -1.6, -1.4)}
    with torch.no_grad():
        for number, log_alpha in masks.parts.items():
            (position,) = masks.masked[int(number)].positions
            log_alpha.fill_(alphas[position.kind][position.block.index])
    counts = {}
    for kind, values in alphas.items():
        expected_num_zeros = 3 - float((1 - cdf_qz(0, torch.tensor(values))).sum())
        counts[kind] = 3 - round(expected_num_zeros)
    assert counts == {"attention": 2, "ffn": 2}
    names = [masked.positions[0].name for masked in masks.masked]
    removed_parts = {name for name, is_kept in zip(names, masks.kept_parts(), strict=True) if not is_kept}
    assert removed_parts == {"0 attention", "1 ffn"}


@pytest.mark.parametrize("family", [name for name in SEPARATE_BLOCKS if name != "mixtral"])  # refused
def test_removed_parts_compute_masked_outputs(family, tmp_path):
    masks, model, edits = masks_of(family)
    assert not all(masks.kept_parts())
    with masks._masked_training():
        masked = harness.logits(model)
        with masks.as_stored():
            weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    plain, _ = load_model(every_family.model_with_layers(family, 3))
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    plain.load_state_dict(weights, strict=False)
    near = {"rtol": 1e-4, "atol": 1e-4 * float(masked.abs().max())}
    torch.testing.assert_close(harness.logits(plain), masked, **near)
    keep_ratio, source = masks.final_keep_ratio(), every_family.model_with_layers(family, 3)
    ctx = harness.make_context(tmp_path / "out")
    masks.finalize(ctx)
    torch.testing.assert_close(harness.logits(model), masked, **near)
    details = ctx.details["learned_masks"]
    num_dropped = sum(map(len, details["dropped_parts"].values()))
    assert num_dropped == masks.kept_parts().count(False) == sum(edit["op"] == "skip" for edit in edits)
    assert details["kept"] == pytest.approx(keep_ratio, abs=1e-4)
    save_model(model, edits, tmp_path / "out", source)
    reloaded, _ = load_model(tmp_path / "out")
    torch.testing.assert_close(harness.logits(reloaded), masked, **near)


def test_closed_part_masks_skip_their_sublayers():
    masks, model, edits = masks_of("t5", targets=[], parts=["attention", "cross-attention"])
    assert not masks.units
    close(masks, "encoder_layers 0 attention", "decoder_layers 2 cross-attention")
    with torch.no_grad():
        for log_alpha in masks.parts.values():
            if float(log_alpha) > 0:
                log_alpha.fill_(50.0)  # 1 to the last bit
    keep_ratio = 1 - 2 / 9  # attentions are equally large
    assert masks.final_keep_ratio() == pytest.approx(keep_ratio)
    plain, _ = load_model(every_family.model_with_layers("t5", 3))
    for block_path, number in (("encoder.block.0", 0), ("decoder.block.2", 1)):
        skip_sublayer(plain, block_path, number)
    masks.finalize(harness.make_context(every_family.model_with_layers("t5", 3)))
    assert torch.equal(harness.logits(model), harness.logits(plain))
    assert [edit["op"] for edit in edits] == ["skip", "skip"]


def test_one_part_of_each_kind_is_kept_per_stack(tmp_path):
    masks, model, _ = masks_of("t5")
    with torch.no_grad():
        for number, log_alpha in masks.parts.items():
            log_alpha.fill_(-9.0 + 0.01 * int(number))
    ctx = harness.make_context(tmp_path / "out")
    masks.finalize(ctx)
    dropped_parts = ctx.details["learned_masks"]["dropped_parts"]
    assert {stack: len(parts) for stack, parts in dropped_parts.items()} == {
        "encoder_layers": 4,
        "decoder_layers": 6,
    }
    assert not any(
        name.startswith("2 ") for parts in dropped_parts.values() for name in parts
    )  # the largest alphas
    assert torch.isfinite(harness.logits(model)).all()


def test_part_masks_are_sampled_only_in_training():
    masks, model, _ = masks_of("llama")
    close(masks)
    inputs = torch.randint(5, 20, (2, 9))
    with masks._masked_training():
        assert torch.equal(harness.logits(model), harness.logits(model))
        model.train()
        torch.manual_seed(0)
        first, other = (model(inputs).logits for _ in range(2))
        assert not torch.equal(first, other)
        first.square().sum().backward()
        assert any(float(log_alpha.grad.abs()) > 0 for log_alpha in masks.parts.values())


def test_checkpoint_above_budget_after_rounding_is_not_best():
    masks, _, _ = masks_of("llama", targets=[], keep_ratio=0.6, warmup=0.1)
    with torch.no_grad():
        for log_alpha in masks.parts.values():
            log_alpha.fill_(-1.4)  # open with a chance of 0.55: of three 1.65, and so two
    masks._before_step(50, 100)
    assert (
        float(masks.expected_keep_ratio().detach()) < 0.6 < masks.final_keep_ratio() == pytest.approx(2 / 3)
    )
    assert not masks._may_be_best(50)
    close(masks, "layers 0 attention", "layers 1 attention", "layers 0 ffn", "layers 2 ffn")
    assert masks.final_keep_ratio() < 0.6
    assert masks._may_be_best(50)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    home = tmp_path_factory.mktemp("rows")
    return tiny.read_pairs(home)


def test_part_training_reaches_budget(rows, tmp_path):
    source = every_family.model_with_layers("marian", 3)
    settings = FinetuneSettings(
        max_steps=120,
        batch_size=4,
        learning_rate=3e-3,
        precision="fp32",
        num_evals=4,
        learned_masks={
            "keep_ratio": 0.5,
            "warmup": 0.8,
            "learning_rate": 0.2,
            "multiple_of": 4,
            "parts": KINDS,
        },
    )
    ctx = harness.run_stage(Finetune(), settings, source, tmp_path / "out", data=rows)
    details = ctx.details["learned_masks"]
    assert details["kept"] == pytest.approx(0.5, abs=0.06)
    assert not {"more-kept-than-asked", "fewer-kept-than-asked"} & set(message_codes(ctx.warnings))
    assert ctx.details["training"]["kept_step"] >= 96
    assert any(details["dropped_parts"].values())
    retrain_settings = FinetuneSettings(max_steps=1, batch_size=4, precision="fp32", num_evals=1)
    later = harness.run_stage(Finetune(), retrain_settings, ctx.out, tmp_path / "again", data=rows)
    recorded = {v["step"]: v["loss"] for v in ctx.details["training"]["validations"]}
    best_loss = recorded[ctx.details["training"]["kept_step"]]
    assert later.details["training"]["validations"][0]["loss"] == pytest.approx(best_loss, rel=1e-3)


@pytest.mark.parametrize("family", ["t5"])
def test_model_without_parts_can_be_exported(family, tmp_path):
    masks, model, edits = masks_of(family)
    source, out = every_family.model_with_layers(family, 3), tmp_path / "cut"
    masks.finalize(harness.make_context(out))
    save_model(model, edits, out, source)
    usability_checks.check_export(out, family, tmp_path / "graphs")


def test_invalid_part_mask_settings_are_rejected():
    with raises_setting_codes("missing-setting"):
        LearnedMasksSettings(targets=[])
    settings = FinetuneSettings(learned_masks={"targets": [], "parts": ["cross-attention"]})
    errors = check_training(settings, {"model_type": "llama"})
    assert [(error.setting, error.code) for error in errors] == [("learned_masks.parts", "unknown-part")]
    assert check_training(settings, {"model_type": "marian"}) == []
    with raises_code("unknown-part", InputError) as caught:
        masks_of("llama", parts=["cross-attention"])
    assert caught.value.setting == "learned_masks.parts"
    assert provided_by_training(settings) == {"training", "parts"}
    assert provided_by_training(FinetuneSettings(learned_masks={})) == {"training", "widths"}
