"""What a family says of its products, scales and config's words is what transformers' models do."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

from smelt.export.graphs.attention import AttentionModule
from smelt.models.empty_model import replace_conv1d
from smelt.models.experts import separate_experts
from smelt.models.families.registry import FAMILIES, blocks_of, model_attentions
from tests.support.models import family_models

EXACT = "donot_use_mm_for_euclid_dist"


@pytest.fixture(scope="module", params=family_models.NAMES)
def model(request):
    return family_models.load(request.param)


def family_for(model):
    return FAMILIES[model.config.model_type]


def inputs_and_outputs(model):
    """First input and output of each module in one run, and the logits."""
    module_inputs, result, handles = {}, {}, []
    for name, module in model.named_modules():

        def hook(module, args, output, name=name):
            module_inputs[name] = args[0] if args else None
            result[name] = output

        handles.append(module.register_forward_hook(hook))
    with torch.no_grad():
        logits = family_models.run_model(model, family_models.example_batch(model)).logits
    for handle in handles:
        handle.remove()
    return module_inputs, result, logits


def test_feed_forward_activation_equals_config(model):
    module_inputs, result, _ = inputs_and_outputs(model)
    for parts in (part for block in blocks_of(model) for part in block.feed_forwards):
        activations = {"up": result[parts.up], "gate": result.get(parts.gate)}
        if parts.gate == parts.up:
            first, second = result[parts.up].chunk(2, dim=-1)
            activations = {"gate": first, "up": second} if parts.gate_first else {"up": first, "gate": second}
        activated = parts.activated_layer if parts.gate else "up"
        (other,) = {"up", "gate"} - {activated}
        expected = ACT2FN[getattr(model.config, parts.activation_key)](activations[activated])
        if parts.gate:
            expected = expected * activations[other]
        assert torch.allclose(module_inputs[parts.down], expected, atol=1e-6)


def test_gated_t5_activates_first_input():
    model = family_models.load("t5", gated=True)
    test_feed_forward_activation_equals_config(model)
    assert blocks_of(model)[0].feed_forwards[0].gate


WORDS = [(name, key) for name in family_models.NAMES for key in ("heads_key", "kv_heads_key", "head_dim_key")]


@pytest.mark.parametrize(("name", "key"), WORDS)
def test_config_keys_set_number_of_heads_in_all_attentions(name, key):
    """A model that is made of a config with half of it has products of half of it, in every attention."""
    more = {"gemma": {"num_key_value_heads": 2}}  # what can be halved
    model, family = family_models.load(name, **more.get(name, {})), FAMILIES[name]
    attentions = model_attentions(model)
    options = {getattr(parts, key) for parts in attentions}
    if options == {None}:
        assert key != "heads_key"
        return
    config = model.config.to_dict()
    for parts in attentions:  # where a config leaves the width to the other sizes, it is set
        if parts.head_dim_key and config.get(parts.head_dim_key) is None:
            config[parts.head_dim_key] = heads(model, parts)[2]
    values = {setting: config[setting] // 2 for setting in options}
    with torch.device("meta"):
        less = type(model)(type(model.config).from_dict(config | values))
    replace_conv1d(less)
    for parts in attentions:
        before, after = (heads(m, parts) for m in (model, less))
        expected = {
            # where no word says the width, the same rows are divided among fewer heads
            "heads_key": (0.5, 0.5 if parts.kv_heads_key is None else 1, 1 if parts.head_dim_key else 2),
            "kv_heads_key": (1, 0.5, 1),
            "head_dim_key": (1, 1, 0.5),
        }[key]
        assert after == tuple(count * times for count, times in zip(before, expected, strict=True))
    assert family.hidden_size_key not in values


def heads(model, parts):
    """Queries, keys and width of an attention."""
    family = FAMILIES[model.config.model_type]
    head_sizes = AttentionModule(model.get_submodule(parts.name), parts, family).heads
    return head_sizes.query_heads, head_sizes.kv_heads, head_sizes.head_dim


def test_config_keys_set_feed_forward_widths(model):
    config = model.config.to_dict()
    values = {
        part.intermediate_size_key: (config[part.intermediate_size_key] or 8) // 2
        for b in blocks_of(model)
        for part in b.feed_forwards
    }
    with torch.device("meta"):
        less = type(model)(type(model.config).from_dict(config | values))
    replace_conv1d(less)
    separate_experts(less)
    for part in (part for block in blocks_of(less) for part in block.feed_forwards):
        assert less.get_submodule(part.down).in_features == values[part.intermediate_size_key]


def test_later_tokens_are_visible_only_in_non_causal_stacks(model):
    """Another last token changes the states of those before it in every stack that is not causal."""
    batch = family_models.example_batch(model)
    sides = {"encoder_layers": "input_ids", "layers": "input_ids", "decoder_layers": "decoder_input_ids"}
    for stack in family_for(model).stacks(model.config.to_dict()):
        input_name = sides[stack.name]
        other = batch | {input_name: batch[input_name].clone()}
        other[input_name][:, -1] += 1
        before, after = (early_states(model, stack, inputs) for inputs in (batch, other))
        assert torch.allclose(before, after, atol=1e-5) == stack.causal


def early_states(model, stack, batch):
    """What the last block of `stack` gives for all tokens but the last."""
    outputs = []
    hook = model.get_submodule(stack.module_path)[-1].register_forward_hook(lambda m, i, o: outputs.append(o))
    with torch.no_grad():
        family_models.run_model(model, batch)
    hook.remove()
    value = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    return value[:, :-1]


def test_attention_interface_yields_scores_before_softmax(model):
    """Scores times scale, bias and mask make the probabilities that transformers gives: there is no cap."""
    module_scores, scales, sizes = {}, {}, {}

    def read(module, query, key, value, attention_mask, scaling=None, position_bias=None, **more):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        # OPT's queries come with their scale, which a rotation is not
        scales[module] = scale * (query.norm() / sizes[module] if module in sizes else 1)
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query @ keys.transpose(2, 3) * scale
        module_scores[module] = scores + sum(
            part for part in (position_bias, attention_mask) if part is not None
        )
        values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        mask = None if (attention_mask is None and position_bias is None) else module_scores[module] - scores
        return eager_attention_forward(module, query, keys, values, mask, scaling=scale)

    batch = family_models.example_batch(model)
    for parts in model_attentions(model):
        if parts.packed is None and parts.qk_norms is None:
            module = model.get_submodule(parts.name)
            model.get_submodule(parts.query).register_forward_hook(
                lambda m, i, outputs, module=module: sizes.update({module: outputs.norm()})
            )
    with torch.no_grad():
        expected = family_models.run_model(model, batch, output_attentions=True)
        ALL_ATTENTION_FUNCTIONS.register("smelt_read", read)
        masks = ALL_MASK_ATTENTION_FUNCTIONS
        masks.register("smelt_read", masks["eager"])
        try:
            model.set_attn_implementation("smelt_read")
            logits = family_models.run_model(model, batch).logits
        finally:
            model.set_attn_implementation("eager")
            del ALL_ATTENTION_FUNCTIONS._global_mapping["smelt_read"], masks._global_mapping["smelt_read"]
    attentions = model_attentions(model)
    assert {model.get_submodule(a.name) for a in attentions if a.uses_attention_interface} == set(
        module_scores
    )
    assert torch.allclose(logits, expected.logits, atol=1e-4)
    if not module_scores:
        assert not any(a.uses_attention_interface for a in attentions)
        return
    if model.config.is_encoder_decoder:
        cross = iter(expected.cross_attentions)
        self_attentions = iter((*expected.encoder_attentions, *expected.decoder_attentions))
        probabilities = [next(cross) if parts.cross else next(self_attentions) for parts in attentions]
    else:
        # a repeated block is seen in its last call
        probabilities = [expected.attentions[block.call_indices[-1]] for block in blocks_of(model)]
    for parts, expected_one in zip(attentions, probabilities, strict=True):
        module = model.get_submodule(parts.name)
        assert torch.allclose(module_scores[module].softmax(-1), expected_one, atol=1e-5)
        if parts.scale_attribute not in (None, "width"):
            assert getattr(module, parts.scale_attribute) == pytest.approx(float(scales[module]))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", family_models.NAMES)
def test_embeddings_equal_tables_times_embedding_scale(name, scaled):
    family = FAMILIES[name]
    if scaled and family.logits_bias is None and name != "m2m_100":
        pytest.skip("the config of the family has no word for a scale")
    model = family_models.load(name, **({"scale_embedding": True} if scaled else {}))
    config, batch = model.config.to_dict(), family_models.example_batch(model)
    scale = family.embedding_scale(config)
    assert scale != 1.0 or not scaled
    tables = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for stack in family.stacks(config):
        words, *others = stack.stream.embeddings
        ids = batch["decoder_input_ids" if stack.name == "decoder_layers" else "input_ids"]
        first = model.get_submodule(stack.module_path)[0]
        inputs = []
        before = model.get_submodule(stack.stream.embedding_norm) if stack.stream.embedding_norm else first
        hook = before.register_forward_pre_hook(lambda m, args, inputs=inputs: inputs.append(args[0]))
        with torch.no_grad():
            family_models.run_model(model, batch)
        hook.remove()
        remainder = inputs[0] - tables[words][ids] * scale
        for table in others:  # what is left are rows of the other tables, the same for each text
            assert tables[table].shape[1] == remainder.shape[-1]
        assert torch.allclose(remainder, remainder[:1].expand_as(remainder), atol=1e-4)
        if not others:
            assert remainder.abs().max() < 1e-4
        elif len(others) == 1:
            distances = torch.cdist(remainder[0], tables[others[0]], compute_mode=EXACT).min(dim=1).values
            assert distances.max() < 1e-3


def test_logits_equal_output_layer_times_scale_plus_bias(model):
    family = family_for(model)
    if family.architecture == "encoder":
        pytest.skip("the head of a classifier reads a part of the states, by functions of its own")
    biases = {
        name for name, buffer in model.named_buffers() if buffer.shape[-1:] == (model.config.vocab_size,)
    }
    assert biases == {family.logits_bias} - {None}
    if family.logits_bias:
        with torch.no_grad():
            bias = model.get_buffer(family.logits_bias)
            bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(4)))
    module_inputs, _, logits = inputs_and_outputs(model)
    stack = family.stacks(model.config.to_dict())[-1]
    _, result, _ = inputs_and_outputs(model)
    last = result[stack.stream.final_norm or stack.module_path + ".1"]
    last = last[0] if isinstance(last, tuple) else last
    (head,) = family.head_modules
    assert torch.allclose(module_inputs[head], last * family.output_scale(model.config.to_dict()), atol=1e-5)
    output_layer = model.get_submodule(head)
    expected = nn.functional.linear(module_inputs[head], output_layer.weight, output_layer.bias)
    if family.logits_bias:
        expected = expected + model.get_buffer(family.logits_bias)
    expected = expected / family.logits_divisor(model.config.to_dict())
    assert torch.allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_t5_states_are_scaled_only_with_tied_output_layer(tied):
    model = family_models.load("t5", tie_word_embeddings=tied)
    scale = FAMILIES["t5"].output_scale(model.config.to_dict())
    assert scale == (32**-0.5 if tied else 1.0)
    test_logits_equal_output_layer_times_scale_plus_bias(model)


def test_sinusoidal_positions_are_not_stored(model):
    family = family_for(model)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    parameters = dict(model.named_parameters())
    for stack in family.stacks(model.config.to_dict()):
        for table in stack.stream.embeddings[1:]:
            stored = table in parameters and parameters[table].requires_grad and table not in ignored
            assert stored != family.position_encoding.is_sinusoidal


@pytest.mark.parametrize("name", family_models.NAMES)
def test_per_layer_config_lists_equal_family_keys(name):
    family = FAMILIES[name]
    words = {stack.num_layers_key for stack in family.stacks({})}
    model = family_models.load(name, **dict.fromkeys(words, 3))
    config = model.config.to_dict()
    lists = {key for key, value in config.items() if isinstance(value, list) and len(value) == 3}
    assert lists == {key for stack in family.stacks(config) for key in stack.per_layer_keys}
    assert sum(len(block.call_indices) for block in blocks_of(model)) == 3 * len(family.stacks(config))
