"""Masks that are learned: their distribution, the budget, and a cut that changes nothing any more."""

import pytest
import torch

from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.learned_masks import LearnedMasks
from smelt.compress.prune.masked_parts import INITIAL_LOG_ALPHA, open_probability
from smelt.compress.prune.settings import LearnedMasksSettings
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family, tiny


def masks_of(family, **settings):
    model, edits = load_model(every_family.model_with_layers(family, 2))
    masks = LearnedMasks(model, LearnedMasksSettings(multiple_of=1, **settings), edits)
    torch.manual_seed(0)
    with torch.no_grad():
        for log_alpha in masks.units.values():
            log_alpha.copy_(torch.randn(len(log_alpha)) * 4)
    return masks, model


def test_expected_keep_ratio_is_fraction_of_parameters():
    """BERT: a head of 8 has 3 x 8 rows of 32 with biases and 8 columns of 32; a neuron 32 + 1 and 32."""
    masks, model = masks_of("bert")
    config = model.config
    head = (
        config.hidden_size // config.num_attention_heads * (3 * (config.hidden_size + 1) + config.hidden_size)
    )
    neuron = 2 * config.hidden_size + 1
    assert {m.unit_parameters for m in masks.masked} == {head, neuron}
    with torch.no_grad():
        for log_alpha, cost in zip(
            masks.units.values(), [m.unit_parameters for m in masks.masked], strict=True
        ):
            log_alpha.fill_(50.0 if cost == head else -50.0)
    heads, neurons = config.num_attention_heads * head, config.intermediate_size * neuron
    assert float(masks.expected_keep_ratio().detach()) == pytest.approx(heads / (heads + neurons), abs=1e-6)


@pytest.mark.parametrize("family", ["llama"])
def test_pruned_units_compute_masked_outputs(family):
    masks, model = masks_of(family)
    with masks._masked_training():
        masked = harness.logits(model)
        with masks.as_stored():
            weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    num_parameters = sum(p.numel() for p in model.parameters())
    plain, _ = load_model(every_family.model_with_layers(family, 2))
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(harness.logits(plain), masked, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(harness.logits(model), masked, atol=1e-3)
    kept_counts = [len(masks.kept_units(number)) for number in range(len(masks.masked))]
    ctx = harness.make_context(every_family.model_with_layers(family, 2))
    masks.finalize(ctx)
    torch.testing.assert_close(harness.logits(model), masked, rtol=1e-4, atol=1e-4)
    assert list(ctx.details["learned_masks"]["units"].values()) == kept_counts
    assert sum(p.numel() for p in model.parameters()) < num_parameters


def test_expected_number_of_units_with_largest_alpha_is_kept():
    masks, _model = masks_of("bert")
    with torch.no_grad():
        masks.units["0"].copy_(torch.tensor([5.0, -9.0, 0.0, -1.6]))
    # 0.9986 + 0.0006 + 0.8318 + 0.4998: 2.33 of 4
    assert masks.kept_units(0).tolist() == [0, 2]
    assert masks.unit_mask(0).tolist() == pytest.approx([1.0, 0.0, 0.5, 0.0])
    masks.settings = LearnedMasksSettings(multiple_of=8)
    number = len(masks.masked) - 1
    assert len(masks.kept_units(number)) % 8 == 0
    with torch.no_grad():
        masks.units[str(number)].fill_(-50.0)
        masks.units["0"].fill_(-50.0)
    assert len(masks.kept_units(number)) == 8
    assert len(masks.kept_units(0)) == 1


def test_equal_final_widths_are_stored_in_config():
    masks, model = masks_of("bert", targets=["ffn"])
    masks.settings = LearnedMasksSettings(targets=["ffn"], multiple_of=8)
    with torch.no_grad():
        for log_alpha in masks.units.values():
            log_alpha.fill_(-50.0)
    masks.finalize(harness.make_context(every_family.model_with_layers("bert", 2)))
    assert model.config.intermediate_size == 8
    assert masks.edits == []


def test_best_checkpoint_requires_budget_or_last_step():
    masks, _ = masks_of("bert", keep_ratio=0.5, warmup=0.5)
    with torch.no_grad():
        for log_alpha in masks.units.values():
            log_alpha.fill_(INITIAL_LOG_ALPHA)
    may_be_best = []
    for step in (1, 49, 50, 99, 100):
        masks._before_step(step, 100)
        may_be_best.append(masks._may_be_best(step))
    assert may_be_best == [False, False, False, False, True]
    assert not masks._may_be_best(0)
    with torch.no_grad():
        for log_alpha in masks.units.values():
            log_alpha.fill_(-1.7)  # open with a chance of 0.47
    may_be_best = []
    for step in (1, 49, 50, 99):
        masks._before_step(step, 100)
        may_be_best.append(masks._may_be_best(step))
    assert may_be_best == [False, False, True, True]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    home = tmp_path_factory.mktemp("rows")
    return tiny.read_pairs(home)


def test_multipliers_rise_while_model_is_above_budget():
    masks, model = masks_of("bert", keep_ratio=0.5, warmup=0.5)
    with torch.no_grad():
        for log_alpha in masks.units.values():
            log_alpha.fill_(INITIAL_LOG_ALPHA)
    masks._before_step(10, 10)
    model.train()
    terms = masks.objective(lambda model, batch: torch.zeros(()))(model, {})
    terms["budget"].value.backward()
    below = 0.5 - (1 - float(open_probability(torch.tensor(INITIAL_LOG_ALPHA))))  # sparsity that lacks
    assert masks.multipliers.grad.tolist() == pytest.approx([-below, below**2], abs=1e-5)
    (group,) = [g for g in masks.extension().groups if g.maximize]
    assert group.parameters[0] is masks.multipliers
    model.eval()
    assert float(masks.objective(lambda model, batch: torch.zeros(()))(model, {})) == 0.0


def test_budget_missed_after_few_updates_warns(rows, tmp_path):
    source = tiny.write_marian(tmp_path / "model", num_layers=1)
    settings = FinetuneSettings(
        max_steps=2, batch_size=4, precision="fp32", num_evals=0, learned_masks={"keep_ratio": 0.1}
    )
    ctx = harness.run_stage(Finetune(), settings, source, tmp_path / "out", data=rows)
    (warning,) = [message for message in ctx.warnings if message.code == "more-kept-than-asked"]
    assert all(share in warning.message for share in ("100.0%", "10.0%"))


def test_learned_masks_after_quantize_are_rejected(rows, tmp_path):
    source = tiny.write_marian(tmp_path / "model", num_layers=1)
    codes = harness.run_stage(Quantize(), QuantizeSettings(scheme="int4"), source, tmp_path / "q", data=rows)
    settings = FinetuneSettings(max_steps=2, batch_size=4, precision="fp32", learned_masks={})
    with raises_code("behind-quantize", InputError) as caught:
        harness.run_stage(Finetune(), settings, codes.out, tmp_path / "out", data=rows)
    short = FinetuneSettings(max_steps=1, batch_size=4, precision="fp32", num_evals=0, lora={"r": 2})
    beside = harness.run_stage(Finetune(), short, codes.out, tmp_path / "lora", data=rows)
    assert "QatLinear" in str(caught.value)
    with raises_code("behind-quantize", InputError) as caught:
        harness.run_stage(Finetune(), settings, beside.out, tmp_path / "again", data=rows)
    assert "LowRankCorrectedLinear" in str(caught.value)


def test_keeping_fewer_weights_than_requested_warns(tmp_path):
    masks, _model = masks_of("bert", keep_ratio=0.9)
    with torch.no_grad():
        for log_alpha in masks.units.values():
            log_alpha.fill_(-1.7)  # open with a chance of 0.47
    ctx = harness.make_context(tmp_path / "out")
    masks.finalize(ctx)
    (warning,) = ctx.warnings
    assert warning.code == "fewer-kept-than-asked"
    assert "90.0%" in warning.message


@pytest.mark.parametrize(
    ("keep_ratio", "codes"),
    [(0.56, ["more-kept-than-asked"]), (0.54, []), (0.46, []), (0.44, ["fewer-kept-than-asked"])],
)
def test_keep_ratio_within_five_percent_does_not_warn(keep_ratio, codes, tmp_path, monkeypatch):
    masks, _model = masks_of("bert", keep_ratio=0.5)
    monkeypatch.setattr(masks, "final_keep_ratio", lambda: keep_ratio)
    ctx = harness.make_context(tmp_path / "out")
    masks.finalize(ctx)
    assert message_codes(ctx.warnings) == codes


def test_unknown_family_is_rejected_for_learned_masks():
    from transformers import ConvBertConfig, ConvBertForSequenceClassification

    config = ConvBertConfig(
        hidden_size=16, embedding_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=50,
    )  # fmt: skip
    with raises_code("unsupported-family", InputError) as caught:
        LearnedMasks(ConvBertForSequenceClassification(config), LearnedMasksSettings(), [])
    assert caught.value.setting == "learned_masks"
    assert str(caught.value).startswith("learned_masks: ")
