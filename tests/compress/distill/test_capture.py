"""What is read of a model while it computes is what transformers gives of it, in every family."""

import pytest
import torch

from smelt.compress.distill.capture import CapturedTensors, CaptureRequest, capture_tensors
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import blocks_of, model_attentions
from tests.support.models import every_family
from tests.support.models.every_family import DISTINCT_FAMILIES


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
    positions = {(block.stack.name, index + 1) for block in blocks_of(model) for index in block.call_indices}
    states = positions | {(stack, 0) for stack, _ in positions}
    return CaptureRequest(frozenset(states), frozenset(positions), frozenset(positions))


def outputs_by_stack(model, out, name):
    """What transformers gives of each stack, by our names."""
    if model.config.is_encoder_decoder:
        return {f"{side}_layers": getattr(out, f"{side}_{name}") for side in ("encoder", "decoder")}
    return {"layers": getattr(out, name)}


def hooks(model):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_captured_hidden_states_equal_transformers(family):
    model, _ = load_model(every_family.model_with_layers(family, 2))
    with torch.no_grad():
        model(**batch(model), output_hidden_states=True)  # transformers leaves hooks of its own
    before, captured, request = hooks(model), CapturedTensors(), everything(model)
    with torch.no_grad(), capture_tensors(model, CaptureRequest(states=request.states), captured):
        out = model(**batch(model), output_hidden_states=True)
        states = dict(captured.states)
    assert set(states) == request.states
    for stack, hidden_states in outputs_by_stack(model, out, "hidden_states").items():
        for number, state in enumerate(hidden_states):
            torch.testing.assert_close(states[stack, number], state)
    assert captured.states == {}
    assert hooks(model) == before


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_captured_projections_equal_query_key_value_outputs(family):
    model, _ = load_model(every_family.model_with_layers(family, 2))
    captured, request = CapturedTensors(), everything(model)
    inputs = {}
    attention = next(a for a in model_attentions(model) if not a.cross)

    def record_first_input(module, args, result):
        inputs.setdefault("input", args[0])  # a returned value would replace the output

    hook = model.get_submodule(attention.query).register_forward_hook(record_first_input)
    with torch.no_grad(), capture_tensors(model, CaptureRequest(projections=request.projections), captured):
        model(**batch(model))
        products = captured.projections[blocks_of(model)[0].stack.name, 1]
    hook.remove()
    rows = []
    for name in dict.fromkeys((attention.query, attention.key, attention.value)):
        with torch.no_grad():
            rows.append(model.get_submodule(name)(inputs["input"]))
    module = model.get_submodule(attention.name)
    three = [products[projection] for projection in ("query", "key", "value")]
    packed = torch.cat(three, dim=-1)
    if attention.packed == "per_head":
        width = getattr(module, attention.head_dim_attribute)
        packed = torch.stack([x.unflatten(-1, (-1, width)) for x in three], dim=-2).flatten(-3)
    torch.testing.assert_close(packed, torch.cat(rows, dim=-1))
    assert products["key"].shape == products["value"].shape
    assert products["query"].shape[-1] % int(getattr(module, attention.head_dim_attribute)) == 0


def test_layer_in_two_positions_is_captured_at_both():
    model, _ = load_model(every_family.model_with_layers("bert", 2))
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]
    captured = CapturedTensors()
    positions = frozenset({("layers", 1), ("layers", 2)})
    with torch.no_grad(), capture_tensors(model, CaptureRequest(positions, positions, positions), captured):
        for _ in range(2):
            captured.clear()
            out = model(**batch(model), output_hidden_states=True)
        for number in (1, 2):
            torch.testing.assert_close(captured.states["layers", number], out.hidden_states[number])
        assert set(captured.scores) == set(captured.projections) == positions
        assert not torch.equal(
            captured.projections["layers", 1]["key"], captured.projections["layers", 2]["key"]
        )


def test_shared_projection_is_captured_once_per_block():
    """`share` lets blocks multiply with the same matrices, and each block still has inputs of its own."""
    model, _ = load_model(every_family.model_with_layers("bert", 2))
    first, second = (model.bert.encoder.layer[index].attention.self for index in (0, 1))
    for projection in ("query", "key", "value"):
        getattr(second, projection).load_state_dict(getattr(first, projection).state_dict())
    positions = frozenset({("layers", 1), ("layers", 2)})

    def products():
        captured = CapturedTensors()
        with torch.no_grad(), capture_tensors(model, CaptureRequest(projections=positions), captured):
            model(**batch(model))
            return {position: dict(projections) for position, projections in captured.projections.items()}

    separate = products()
    for projection in ("query", "key", "value"):
        setattr(second, projection, getattr(first, projection))
    together = products()
    assert set(together) == positions
    for position in positions:
        for projection, value in separate[position].items():
            assert torch.equal(together[position][projection], value), (position, projection)
