"""Sharing on every family: what is shared, what it weighs, what stays apart and why."""

import pytest
import torch
from safetensors.torch import load_file

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.compress.share_weights import (
    ShareWeights,
    ShareWeightsSettings,
    group_layers,
    share_embeddings,
    share_layers,
)
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import blocks_of
from smelt.models.layers import skip_sublayer
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family
from tests.support.models.every_family import SEPARATE_BLOCKS
from tests.support.weight_sharing import (
    assert_first_two_shared,
    linear_names_by_block,
    share_weights,
    three_layer_model,
)


@pytest.mark.parametrize("family", SEPARATE_BLOCKS)
def test_shared_model_equals_copied_weights_and_is_smaller(family, tmp_path):
    source = three_layer_model(family)
    plain, _ = load_model(source)
    saved = 0
    for blocks in linear_names_by_block(plain).values():
        for first, second, _ in zip(*blocks, strict=True):
            target = plain.get_submodule(second)
            target.load_state_dict(plain.get_submodule(first).state_dict())
            saved += sum(t.numel() * t.element_size() for t in target.state_dict().values())
    ctx = every_family.run_stage(ShareWeights(), ShareWeightsSettings(), source, family, tmp_path / "out")
    model, _ = load_model(ctx.out)
    assert_first_two_shared(model)
    assert torch.equal(harness.logits(model), harness.logits(plain))
    before, after = (load_file(f / "model.safetensors") for f in (source, ctx.out))
    assert sum(t.nbytes for t in before.values()) - sum(t.nbytes for t in after.values()) == saved
    assert ctx.details["parameters_before"] - ctx.details["parameters_after"] == saved // 4
    assert ctx.warnings == []


def test_gradient_of_shared_layers_is_sum_of_both():
    plain, _ = load_model(three_layer_model("bert"))
    model, edits = load_model(three_layer_model("bert"))
    share_layers(model, edits, ShareWeightsSettings(targets=["ffn"], groups=1))
    ups = [block.feed_forwards[0].up for block in blocks_of(plain)]
    for name in linear_names_by_block(plain)["layers", "ffn", 0][1:]:
        for first, other in zip(linear_names_by_block(plain)["layers", "ffn", 0][0], name, strict=True):
            plain.get_submodule(other).load_state_dict(plain.get_submodule(first).state_dict())
    for module in (plain, model):
        module(torch.arange(5, 15)[None]).logits.sum().backward()
    summed_gradient = sum(plain.get_submodule(name).weight.grad for name in ups)
    torch.testing.assert_close(model.get_submodule(ups[2]).weight.grad, summed_gradient)


def test_init_from_selects_mean_first_or_last_weights():
    plain, _ = load_model(three_layer_model("bert"))
    name = "bert.encoder.layer.{}.intermediate.dense"
    layers = [plain.get_submodule(name.format(n)) for n in range(3)]
    for take, expected in {
        "mean": [
            (layers[0].weight + layers[1].weight + layers[2].weight) / 3,
            sum(m.bias for m in layers) / 3,
        ],
        "last": [layers[2].weight, layers[2].bias],
        "first": [layers[0].weight, layers[0].bias],
    }.items():
        model, edits = load_model(three_layer_model("bert"))
        share_layers(model, edits, ShareWeightsSettings(init_from=take, groups=1))
        layer = model.get_submodule(name.format(1))
        torch.testing.assert_close(layer.weight, expected[0])
        torch.testing.assert_close(layer.bias, expected[1])


def test_only_selected_targets_and_stacks_are_shared():
    model, edits = load_model(three_layer_model("marian"))
    share_layers(model, edits, ShareWeightsSettings(targets=["ffn"], stacks=["encoder_layers"]))
    assert [e["module"] for e in edits] == ["model.encoder.layers.1.fc1", "model.encoder.layers.1.fc2"]
    model, edits = load_model(three_layer_model("marian"))
    share_layers(model, edits, ShareWeightsSettings(targets=["attention"], stacks=["decoder_layers"]))
    assert len(edits) == 8
    assert {e["module"].split(".")[4] for e in edits} == {"self_attn", "encoder_attn"}
    norms = [layer.final_layer_norm for layer in model.model.decoder.layers]
    assert len(set(norms)) == 3


@pytest.mark.quick
@pytest.mark.parametrize(("layers", "settings", "wanted"), [
    (6, {}, [[0, 1], [2, 3], [4, 5]]),
    (7, {"layers_per_group": 3}, [[0, 1, 2], [3, 4, 5], [6]]),
    (6, {"groups": 2}, [[0, 1, 2], [3, 4, 5]]),
    (7, {"groups": 3}, [[0, 1, 2], [3, 4], [5, 6]]),
    (6, {"groups": 1, "exclude_first_and_last": True}, [[0], [1, 2, 3, 4], [5]]),
    (2, {"exclude_first_and_last": True}, [[0], [1]]),
    (1, {"groups": 4}, [[0]]),
    (3, {"groups": 9}, [[0], [1], [2]]),
    # Takase & Kiyono 2021, figure 1: M = 3 of N = 6
    (6, {"groups": 3, "pattern": "sequence"}, [[0, 1], [2, 3], [4, 5]]),
    (6, {"groups": 3, "pattern": "cycle"}, [[0, 3], [1, 4], [2, 5]]),
    (6, {"groups": 3, "pattern": "cycle-reversed"}, [[0, 5], [1, 4], [2, 3]]),
    # algorithm 1 for M = 3 of N = 8: 1 2 3 1 2 3, then 3 2; of N = 9: 1 2 3 1 2 3 3 2 1
    (8, {"groups": 3, "pattern": "cycle-reversed"}, [[0, 3], [1, 4, 7], [2, 5, 6]]),
    (9, {"groups": 3, "pattern": "cycle-reversed"}, [[0, 3, 8], [1, 4, 7], [2, 5, 6]]),
    (7, {"layers_per_group": 3, "pattern": "cycle"}, [[0, 3, 6], [1, 4], [2, 5]]),
    (2, {"groups": 2, "pattern": "cycle-reversed"}, [[0], [1]]),
    (6, {"groups": 1, "pattern": "cycle-reversed"}, [[0, 1, 2, 3, 4, 5]]),
    (6, {"groups": 2, "pattern": "cycle", "exclude_first_and_last": True}, [[0], [1, 3], [2, 4], [5]]),
])  # fmt: skip
def test_groups_contain_layers_of_pattern(layers, settings, wanted):
    assert group_layers(layers, ShareWeightsSettings(**settings)) == wanted


def test_groups_with_layers_per_group_is_rejected():
    with raises_setting_codes("settings-conflict"):
        ShareWeightsSettings(groups=2, layers_per_group=2)


def test_layers_of_different_shape_are_not_shared_with_warning(tmp_path):
    model, edits = load_model(three_layer_model("bert"))
    first = model.bert.encoder.layer[0]
    first.intermediate.dense, first.output.dense = torch.nn.Linear(32, 40), torch.nn.Linear(40, 32)
    shared, notes = share_layers(model, edits, ShareWeightsSettings())
    assert message_codes(notes) == ["shape-mismatch"]
    for number, size in ((0, "[40, 32]"), (1, "[64, 32]")):
        assert f"bert.encoder.layer.{number}.intermediate.dense" in notes[0].message
        assert size in notes[0].message
    assert {e["module"].split(".")[4] for e in edits} == {"attention"}
    assert shared == {"layers": [[0, 1]]}


def test_low_rank_layers_can_be_shared_but_not_averaged(tmp_path):
    pairs = every_family.run_stage(
        Factorize(),
        FactorizeSettings(method="svd", optimize_for="size", rank=4),
        three_layer_model("bert"),
        "bert",
        tmp_path / "pairs",
    ).out
    model, edits = load_model(pairs)
    num_edits = len(edits)
    _, notes = share_layers(model, edits, ShareWeightsSettings(init_from="mean"))
    assert message_codes(notes) == ["already-factorized"] * 2
    assert len(edits) == num_edits
    shared = every_family.run_stage(
        ShareWeights(), ShareWeightsSettings(init_from="last"), pairs, "bert", tmp_path / "shared"
    ).out
    reloaded, _ = load_model(shared)
    assert_first_two_shared(reloaded)
    assert torch.equal(
        reloaded.bert.encoder.layer[0].output.dense.up.weight,
        model.bert.encoder.layer[1].output.dense.up.weight,
    )


@pytest.mark.parametrize("family", SEPARATE_BLOCKS)
def test_one_group_of_layers_stores_one_set_of_parameters(family, tmp_path):
    """ALBERT's sharing, norms too; what one block alone has (T5's position bias) is stored as well."""
    source = three_layer_model(family)
    plain, _ = load_model(source)
    settings = ShareWeightsSettings(targets=["layers"], groups=1)
    ctx = every_family.run_stage(ShareWeights(), settings, source, family, tmp_path / "out")
    model, _ = load_model(ctx.out)
    sets, saved = {}, 0
    for block in blocks_of(plain):  # every block gets the tensors of the first of its stack that has them
        tensors = sets.setdefault(block.stack.name, {})
        router = f"{block.stack.feed_forward.router}."  # each layer keeps its own
        state = {n: t for n, t in block.module.state_dict().items() if not n.startswith(router)}
        saved += sum(tensor.numel() for name, tensor in state.items() if name in tensors)
        tensors.update({name: tensor for name, tensor in state.items() if name not in tensors})
        block.module.load_state_dict({name: tensors[name] for name in state}, strict=False)
    assert sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in model.parameters()) == saved
    assert torch.equal(harness.logits(model), harness.logits(plain))


def test_norms_alone_are_shared():
    model, edits = load_model(three_layer_model("bert"))
    share_layers(model, edits, ShareWeightsSettings(targets=["norms"], groups=1))
    blocks = model.bert.encoder.layer
    assert len({block.output.LayerNorm for block in blocks}) == 1
    assert len({block.attention.output.LayerNorm for block in blocks}) == 1
    assert len({block.output.dense for block in blocks}) == 3


@pytest.mark.parametrize(
    ("init_from", "weights"), [("first", (1, 0)), ("last", (0, 1)), ("mean", (0.5, 0.5))]
)
def test_embeddings_share_one_matrix_with_output_layer(init_from, weights, tmp_path):
    source = three_layer_model("llama")
    plain, _ = load_model(source)
    table, head = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    assert not torch.equal(table, head)
    settings = ShareWeightsSettings(targets=["embeddings"], init_from=init_from)
    ctx = every_family.run_stage(ShareWeights(), settings, source, "llama", tmp_path / "out")
    model, _ = load_model(ctx.out)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    expected = weights[0] * table + weights[1] * head
    torch.testing.assert_close(model.get_input_embeddings().weight, expected)
    saved = sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in model.parameters())
    assert saved == head.numel() == ctx.details["parameters_before"] - ctx.details["parameters_after"]
    assert ctx.details["groups"] == {}
    assert ctx.warnings == []


def test_tied_embeddings_are_unchanged_with_warning():
    model, edits = load_model(three_layer_model("gpt2"))
    names, notes = share_embeddings(model, edits, "first")
    assert (names, edits) == ([], [])
    assert message_codes(notes) == ["nothing-to-share"]


@pytest.mark.quick
@pytest.mark.parametrize("target", ["norms", "layers", "embeddings"])
def test_low_rank_delta_of_other_targets_is_rejected(target):
    with raises_setting_codes("settings-conflict"):
        ShareWeightsSettings(targets=[target], low_rank_delta={"rank": 2})


def test_single_layer_groups_warn():
    model, edits = load_model(three_layer_model("bert"))
    shared, notes = share_layers(model, edits, ShareWeightsSettings(groups=3))
    assert (shared, edits) == ({"layers": []}, [])
    assert message_codes(notes) == ["single-layer-groups"]
    assert "3 layers" in notes[0].message


def test_layers_without_common_part_are_not_shared_with_warning():
    model, edits = load_model(every_family.model_with_layers("bert", 2))
    edits += [
        skip_sublayer(model, "bert.encoder.layer.0", 0),
        skip_sublayer(model, "bert.encoder.layer.1", 1),
    ]
    groups, notes = share_layers(model, edits, ShareWeightsSettings())
    assert groups == {"layers": [[0, 1]]}
    assert message_codes(notes) == ["no-part-in-common"]
    assert "0, 1" in notes[0].message
    assert not any(edit["op"] == "share" for edit in edits)


def test_unknown_stack_is_rejected():
    settings = ShareWeightsSettings(stacks=["decoder_layers"])
    model, edits = load_model(three_layer_model("bert"))
    errors, after = ShareWeights.check_model(settings, model.config.to_dict())
    assert [(error.setting, error.code) for error in errors] == [("stacks", "unknown-stack")]
    assert after == model.config.to_dict()
    with raises_code("unknown-stack", InputError) as caught:
        share_layers(model, edits, settings)
    assert caught.value.setting == "stacks"


def test_quantized_layers_are_rejected(tmp_path):
    codes = every_family.run_stage(
        Quantize(), QuantizeSettings(), three_layer_model("bert"), "bert", tmp_path / "codes"
    ).out
    with raises_code("behind-quantize", InputError):
        every_family.run_stage(ShareWeights(), ShareWeightsSettings(), codes, "bert", tmp_path / "shared")


def test_shared_layers_can_be_shared_with_more_layers(tmp_path):
    once = share_weights("bert", tmp_path / "once")
    twice = every_family.run_stage(
        ShareWeights(), ShareWeightsSettings(groups=1), once, "bert", tmp_path / "twice"
    ).out
    model, _ = load_model(twice)
    assert (
        len({model.get_submodule(names[0]) for names in linear_names_by_block(model)["layers", "ffn", 0]})
        == 1
    )
    same = every_family.run_stage(ShareWeights(), ShareWeightsSettings(), once, "bert", tmp_path / "same")
    assert "already-shared" in message_codes(same.warnings)
    assert same.details["parameters_after"] == same.details["parameters_before"]
