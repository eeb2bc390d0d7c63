"""What a family says of its models is what transformers' models are."""

import pytest
from torch import nn

from smelt.core.files import read_json_object
from smelt.data.tasks import TASKS
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import (
    FAMILIES,
    FAMILIES_BY_TASK,
    blocks_of,
    family_of,
    find_family,
    model_attentions,
)
from smelt.models.weight_files import weight_tensors
from tests.support.models import every_family
from tests.support.models.every_family import TEXT_FAMILIES

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module", params=sorted(TEXT_FAMILIES))
def loaded(request, tmp_path_factory):
    folder = every_family.make_model(tmp_path_factory.mktemp("models") / request.param, request.param)
    model, _ = load_model(folder)
    return FAMILIES[request.param], model, folder


def test_every_family_has_a_task_and_every_task_a_family():
    assert all(family.name == name and family.tasks for name, family in FAMILIES.items())
    assert all(FAMILIES_BY_TASK[task] for task in TASKS)
    assert find_family({"model_type": "mamba"}) is None
    assert family_of(nn.Linear(1, 1)) is None


def test_stacks_have_expected_path_and_layer_count(loaded):
    family, model, _ = loaded
    config = model.config.to_dict()
    for stack in family.stacks(config):
        assert (
            len(stack.modules(model))
            == stack.num_layers(config)
            == getattr(model.config, stack.num_layers_key)
        )
        assert hasattr(model.config, stack.feed_forward.intermediate_size_key)


def test_every_linear_layer_belongs_to_attention_or_feed_forward(loaded):
    _, model, _ = loaded
    for block in blocks_of(model):
        options = {name for a in block.attentions for name in (a.query, a.key, a.value, a.out)}
        options |= {name for part in block.feed_forwards for name in part.linear_layers}
        linear_names = {
            n for n, m in block.module.named_modules(prefix=block.module_path) if isinstance(m, nn.Linear)
        }
        assert options == linear_names


def test_heads_times_width_equals_layer_sizes(loaded):
    _, model, _ = loaded
    for parts in model_attentions(model):
        module, out = model.get_submodule(parts.name), model.get_submodule(parts.out)
        width = getattr(module, parts.head_dim_attribute)
        assert out.in_features % width == 0
        if parts.heads_attribute:
            assert out.in_features == getattr(module, parts.heads_attribute) * width
        if parts.all_head_size_attribute:
            assert out.in_features == getattr(module, parts.all_head_size_attribute)
        if parts.kv_heads_attribute:
            rows = out.in_features + 2 * getattr(module, parts.kv_heads_attribute) * width
            assert model.get_submodule(parts.query).out_features == rows
        for norm in parts.qk_norms or ():
            assert model.get_submodule(norm).weight.shape == (width,)
        if (
            parts.scale_attribute not in (None, "width") and not parts.uses_attention_interface
        ):  # of the others test_family sees it used
            assert getattr(module, parts.scale_attribute) == pytest.approx(width**-0.5)


def test_neurons_are_input_rows_and_down_columns(loaded):
    _, model, _ = loaded
    for block in blocks_of(model):
        for parts in block.feed_forwards:
            count = model.get_submodule(parts.down).in_features
            rows = {model.get_submodule(name).out_features for name in parts.input_layers}
            assert rows == {2 * count if parts.gate == parts.up else count}


def test_word_embedding_has_expected_name_and_width(loaded):
    family, model, folder = loaded
    shapes = [e["shape"] for _, name, e in weight_tensors(folder) if name.endswith(family.embedding_suffixes)]
    assert shapes
    width = family.embedding_size(model.config.to_dict())
    assert all(shape == [model.config.vocab_size, width] for shape in shapes)


def test_repeated_block_is_listed_once(loaded):
    _, model, _ = loaded
    stack = blocks_of(model)[0].stack
    if stack.repeats_block:
        (block,) = blocks_of(model)
        assert block.call_indices == tuple(range(stack.num_layers(model.config.to_dict())))
        return
    layers = model.get_submodule(stack.module_path)
    layers[1] = layers[0]
    first, *others = (block for block in blocks_of(model) if block.stack == stack)
    assert first.call_indices == (0, 1)
    assert [block.index for block in others] == list(range(2, len(layers)))


def test_config_of_each_tiny_model_is_supported(loaded):
    family, _, folder = loaded
    assert family.unsupported_config(read_json_object(folder / "config.json")) == []


FACTORS = [1.0] * 8
REFUSED = {
    "part of a head, as transformers 4 says it": ("phi3", {"partial_rotary_factor": 0.5}),
    "part of a head, as transformers 5 says it": ("phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "factors by length": ("phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS}}),
    "words of another width": ("opt", {"hidden_size": 1024, "word_embed_proj_dim": 512}),
    "several groups of blocks": ("albert", {"num_hidden_groups": 2}),
    "several blocks in a group": ("albert", {"inner_group_num": 2}),
    "norms behind their parts": ("opt", {"do_layer_norm_before": False}),
    "norms without weights": ("opt", {"layer_norm_elementwise_affine": False}),
    "limits of scores": ("gemma3_text", {"attn_logit_softcapping": 50.0}),
    "limits of logits": ("gemma3_text", {"final_logit_softcapping": 30.0}),
    "scaled positions of one kind of layer": ("gemma3_text",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {}}}),
    "norms of queries and keys": ("phi", {"qk_layernorm": True}),
    "what comes after": ("gemma", {"use_bidirectional_attention": True}),
    "scaled positions": ("modernbert", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "scaled positions by kind": ("modernbert",
        {"rope_parameters": {"full_attention": {"rope_type": "longrope", "rope_theta": 1e4}}}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_config_is_rejected(name):
    family, config = REFUSED[name]
    assert len(FAMILIES[family].unsupported_config(config)) == 1
    plain = {"partial_rotary_factor": 1.0, "rope_parameters": None, "rope_scaling": None}
    plain |= {"hidden_size": 32, "embedding_size": 32}
    assert FAMILIES[family].unsupported_config(plain | {"use_bidirectional_attention": False}) == []
