"""Block influence against the hidden states that transformers gives; models without layers."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize

from smelt.compress.drop_layers.select_layers import block_influence, drop_units_by_loss, without_layers
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import family_of
from tests.support.models import every_family
from tests.support.models.every_family import DISTINCT_FAMILIES


def _inputs(model):
    ids = torch.randint(5, 20, (3, 9), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, **more}


def _loaded(family, layers=3):
    model, _ = load_model(every_family.model_with_layers(family, layers))
    return model, family_of(model).stacks(model.config.to_dict())


def _of_states(states):
    """Return 1 - mean cos of neighbors, by the definition in the paper."""
    return [
        1 - (normalize(a.double(), dim=-1) * normalize(b.double(), dim=-1)).sum(-1).mean().item()
        for a, b in pairwise(states)
    ]


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_block_influence_equals_transformers_hidden_states(family):
    model, stacks = _loaded(family)
    with torch.no_grad():
        result = model(**_inputs(model), output_hidden_states=True)
    hidden_states = (
        (result.encoder_hidden_states, result.decoder_hidden_states)
        if model.config.is_encoder_decoder
        else (result.hidden_states,)
    )
    influence = block_influence(model, stacks, [_inputs(model)])
    for stack, states in zip(stacks, hidden_states, strict=True):
        last = len(states) - (
            2 if stack.stream.final_norm else 1
        )  # the last is given behind the closing norm
        expected = _of_states(states)
        assert influence[stack.name][:last] == pytest.approx(expected[:last], abs=1e-6)
        assert len(influence[stack.name]) == 3
        assert all(0 < value < 2 for value in influence[stack.name])


def test_block_influence_weights_batches_by_tokens():
    model, stacks = _loaded("llama")
    long, short = _inputs(model)["input_ids"], _inputs(model)["input_ids"][:1, :2]
    long_influence, short_influence, joint_influence = (
        block_influence(model, stacks, [{"input_ids": ids} for ids in batch])["layers"][1]
        for batch in ([long], [short], [long, short])
    )
    assert joint_influence == pytest.approx((27 * long_influence + 2 * short_influence) / 29)
    assert long_influence != pytest.approx(short_influence, rel=1e-3)


@pytest.mark.parametrize("family", ["t5", "marian", "modernbert", "qwen2"])
def test_without_layers_equals_model_with_layers_removed(family):
    from smelt.compress.drop_layers.layer_selection import keep_layers

    model, stacks = _loaded(family)
    removed = {(stacks[-1].name, 1)}
    with torch.no_grad():
        full_logits = model(**_inputs(model)).logits
        with without_layers(model, stacks, removed):
            ablated_logits = model(**_inputs(model)).logits
        assert torch.equal(model(**_inputs(model)).logits, full_logits)
        keep_layers(model, [], stacks[-1].name, [0, 2], "first", stage="drop-layers")
        assert torch.equal(model(**_inputs(model)).logits, ablated_logits)
    assert not torch.allclose(ablated_logits, full_logits)


def test_block_used_twice_has_influence_per_call():
    model, stacks = _loaded("bert")
    layers = model.get_submodule(stacks[0].module_path)
    layers[2] = layers[0]
    with torch.no_grad():
        states = model(**_inputs(model), output_hidden_states=True).hidden_states
    influence = block_influence(model, stacks, [_inputs(model), _inputs(model)])["layers"]
    assert influence == pytest.approx(_of_states(states), abs=1e-6)
    assert influence[0] != pytest.approx(influence[2], rel=1e-3)


def test_greedy_selection_recomputes_losses_after_each_removal():
    """The cheapest pair is not the two cheapest ones: after the first the losses are taken again."""
    losses = {
        (("a", 0),): 5.0, (("a", 1),): 2.0, (("a", 2),): 3.0, (("b", 0),): 4.0, (("b", 1),): 4.5,
        (("a", 1), ("b", 0)): 9.0, (("a", 1), ("b", 1)): 6.0,
    }  # fmt: skip
    evaluated = []

    def loss_without(removed, tried):
        assert tried in removed
        evaluated.append(removed)
        return losses[tuple(sorted(removed))]

    removed, removal_losses = drop_units_by_loss({"a": 2, "b": 1}, {"a": 3, "b": 2}, (), loss_without)
    assert removed == [("a", 1), ("b", 1)]
    assert removal_losses == [2.0, 6.0]
    assert len(evaluated) == 7


def test_equal_losses_drop_first_layer():
    losses = [2.5, 2.0000001, 2.0]
    removed, _ = drop_units_by_loss({"a": 2}, {"a": 3}, (), lambda _, layer: losses[layer[1]])
    assert removed == [("a", 1)]


def test_required_layer_is_not_a_candidate():
    removed, _ = drop_units_by_loss(
        {"a": 1}, {"a": 2}, {("a", 0)}, lambda removed, _: 0.0 if ("a", 0) in removed else 1.0
    )
    assert removed == [("a", 1)]
