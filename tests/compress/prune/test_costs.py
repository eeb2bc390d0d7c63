"""What units are said to cost is what the model has less without them, counted by torch."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.prune.costs import flop_costs, parameter_costs, resolve_sequence_length
from smelt.compress.prune.units import AttentionGroup, cut_heads, cut_neurons, find_groups
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.errors import InputError
from smelt.models.checkpoint import count_stored_parameters, load_model
from tests.support.expected_errors import raises_code
from tests.support.models import every_family, images
from tests.support.pairs.matrix import matrix_cells

FAMILIES = ("marian", "t5", "bert", "gpt2", "llama", "qwen3", "modernbert", "mpnet")
STAGES = {
    "none": None,
    "factorize": (Factorize(), FactorizeSettings(method="svd", optimize_for="size", rank=5)),
    "share": (ShareWeights(), ShareWeightsSettings()),
}


def half_of(model):
    """Cut about half of everything; return how many units each group has left."""
    attentions, blocks = find_groups(model)
    kept_units = {}
    for group in (*attentions, *blocks):
        kept_indices = torch.arange(max(1, group.count(model) // 2))
        (cut_heads if isinstance(group, AttentionGroup) else cut_neurons)(model, [], group, kept_indices)
        kept_units[group.name] = len(kept_indices)
    return kept_units


@torch.no_grad()
def multiplications(model, tokens):
    """What torch's counter says of a pass, attention in plain products."""
    model.set_attn_implementation("eager")
    ids = torch.ones(1, tokens, dtype=torch.long)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, **more)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize(("family", "before"), matrix_cells(FAMILIES, list(STAGES)))
def test_estimated_costs_equal_costs_of_pruned_model(family, before, tmp_path):
    folder = every_family.model_with_layers(family, 3)
    if STAGES[before]:
        folder = every_family.run_stage(*STAGES[before], folder, family, tmp_path / "before").out
    model, _ = load_model(folder)
    groups = [group for kind in find_groups(model) for group in kind]
    values, work = parameter_costs(model, groups), flop_costs(model, groups, 11)
    assert values.total == count_stored_parameters(model)
    assert work.total == multiplications(load_model(folder)[0], 11)
    kept_units = half_of(model)
    for costs, now in ((values, count_stored_parameters(model)), (work, multiplications(model, 11))):
        assert costs.fixed + sum(
            float(costs.by_group[n][count]) for n, count in kept_units.items()
        ) == pytest.approx(now)
        assert now < costs.total


def test_default_sequence_length_is_limited_by_model_positions():
    bert, _ = load_model(every_family.model_with_layers("bert", 3))
    t5, _ = load_model(every_family.model_with_layers("t5", 3))
    num_positions = bert.config.max_position_embeddings
    assert (resolve_sequence_length(bert, None), resolve_sequence_length(t5, None)) == (
        min(128, num_positions),
        128,
    )
    with raises_code("longer-than-model", InputError) as caught:
        resolve_sequence_length(bert, 9999)
    assert caught.value.setting == "budget.sequence_length"
    assert str(num_positions) in str(caught.value)


def count_image_operations(model):
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(1, 3, 16, 16))
    return counter.get_total_flops() // 2


def test_costs_of_image_model_equal_pass_over_one_image(tmp_path):
    """16 patches and the class token; torch counts the pass over an image of the model's size."""
    folder = images.write_model(tmp_path / "model", num_hidden_layers=1)
    model, _ = load_model(folder)
    groups = [group for kind in find_groups(model) for group in kind]
    model.set_attn_implementation("eager")  # torch does not count fused attention on a CPU
    costs = flop_costs(model, groups, None)
    assert costs.details["sequence_length"] == 17
    assert costs.total == count_image_operations(model)
    kept_units = half_of(model)
    reached = costs.fixed + sum(float(costs.by_group[name][count]) for name, count in kept_units.items())
    assert reached == count_image_operations(model)
    with raises_code("unused-setting", InputError) as caught:
        resolve_sequence_length(model, 17)
    assert caught.value.setting == "budget.sequence_length"
