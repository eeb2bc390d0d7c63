"""The table of timings: how often a text has each part, with a clock that counts multiplications."""

import pytest

from smelt.compress.prune import latency_costs
from smelt.compress.prune.costs import flop_costs
from smelt.compress.prune.units import AttentionGroup, find_groups
from smelt.models.checkpoint import load_model
from tests.support import harness
from tests.support.models import every_family

TOKENS = 12


def counted(parts, on, threads):
    """A second for each multiplication of weights."""
    assert (on, threads) == ("torch", 3)
    return [
        part.tokens * sum(layer.num_weights for layer in (*part.input_layers, part.output_layer) if layer)
        for part in parts
    ]


@pytest.mark.parametrize("family", ["bert", "marian", "llama", "gpt2"])
def test_layer_time_is_multiplied_by_its_steps_per_text(family, monkeypatch, tmp_path):
    monkeypatch.setattr(latency_costs, "time_parts", counted)
    model, _ = load_model(every_family.model_with_layers(family, 3))
    groups = [group for kind in find_groups(model) for group in kind]
    steps = {g.name: 1 if isinstance(g, AttentionGroup) else 4 for g in groups}
    ctx = harness.make_context(tmp_path / "out", threads=3)
    timed = latency_costs.latency_costs(model, groups, TOKENS, "torch", steps, ctx)
    flops = flop_costs(model, groups, TOKENS)
    for group in groups:  # a pass over a text multiplies as often as its steps one by one
        between = 0
        if isinstance(group, AttentionGroup):
            wide = model.get_submodule(group.structure.out).in_features
            between = 2 * wide * TOKENS * TOKENS
        assert timed.by_group[group.name][-1] == pytest.approx(
            1000 * (float(flops.by_group[group.name][-1]) - between)
        )
        rising = timed.by_group[group.name]
        assert (rising.diff() >= 0).all()
    assert timed.total == pytest.approx(timed.fixed + sum(float(c[-1]) for c in timed.by_group.values()))
    if model.can_generate():
        head = model.get_output_embeddings()
        assert timed.fixed == 1000 * TOKENS * head.weight.numel()
    assert timed.details["sequence_length"] == TOKENS
    assert {n for kind in timed.details["timings"] for n in kind["of"]} == {g.name for g in groups}
