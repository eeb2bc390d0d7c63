"""What a part of a layer does, against the hidden states between the parts; models without parts."""

import pytest
import torch
from torch.nn.functional import normalize

from smelt.compress.drop_layers.drop_parts import layer_parts, part_influence, without_parts
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import blocks_of
from smelt.models.layers import skip_sublayer
from tests.support import harness
from tests.support.models import every_family
from tests.support.models.every_family import SEPARATE_BLOCKS


def _loaded(family, layers=3):
    return load_model(every_family.model_with_layers(family, layers))[0]


def _inputs(model):
    if model.main_input_name == "pixel_values":
        pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        return {"pixel_values": pixels}
    ids = torch.randint(5, 20, (3, 9), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        **({"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}),
    }


def _between(model, parts):
    """Return, by part, the states before and behind it, as its block computes them.

    Where norms come first, a norm reads the states before its part, and the next norm (or the next block)
    what is behind it. Where they come last, a norm reads what is behind its part. Parallel parts with one
    norm (Phi) add what they compute to the states that it reads.
    """
    outputs, handles = {}, []
    for part in parts:
        norm, block = model.get_submodule(part.norm), part.block.module
        handles += [
            model.get_submodule(part.output).register_forward_hook(
                lambda m, args, out, key=part.output: outputs.update({key: (args[0], out)})
            ),
            norm.register_forward_hook(
                lambda m, args, out, key=part.norm: outputs.update({key: (args[0], out)})
            ),
            block.register_forward_hook(
                lambda m, args, out, key=part.block.module_path: outputs.update(
                    {key: (args[0], out[0] if isinstance(out, tuple) else out)}
                )
            ),
        ]
    with torch.no_grad():
        model(**_inputs(model))
    for handle in handles:
        handle.remove()
    states_by_part = {}
    for index, part in enumerate(parts):
        same, norms = part.block.module_path, part.block.stack.stream.part_norms
        if len(set(norms)) < len(norms):
            before = outputs[part.norm][0]
            states_by_part[part] = (before, before + outputs[part.output][1])
        elif part.block.stack.stream.pre_norm:
            last = index + 1 == len(parts) or parts[index + 1].block.module_path != same
            states_by_part[part] = (
                outputs[part.norm][0],
                outputs[same][1] if last else outputs[parts[index + 1].norm][0],
            )
        else:
            first = index == 0 or parts[index - 1].block.module_path != same
            states_by_part[part] = (
                outputs[same][0] if first else outputs[parts[index - 1].norm][1],
                outputs[part.norm][0],
            )
    return states_by_part


@pytest.mark.parametrize("family", [*SEPARATE_BLOCKS, "dinov2"])
def test_part_influence_equals_states_before_and_after(family):
    model = _loaded(family)
    for block in blocks_of(model):
        block.module.use_parallel_residual = False  # GPT-NeoX's, which has no states between its parts
    parts = layer_parts(model)
    influence = part_influence(model, parts, [_inputs(model)])
    for part, states in _between(model, parts).items():
        before, behind = (x.flatten(0, -2) for x in states)  # some of OPT's have no axis of texts
        cosine = (normalize(before.double(), dim=-1) * normalize(behind.double(), dim=-1)).sum(-1)
        assert influence[part] == pytest.approx(1 - cosine.mean().item(), abs=1e-6)
        assert 1e-3 < influence[part] < 2
    kinds = (
        ["attention", "cross-attention", "ffn"] if model.config.is_encoder_decoder else ["attention", "ffn"]
    )
    assert [part.kind for part in parts if part.stack == parts[-1].stack] == kinds * 3


@pytest.mark.parametrize(
    "family", ["t5", "marian", "modernbert", "qwen2", "opt", "gpt_neox", "gemma3_text", "phi"]
)
def test_without_parts_equals_model_with_parts_removed(family):
    model = _loaded(family)
    parts = layer_parts(model)
    removed = [parts[0], parts[3], parts[-2]]
    full_logits = harness.logits(model)
    with without_parts(model, parts, removed):
        ablated_logits = harness.logits(model)
    assert torch.equal(harness.logits(model), full_logits)
    for part in removed:
        skip_sublayer(model, part.block.module_path, part.index)
    assert torch.allclose(harness.logits(model), ablated_logits, atol=1e-4)
    assert not torch.allclose(ablated_logits, full_logits, atol=1e-2)


def test_shared_linear_layer_has_influence_per_block():
    model = _loaded("llama")
    layers = model.model.layers
    layers[2].mlp.down_proj = layers[0].mlp.down_proj
    parts = layer_parts(model)
    influence = {part.name: value for part, value in part_influence(model, parts, [_inputs(model)]).items()}
    by_states = _between(model, parts)
    for part in (parts[1], parts[5]):
        cosine = torch.cosine_similarity(*(x.double() for x in by_states[part]), dim=-1)
        assert influence[part.name] == pytest.approx(1 - cosine.mean().item(), abs=1e-6)
