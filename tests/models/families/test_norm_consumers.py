"""Which products read a norm, against what transformers' models hand from module to module."""

import pytest
import torch
from torch import nn

from smelt.models.families.registry import FAMILIES, blocks_of, norm_consumers
from smelt.models.layers import LowRankLinear
from tests.support.models import family_models


@pytest.fixture(scope="module", params=family_models.NAMES)
def model(request):
    return family_models.load(request.param)


def is_norm(module):
    return "Norm" in type(module).__name__


def test_every_norm_is_listed_once(model):
    norm_names = [name for name, module in model.named_modules() if is_norm(module)]
    assert sorted(feed.norm for feed in norm_consumers(model)) == sorted(norm_names)


def test_consumers_read_exact_output_of_norm(model):
    norm_outputs, linear_inputs, hooks = {}, {}, []

    def remember(name, store, value):  # held, or the next tensor could lie at its address
        store.setdefault(name, []).append(value)

    for name, module in model.named_modules():
        if is_norm(module):
            hooks.append(
                module.register_forward_hook(lambda m, i, o, name=name: remember(name, norm_outputs, o))
            )
        elif isinstance(module, nn.Linear):
            hooks.append(
                module.register_forward_hook(lambda m, i, o, name=name: remember(name, linear_inputs, i[0]))
            )
    with torch.no_grad():
        family_models.run_model(model, family_models.example_batch(model))
    for hook in hooks:
        hook.remove()
    inside = {norm for block in blocks_of(model) for a in block.attentions for norm in a.qk_norms or ()}
    scale = FAMILIES[model.config.model_type].output_scale(model.config.to_dict())
    for feed in norm_consumers(model):
        addresses = {output.data_ptr() for output in norm_outputs[feed.norm]}
        consumers = {
            name
            for name, inputs in linear_inputs.items()
            if not addresses.isdisjoint(x.data_ptr() for x in inputs)
            # DeBERTa multiplies its embeddings by the mask, which is 1 here
            or any(torch.equal(x, output) for x in inputs for output in norm_outputs[feed.norm])
        }
        if scale != 1.0 and feed.consumers == ("lm_head",):
            assert torch.equal(linear_inputs["lm_head"][0], norm_outputs[feed.norm][0] * scale)
            consumers.add("lm_head")
        assert consumers == set(feed.consumers)
        assert feed.consumers or not feed.is_exclusive
        assert (feed.norm in inside) <= (not feed.consumers)


def fold(model, feed, scales):
    """Multiply what the norm gives by `scales`, and the columns that read it by their inverse."""
    norm = model.get_submodule(feed.norm)
    weight_offset = 1.0 if FAMILIES[model.config.model_type].rms_norm.adds_one_to_weight else 0.0
    with torch.no_grad():
        norm.weight.copy_((norm.weight + weight_offset) * scales - weight_offset)
        if getattr(norm, "bias", None) is not None:
            norm.bias.mul_(scales)
        for name in feed.consumers:
            model.get_submodule(name).weight.div_(scales)


def test_foldable_norms_preserve_outputs_when_rescaled(model):
    batch = family_models.example_batch(model)
    with torch.no_grad():
        before = family_models.run_model(model, batch).logits
        for feed in norm_consumers(model):
            touched = [model.get_submodule(name) for name in (feed.norm, *feed.consumers)]
            saved_states = [{n: t.clone() for n, t in module.state_dict().items()} for module in touched]
            width = touched[0].weight.shape[0]
            fold(model, feed, torch.rand(width, generator=torch.Generator().manual_seed(3)) + 0.5)
            change = (family_models.run_model(model, batch).logits - before).abs().max() / before.abs().max()
            for module, values in zip(touched, saved_states, strict=True):
                module.load_state_dict(values)
            assert (change < 1e-4) == feed.is_foldable, (feed, change)
            assert feed.is_foldable or change > 1e-3, (feed, change)


def test_pre_norm_blocks_are_foldable_and_post_norm_blocks_are_not(model):
    blocks_by_norm = {
        norm: b
        for b in blocks_of(model)
        for norm in (f"{b.module_path}.{n}" for n in b.stack.stream.part_norms)
    }
    last = {b.stack.name: b.module_path for b in blocks_of(model)}
    for feed in norm_consumers(model):
        block = blocks_by_norm.get(feed.norm)
        if block is not None and not (
            block.module_path == last[block.stack.name] and not block.stack.stream.pre_norm
        ):
            # a router, which is no linear layer, reads it too
            is_routed = block.stack.feed_forward.router is not None and feed.norm.endswith(
                block.stack.stream.part_norms[-1]
            )
            assert feed.is_foldable == (block.stack.stream.pre_norm and not is_routed)


def test_norm_with_shared_consumers_is_not_foldable():
    model = family_models.load("llama")
    layers = model.get_submodule("model.layers")
    layers[1].self_attn.q_proj = layers[0].self_attn.q_proj
    feeds = {feed.norm: feed for feed in norm_consumers(model)}
    for number in range(2):
        feed = feeds[f"model.layers.{number}.input_layernorm"]
        assert (feed.is_exclusive, feed.is_foldable) == (True, False)
        assert feeds[f"model.layers.{number}.post_attention_layernorm"].is_foldable


def test_shared_norm_is_listed_once_with_all_consumers():
    model = family_models.load("llama")
    layers = model.get_submodule("model.layers")
    layers[1].input_layernorm = layers[0].input_layernorm
    (feed,) = (feed for feed in norm_consumers(model) if feed.norm.endswith("input_layernorm"))
    assert [name.split(".")[2] for name in feed.consumers] == ["0"] * 3 + ["1"] * 3
    assert feed.is_foldable


def test_last_norm_without_head_is_not_exclusive():
    model = family_models.load("bert")
    del model.bert.pooler, model.classifier
    last = norm_consumers(model)[-1]
    assert (last.norm, last.consumers, last.is_exclusive) == (
        "bert.encoder.layer.1.output.LayerNorm",
        (),
        False,
    )


def test_norms_are_in_execution_order():
    norms = [feed.norm.removeprefix("model.layers.") for feed in norm_consumers(family_models.load("qwen3"))]
    assert norms[:5] == [
        "0.input_layernorm",
        "0.self_attn.q_norm",
        "0.self_attn.k_norm",
        "0.post_attention_layernorm",
        "1.input_layernorm",
    ]


def test_unknown_family_has_no_norms():
    assert norm_consumers(nn.LayerNorm(3)) == []


def test_output_layer_can_be_low_rank():
    model = family_models.load("modernbert")
    before = norm_consumers(model)
    model.head.dense = LowRankLinear(model.head.dense.in_features, model.head.dense.out_features, 4)
    assert [feed.norm for feed in norm_consumers(model)] == [feed.norm for feed in before]
