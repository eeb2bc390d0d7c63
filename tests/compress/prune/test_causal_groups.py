"""Pruning of decoder-only models: cutting equals masking; whole groups of queries go with their key."""

import pytest
import torch

from smelt.compress.prune.importances.magnitude import magnitude_scores
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.prune.units import cut_heads, find_groups, linear_with_inputs
from smelt.core.errors import InputError
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import causal, every_family


@pytest.fixture(scope="module", params=causal.FAMILIES)
def folder(request, tmp_path_factory):
    folder = causal.write_model(tmp_path_factory.mktemp(request.param), request.param)
    causal.write_lines(folder / "t.txt", 2)
    return folder


def _prune(folder, out, **settings):
    data = {"train": read_split("t.txt", "language-modeling", Columns(), folder)}
    return harness.run_stage(Prune(), PruneSettings(**settings), folder, out, "language-modeling", data)


@pytest.mark.parametrize("importance", ["magnitude", "taylor"])
def test_pruned_causal_model_equals_masked_model(folder, tmp_path, importance):
    ctx = _prune(
        folder,
        tmp_path / "out",
        targets=["heads", "ffn"],
        keep_ratio=0.5,
        importance=importance,
        calibration_samples=6,
        reconstruct=False,
    )
    small, edits = load_model(ctx.out)
    original, _ = load_model(folder)
    attentions, blocks = find_groups(original)
    cut = find_groups(small)
    keys = 2 if original.config.model_type != "gpt2" else 4
    assert list(ctx.details["kept_heads"].values()) == [keys // 2] * 2
    with torch.no_grad():
        for group, after in zip([*attentions, *blocks], [*cut[0], *cut[1]], strict=True):
            name = getattr(group.structure, "out", None) or group.structure.down
            before, now = linear_with_inputs(original, name).weight, linear_with_inputs(small, name).weight
            # what stays are columns of the whole matrix: mask all others
            kept_columns = [(before == column[:, None]).all(dim=0).nonzero().item() for column in now.t()]
            mask = torch.zeros(before.shape[1])
            mask[kept_columns] = 1
            before.mul_(mask)
            assert len(kept_columns) * 2 == before.shape[1], (group, after)
    torch.testing.assert_close(harness.logits(small), harness.logits(original), atol=1e-4, rtol=1e-4)
    # GPT-2's config has no width of a head
    assert any(edit["op"] == "linear" for edit in edits) is (original.config.model_type == "gpt2")


def test_head_magnitude_multiplies_norms_of_value_and_output_for_grouped_queries(folder):
    model, _ = load_model(folder)
    attentions, blocks = find_groups(model)
    scores = magnitude_scores(model, attentions, blocks)
    if model.config.model_type == "gpt2":
        value = model.transformer.h[0].attn.c_attn.weight[64:]
        out = model.transformer.h[0].attn.c_proj.weight
    else:
        value, out = (model.model.layers[0].self_attn.get_submodule(n).weight for n in ("v_proj", "o_proj"))
    units = attentions[0].count(model)
    expected = [a.norm() * b.norm() for a, b in zip(value.chunk(units, 0), out.chunk(units, 1), strict=True)]
    torch.testing.assert_close(scores.heads[attentions[0].name].float(), torch.stack(expected).detach())


@torch.no_grad()
def test_head_of_layer_packed_by_heads_has_its_own_query_key_and_value():
    """GPT-NeoX; the reference for the values is the split in transformers' forward."""
    model, _ = load_model(every_family.model_with_layers("gpt_neox", 1))
    group = find_groups(model)[0][0]
    width, layer, x = group.head_dim(model), model.get_submodule(group.structure.value), torch.randn(5, 64)
    values = (layer(x) - layer.bias).view(5, -1, 3 * width).chunk(3, dim=-1)[2].flatten(1)
    torch.testing.assert_close(x @ group.value_weight(model).T, values, atol=1e-5, rtol=1e-4)
    model.get_submodule(group.structure.out).weight[:, :width] = 0
    masked = harness.logits(model)
    cut_heads(model, [], group, torch.tensor([1]))
    assert layer.out_features // 2 == model.get_submodule(group.structure.value).out_features
    torch.testing.assert_close(harness.logits(model), masked, atol=1e-4, rtol=1e-4)


def test_unknown_family_is_rejected_by_name():
    config = type("C", (), {"model_type": "mamba"})
    with raises_code("unsupported-family", InputError) as caught:
        find_groups(type("M", (), {"config": config}))
    assert all(name in str(caught.value) for name in ("mamba", "llama"))
