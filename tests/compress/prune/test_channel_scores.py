"""What a channel is worth, against loops over what norms give, and against losses."""

import pytest
import torch

from smelt.compress.prune.importances.activation import activation_scores
from smelt.compress.prune.importances.magnitude import channel_magnitudes
from smelt.compress.prune.importances.scores import hidden_norms
from smelt.compress.prune.importances.taylor import gradient_scores
from smelt.models.checkpoint import load_model
from smelt.models.hidden_width import hidden_width
from smelt.training.losses import label_objective
from tests.support.models import every_family

pytestmark = pytest.mark.quick


def _batches(model):
    ids = torch.randint(5, 20, (3, 9), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}
    return [{"input_ids": ids, **more}, {"input_ids": ids[:1, :4], **{n: v[:1] for n, v in more.items()}}]


@pytest.mark.parametrize("family", ["marian", "t5", "modernbert", "qwen3", "opt"])
def test_activation_score_equals_formula_summed_over_norms(family):
    """Mean of |y| over the tokens of a row, L2 over rows, summed over norms: by loops over outputs."""
    model, _ = load_model(every_family.model_with_layers(family, 2))
    norm_outputs, texts = {}, []
    for norm in hidden_norms(model):  # some of OPT's give [B S, D]
        norm.register_forward_hook(
            lambda m, x, y: norm_outputs.setdefault(m, []).extend(
                y.detach().unflatten(0, (texts[-1], -1)).flatten(1, -2)
            )
        )
    with torch.no_grad():
        for batch in _batches(model):
            texts.append(len(batch["input_ids"]))
            model(**batch)
    expected = []
    for channel in range(hidden_width(model)):
        total = 0.0
        for rows in norm_outputs.values():
            total += sum(float(row[:, channel].abs().double().mean()) ** 2 for row in rows) ** 0.5
        expected.append(total)
    scores = activation_scores(model, hidden_width(model), _batches(model))
    assert scores.tolist() == pytest.approx(expected, rel=1e-5)
    names = {name for name, _ in model.named_modules() if "norm" in name.lower().rpartition(".")[2]}
    assert len(norm_outputs) == len(names) - (4 if family == "qwen3" else 2 if family == "modernbert" else 0)


def test_gradient_scores_equal_finite_differences_of_scaled_norms():
    model, _ = load_model(every_family.model_with_layers("llama", 2))
    ids = torch.randint(5, 20, (2, 7), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row[None], "attention_mask": torch.ones(1, 7), "labels": row[None]} for row in ids]
    loss_of, step = label_objective(), 1e-2
    sums = {squared: gradient_scores(model, 64, rows, loss_of, squared) for squared in (False, True)}
    for channel in (0, 17, 63):
        slopes = []
        for row in rows:
            losses = []
            for factor in (1 + step, 1 - step):
                changed, _ = load_model(every_family.model_with_layers("llama", 2))
                with torch.no_grad():
                    for norm in hidden_norms(changed):
                        norm.weight[channel] *= factor
                    losses.append(float(loss_of(changed, row)))
            slopes.append((losses[0] - losses[1]) / (2 * step))
        assert float(sums[False][channel]) == pytest.approx(sum(map(abs, slopes)), rel=2e-2, abs=1e-3)
        squares = sum(slope**2 for slope in slopes) / 2
        assert float(sums[True][channel]) == pytest.approx(squares, rel=4e-2, abs=1e-4)


def test_channel_magnitude_counts_each_weight_once():
    model, _ = load_model(every_family.model_with_layers("gpt2", 2))
    before = channel_magnitudes(model)
    body = model.transformer
    with torch.no_grad():
        total = body.wte.weight[:, 5].square().sum() + body.wpe.weight[:, 5].square().sum()
        for block in body.h:
            total += (
                block.attn.c_attn.weight[:, 5].square().sum() + block.mlp.c_fc.weight[:, 5].square().sum()
            )
            for out in (block.attn.c_proj, block.mlp.c_proj):
                total += out.weight[5].square().sum() + out.bias[5].square()
            for norm in (block.ln_1, block.ln_2):
                total += norm.weight[5].square() + norm.bias[5].square()
        total += body.ln_f.weight[5].square() + body.ln_f.bias[5].square()
    assert float(before[5]) == pytest.approx(float(total.sqrt()), rel=1e-5)
    assert model.lm_head.weight is body.wte.weight  # counted once, though it reads too
