"""The axes that carry the hidden states: against torch-pruning's graph, and by making models narrower."""

import pytest
import torch
import transformers

from smelt.compress.factorize.svd import ErrorMetric, low_rank_layer
from smelt.compress.prune.units import AttentionGroup
from smelt.core.errors import InputError
from smelt.models.edits import replace_module
from smelt.models.empty_model import replace_conv1d
from smelt.models.families.registry import FAMILIES, blocks_of, model_attentions
from smelt.models.hidden_width import hidden_axes
from tests.support.expected_errors import raises_code
from tests.support.models import embedders, every_family, family_models

# not narrowed, since routers read their hidden states
ROUTED = {
    name
    for name, config in every_family.CONFIGS.items()
    if any(stack.feed_forward.router for stack in FAMILIES[name].stacks(config))
}


@pytest.mark.parametrize(
    ("name", "config"),
    [(name, {}) for name in family_models.NAMES if name not in ROUTED]
    + [("electra", {"embedding_size": 16})],
)
def test_hidden_axes_equal_torch_pruning_dependency_graph(name, config):
    model = family_models.load(name, **config)
    family = FAMILIES[name]
    dependencies = family_models.dependency_graph(model)
    hidden_axis_set = {(axis.name, axis.dim) for axis in hidden_axes(model) if axis.stream == "hidden"}
    # an encoder and its decoder are two graphs, tied by their embeddings, of which it does not know
    expected = set().union(
        *(
            family_models.pruning_group(dependencies, model, part.down)
            for block in blocks_of(model)
            for part in block.feed_forwards
        )
    )
    # sines are added to the states without a gradient, which is what it follows
    sines = {
        (table, 1)
        for stack in family.stacks(model.config.to_dict())
        for table in stack.stream.embeddings[1:]
        if family.position_encoding.is_sinusoidal
    }
    # nor does it follow a parameter that no module's call reads
    distances = {
        (stack.stream.distance_embeddings, 1)
        for stack in family.stacks(model.config.to_dict())
        if stack.stream.distance_embeddings
    }
    assert hidden_axis_set - expected == sines | distances
    assert expected - hidden_axis_set == set()


@pytest.mark.parametrize("name", embedders.FAMILIES)
def test_head_axes_equal_torch_pruning_dependency_graph(name):
    model = family_models.load(name)
    head_axes = {(axis.name, axis.dim) for axis in hidden_axes(model) if axis.stream == "head"}
    assert head_axes == family_models.pruning_group(
        family_models.dependency_graph(model), model, FAMILIES[name].head_modules[0]
    )


def copied(model, factor_of):
    """Make every second channel of the hidden states a copy of the one before it; nothing gets narrower."""
    for axis in hidden_axes(model):
        tensor = factor_of(axis.name)
        even = tensor.index_select(axis.dim, torch.arange(0, tensor.shape[axis.dim], 2))
        tensor.copy_(even.repeat_interleave(2, axis.dim))


def without_half_of_the_heads(model, state):
    """Let the later half of all heads give nothing in `model`; take them from the tensors `state`."""
    for parts in model_attentions(model):
        unit = AttentionGroup(parts)
        kept_units = torch.arange(unit.count(model) // 2)
        columns = len(kept_units) * unit.head_dim(model)
        model.get_submodule(parts.out).weight[:, columns:] = 0
        for product, rows in unit.row_indices(model, kept_units).items():
            for name in (f"{product}.weight", f"{product}.bias"):
                if name in state:
                    state[name] = state[name].index_select(0, rows)
        state[f"{parts.out}.weight"] = state[f"{parts.out}.weight"][:, :columns]
    for name in state:
        if name.endswith("mpnet.encoder.relative_attention_bias.weight"):
            state[name] = state[name][:, : state[name].shape[1] // 2]


@pytest.mark.parametrize("name", [n for n in every_family.DISTINCT_FAMILIES if n not in ROUTED])
def test_half_width_config_equals_model_with_duplicated_channels(name):
    """The model of a config of half the width takes the tensors that are left, and computes the same.

    Copies change no mean and no root of mean squares. What reads them takes each channel once instead of
    twice, so that its columns are doubled.
    """
    wide, family = family_models.load(name), FAMILIES[name]
    tensors = {**dict(wide.named_parameters()), **dict(wide.named_buffers())}
    whole_config = wide.config.to_dict()
    axes = hidden_axes(wide)
    with torch.no_grad():
        copied(wide, tensors.__getitem__)
        state = {n: t.clone() for n, t in wide.state_dict().items()}
        state |= {axis.name: tensors[axis.name].clone() for axis in axes}  # sines that no file holds
        half = family.with_hidden_size(whole_config, family.hidden_size(whole_config) // 2)
        values = {key: value for key, value in half.items() if value != whole_config[key]}
        attentions = [attention for stack in family.stacks(whole_config) for attention in stack.attentions]
        head_dim_key = attentions[0].head_dim_key
        if head_dim_key:
            values[head_dim_key] = getattr(
                wide.get_submodule(model_attentions(wide)[0].name), attentions[0].head_dim_attribute
            )
        else:
            values |= {
                attention.heads_key: whole_config[attention.heads_key] // 2 for attention in attentions
            }
            without_half_of_the_heads(wide, state)
        config = type(wide.config).from_dict(whole_config | values)
        config._attn_implementation = "eager"
        narrow = type(wide)(config).eval()
        replace_conv1d(narrow)
        fewer = family.embedding_scale(whole_config) / family.embedding_scale(config.to_dict())
        head = family.head_modules[0]
        tied = wide.get_submodule(head).weight is wide.get_input_embeddings().weight
        logits = (
            (2 if tied else 1) * family.output_scale(whole_config) / family.output_scale(config.to_dict())
        )
        fill(narrow, wide, state, axes, fewer, tied)
        batch = family_models.example_batch(wide)
        expected = family_models.run_model(wide, batch).logits
        narrow_logits = family_models.run_model(narrow, batch).logits
    assert expected.std() > 1e-2
    torch.testing.assert_close(
        narrow_logits * logits / (fewer if tied else 1), expected, rtol=1e-3, atol=1e-3
    )


def fill(narrow, wide, state, axes, fewer, tied):
    """Give `narrow` the even channels of the tensors `state` of `wide`; words are multiplied with `fewer`."""
    words = wide.get_input_embeddings().weight
    of_words = {name for name, p in wide.named_parameters(remove_duplicate=False) if p is words}
    for axis in axes:
        if axis.is_input and tied and axis.name in of_words:
            continue  # the table, which is cut as one
        times = 2 if axis.is_input else fewer if axis.name in of_words else 1
        old = state[axis.name]
        new = old.index_select(axis.dim, torch.arange(0, old.shape[axis.dim], 2)) * times
        state.update(dict.fromkeys(axis.names, new))
    narrow_tensors = {**dict(narrow.named_parameters(remove_duplicate=False)), **dict(narrow.named_buffers())}
    for name, tensor in state.items():
        assert narrow_tensors[name].shape == tensor.shape, name
        narrow_tensors[name].copy_(tensor)


def test_low_rank_pair_has_input_axis_in_down_and_output_axis_in_up():
    model = family_models.load("marian")
    original_axes = {(axis.name, axis.dim) for axis in hidden_axes(model)}
    for name in ("fc1", "fc2"):
        layer = model.get_submodule(f"model.encoder.layers.0.{name}")
        pair = low_rank_layer(layer, 9, ErrorMetric())[0]
        replace_module(model, f"model.encoder.layers.0.{name}", pair)
    removed_axes = {("fc1.weight", 1), ("fc2.weight", 0), ("fc2.bias", 0)}
    added_axes = {("fc1.down.weight", 1), ("fc2.up.weight", 0), ("fc2.up.bias", 0)}
    prefix = "model.encoder.layers.0."
    new_axes = {(axis.name, axis.dim) for axis in hidden_axes(model)}
    assert original_axes - new_axes == {(prefix + name, dim) for name, dim in removed_axes}
    assert new_axes - original_axes == {(prefix + name, dim) for name, dim in added_axes}


def test_shared_tensor_has_one_axis_with_all_names():
    model = family_models.load("bert")
    alone = len(hidden_axes(model))
    layers = model.bert.encoder.layer
    layers[1].intermediate = layers[0].intermediate
    layers[1].output.dense.weight = layers[0].output.dense.weight
    axes = hidden_axes(model)
    assert len(axes) == alone - 2
    shared_names = [axis.names for axis in axes if "bert.encoder.layer.1.output.dense.weight" in axis.names]
    assert shared_names == [
        ("bert.encoder.layer.0.output.dense.weight", "bert.encoder.layer.1.output.dense.weight")
    ]


def test_tied_word_embedding_has_table_and_input_axis():
    model = family_models.load("gpt2")
    of_words = [axis for axis in hidden_axes(model) if axis.name == "transformer.wte.weight"]
    assert [(axis.dim, axis.is_input) for axis in of_words] == [(1, False), (1, True)]
    assert of_words[0].names == ("transformer.wte.weight", "lm_head.weight")


@pytest.mark.parametrize("kind", ["Bart", "Marian"])
@pytest.mark.parametrize("tied", [True, False])
def test_unused_shared_embedding_has_hidden_axis(tied, kind):
    """transformers makes `shared` for every BART, whether the sides' own are tied to it or not."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=9, d_model=20, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=7, decoder_ffn_dim=7, max_position_embeddings=11,
        tie_word_embeddings=tied, pad_token_id=0,
    )  # fmt: skip
    model = getattr(transformers, {"Bart": "BartForConditionalGeneration", "Marian": "MarianMTModel"}[kind])(
        config
    )
    tables = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens")
    distinct = {model.get_submodule(name).weight for name in tables}
    assert len(distinct) == (1 if tied else 3)
    names_with_axis = {name for axis in hidden_axes(model) if axis.dim == 1 for name in axis.names}
    assert names_with_axis >= {f"{name}.weight" for name in tables}


def test_quantized_layer_has_no_hidden_axis():
    from smelt.compress.quantize.plan_layers import plan_layers, quantize_layers
    from smelt.compress.quantize.settings import QuantizeSettings

    model = family_models.load("bert")
    quantize_layers(model, plan_layers(model, QuantizeSettings(scheme="int8-dynamic")), {})
    with raises_code("unsupported-layer", InputError) as caught:
        hidden_axes(model)
    assert "QuantizedEmbedding" in str(caught.value)


def test_unknown_family_is_rejected_with_known_families():
    config = transformers.RoFormerConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9, intermediate_size=8
    )
    with raises_code("unsupported-family", InputError) as caught:
        hidden_axes(transformers.RoFormerModel(config))
    assert all(part in str(caught.value) for part in ("roformer", "marian"))
