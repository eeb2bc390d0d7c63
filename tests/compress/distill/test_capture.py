"""What is read of a model while it computes is what transformers gives of it, in every family."""

import pytest
import torch

from smelt.compress.distill.capture import CapturedTensors, CaptureRequest, capture_tensors
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import blocks_of, model_attentions
from tests.support.models import every_family
from tests.support.models.every_family import DISTINCT_FAMILIES

SCORED = [name for name in DISTINCT_FAMILIES if name != "mpnet"]  # which makes them inside of its forward


def batch(model):
    """Two texts, of which one is padded, and what comes out."""
    ids = torch.randint(5, 20, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    feeds = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        feeds["decoder_input_ids"] = ids[:, :5]
    return feeds


def everything(model):
    places = {(block.stack.name, index + 1) for block in blocks_of(model) for index in block.call_indices}
    states = places | {(stack, 0) for stack, _ in places}
    return CaptureRequest(frozenset(states), frozenset(places), frozenset(places))


def outputs_by_stack(model, out, word):
    """What transformers gives of each stack, by our names."""
    if model.config.is_encoder_decoder:
        return {f"{side}_layers": getattr(out, f"{side}_{word}") for side in ("encoder", "decoder")}
    return {"layers": getattr(out, word)}


def hooks(model):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_states_are_those_of_transformers(family):
    model, _ = load_model(every_family.model_with_layers(family, 2))
    with torch.no_grad():
        model(**batch(model), output_hidden_states=True)  # transformers leaves hooks of its own
    before, read, wanted = hooks(model), CapturedTensors(), everything(model)
    with torch.no_grad(), capture_tensors(model, CaptureRequest(states=wanted.states), read):
        out = model(**batch(model), output_hidden_states=True)
        states = dict(read.states)
    assert set(states) == wanted.states
    for stack, found in outputs_by_stack(model, out, "hidden_states").items():
        for number, state in enumerate(found):
            torch.testing.assert_close(states[stack, number], state)
    assert read.states == {}
    assert hooks(model) == before


@pytest.mark.parametrize("family", SCORED)
def test_softmax_of_the_scores_is_the_attention_of_transformers(family):
    model, _ = load_model(every_family.model_with_layers(family, 2))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**batch(model), output_attentions=True, use_cache=False)
    read, wanted = CapturedTensors(), everything(model)
    with torch.no_grad(), capture_tensors(model, CaptureRequest(scores=wanted.scores), read):
        again = model(**batch(model), use_cache=False)
        scores = {place: list(found) for place, found in read.scores.items()}
    torch.testing.assert_close(again.logits, out.logits, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == "eager"
    assert not [m for m in model.modules() if "_smelt_reads" in vars(m)]
    there = batch(model)["attention_mask"].bool()
    for stack, found in outputs_by_stack(model, out, "attentions").items():
        for number, weights in enumerate(found, 1):
            ours = scores[stack, number][0]
            weighed = ours.scores.masked_fill(~ours.visible, -1e9).softmax(-1)
            rows = torch.ones_like(weights[:, 0, :, 0]).bool() if "decoder" in stack else there
            for row, seen in enumerate(rows):
                torch.testing.assert_close(weighed[row, :, seen], weights[row, :, seen], rtol=1e-4, atol=1e-5)
    if model.config.is_encoder_decoder:
        crossed = scores["decoder_layers", 2][1]
        weighed = crossed.scores.masked_fill(~crossed.visible, -1e9).softmax(-1)
        torch.testing.assert_close(weighed, out.cross_attentions[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_products_are_what_the_layers_of_query_key_and_value_give(family):
    model, _ = load_model(every_family.model_with_layers(family, 2))
    read, wanted = CapturedTensors(), everything(model)
    given = {}
    attention = next(a for a in model_attentions(model) if not a.cross)

    def record_first_input(module, args, result):
        given.setdefault("input", args[0])  # a returned value would replace the output

    hook = model.get_submodule(attention.query).register_forward_hook(record_first_input)
    with torch.no_grad(), capture_tensors(model, CaptureRequest(projections=wanted.projections), read):
        model(**batch(model))
        products = read.projections[blocks_of(model)[0].stack.name, 1]
    hook.remove()
    rows = []
    for name in dict.fromkeys((attention.query, attention.key, attention.value)):
        with torch.no_grad():
            rows.append(model.get_submodule(name)(given["input"]))
    torch.testing.assert_close(
        torch.cat([products[word] for word in ("query", "key", "value")], dim=-1), torch.cat(rows, dim=-1)
    )
    module = model.get_submodule(attention.name)
    assert products["key"].shape == products["value"].shape
    assert products["query"].shape[-1] % int(getattr(module, attention.head_dim_attribute)) == 0


def test_a_layer_in_two_places_is_read_in_both():
    model, _ = load_model(every_family.model_with_layers("bert", 2))
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]
    read = CapturedTensors()
    places = frozenset({("layers", 1), ("layers", 2)})
    with torch.no_grad(), capture_tensors(model, CaptureRequest(places, places, places), read):
        for _ in range(2):
            read.clear()
            out = model(**batch(model), output_hidden_states=True)
        for number in (1, 2):
            torch.testing.assert_close(read.states["layers", number], out.hidden_states[number])
        assert set(read.scores) == set(read.projections) == places
        assert not torch.equal(read.projections["layers", 1]["key"], read.projections["layers", 2]["key"])


def test_of_a_product_that_blocks_share_each_is_read_where_it_computes():
    """`share` lets blocks multiply with the same matrices, and each block still has inputs of its own."""
    model, _ = load_model(every_family.model_with_layers("bert", 2))
    one, two = (model.bert.encoder.layer[at].attention.self for at in (0, 1))
    for word in ("query", "key", "value"):
        getattr(two, word).load_state_dict(getattr(one, word).state_dict())
    places = frozenset({("layers", 1), ("layers", 2)})

    def products():
        read = CapturedTensors()
        with torch.no_grad(), capture_tensors(model, CaptureRequest(projections=places), read):
            model(**batch(model))
            return {place: dict(found) for place, found in read.projections.items()}

    apart = products()
    for word in ("query", "key", "value"):
        setattr(two, word, getattr(one, word))
    together = products()
    assert set(together) == places
    for place in places:
        for word, value in apart[place].items():
            assert torch.equal(together[place][word], value), (place, word)
