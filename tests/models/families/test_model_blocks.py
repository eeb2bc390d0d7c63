"""A model's blocks, their units, the states between them and what no scheme codes, for every family."""

import pytest
import torch
import transformers

from smelt.models.families.registry import (
    FAMILIES,
    blocks_of,
    hidden_state_locations,
    model_attentions,
    output_modules,
)
from tests.support.models import family_models


@pytest.fixture(scope="module", params=family_models.NAMES)
def model(request):
    return family_models.load(request.param)


@pytest.fixture(scope="module", params=family_models.NAMES)
def traced(request):
    """A model with its dependency graph. Where queries share keys, the graph breaks at their repetition (it
    takes `expand` for an operation on each element), so that here every query has a key of its own."""
    model = family_models.load(request.param)
    config = model.config.to_dict()
    attentions = [a for stack in FAMILIES[request.param].stacks(config) for a in stack.attentions]
    overrides = {a.kv_heads_key: config[a.heads_key] for a in attentions if a.kv_heads_key and not a.packed}
    if overrides:
        model = family_models.load(request.param, **overrides)
    return model, family_models.dependency_graph(model)


def rows(model, names):
    tensor_axes = {(f"{name}.weight", 0) for name in names}
    return tensor_axes | {(f"{name}.bias", 0) for name in names if model.get_submodule(name).bias is not None}


def test_neuron_weights_equal_dependency_graph(traced):
    model, graph = traced
    for parts in (part for block in blocks_of(model) for part in block.feed_forwards):
        expected = rows(model, parts.input_layers) | {(f"{parts.down}.weight", 1)}
        assert family_models.pruning_group(graph, model, parts.up) == expected


def test_head_weights_equal_dependency_graph(traced):
    model, graph = traced
    if model.config.model_type == "phi":
        pytest.skip("the graph follows slices of a head, its rotated part, for minutes")
    attentions = model_attentions(model)
    for parts in attentions:
        # a bias by distance is added to the scores of all that have it: they lose the same heads, or none
        together = [
            a
            for a in attentions
            if parts.relative_bias in ("handed_on", "given") and not parts.cross and related(parts, a)
        ] or [parts]
        expected = set()
        for attention in together:
            expected |= rows(model, attention.linear_layers[:-1]) | {(f"{attention.out}.weight", 1)}
            expected |= {(f"{norm}.weight", 0) for norm in attention.qk_norms or ()}
        bias = {n for n, _ in model.named_parameters() if "relative_attention_bias" in n}
        expected |= {
            (n, 1)
            for n in bias
            if parts.relative_bias and not parts.cross and stack_of(n) in (stack_of(parts.name), None)
        }
        assert family_models.pruning_group(graph, model, parts.value) == expected


def stack_of(name):
    """encoder or decoder of T5; None in models of one stack."""
    first = name.split(".")[0]
    return first if first in ("encoder", "decoder") else None


def related(one, other):
    return not other.cross and stack_of(one.name) == stack_of(other.name)


def test_block_windows_equal_family(model):
    family, config = FAMILIES[model.config.model_type], model.config.to_dict()
    assert [b.window for b in blocks_of(model)] == [family.window(config, b.index) for b in blocks_of(model)]


@pytest.mark.parametrize(
    ("name", "windows"), [("mistral", [6, 6]), ("modernbert", [None, 3]), ("llama", [None] * 2)]
)
def test_block_windows_equal_config(name, windows):
    assert [block.window for block in blocks_of(family_models.load(name))] == windows


def read_states(model, batch):
    """The states of each stack, read by hooks, and what transformers gives."""
    states_by_index, handles, locations = {}, [], {}
    for state in hidden_state_locations(model):
        # a repeated block computes one of its states in each call
        locations.setdefault((state.module_path, state.index == 0), []).append(state)
    for (path, _), states in locations.items():

        def hook(module, inputs, result, states=states):
            if states:
                state = states.pop(0)
                states_by_index[(state.stack, state.index)] = state.extract(inputs, result)

        handles.append(model.get_submodule(path).register_forward_hook(hook))
    with torch.no_grad():
        result = family_models.run_model(model, batch, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    return states_by_index, result


def test_hidden_states_equal_transformers(model):
    states_by_index, result = read_states(model, family_models.example_batch(model))
    seq2seq = model.config.is_encoder_decoder
    references = {
        "encoder_layers": result.encoder_hidden_states if seq2seq else None,
        "decoder_layers": result.decoder_hidden_states if seq2seq else None,
        "layers": None if seq2seq else result.hidden_states,
    }
    for stack in FAMILIES[model.config.model_type].stacks(model.config.to_dict()):
        expected = references[stack.name]
        assert [number for name, number in states_by_index if name == stack.name] == list(
            range(len(expected))
        )
        closing = (
            model.get_submodule(stack.stream.final_norm) if stack.stream.final_norm else torch.nn.Identity()
        )
        for number, states in enumerate(expected):
            hidden_state = states_by_index[(stack.name, number)]
            last = number == len(expected) - 1
            assert torch.equal(closing(hidden_state) if last else hidden_state, states)


def test_states_of_repeated_block_are_read_under_first_name():
    model = family_models.load("llama")
    layers = model.get_submodule("model.layers")
    layers[1] = layers[0]
    assert [(s.index, s.module_path) for s in hidden_state_locations(model)] == [
        (0, "model.layers.0"),
        (1, "model.layers.0"),
        (2, "model.layers.0"),
    ]


def test_output_modules_are_found_if_present(model):
    family = FAMILIES[model.config.model_type]
    assert output_modules(model) == family.head_modules
    for name in {name.split(".")[0] for name in family.head_modules}:
        del model._modules[name]
    model.get_output_embeddings = lambda: None  # GPT-NeoX's names its layer
    assert output_modules(model) == ()


def test_unknown_family_has_no_states_or_output_modules():
    model = torch.nn.Linear(2, 3)
    assert (hidden_state_locations(model), output_modules(model)) == ([], ())


def test_head_of_one_layer_is_found_in_models_of_every_task():
    config = family_models.load("bert").config
    assert output_modules(transformers.BertForQuestionAnswering(config)) == ("qa_outputs",)
    assert output_modules(transformers.BertForMaskedLM(config)) == ()
