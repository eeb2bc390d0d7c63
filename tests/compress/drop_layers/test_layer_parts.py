"""What a part of a layer does, against the hidden states between the parts; models without parts."""

import pytest
import torch
from torch.nn.functional import normalize

from smelt.compress.drop_layers.drop_parts import layer_parts, part_influence, without_parts
from smelt.models.checkpoint import load_model
from smelt.models.layers import skip_sublayer
from tests.support import harness
from tests.support.models import every_family
from tests.support.models.every_family import SEPARATE_BLOCKS


def _loaded(family, layers=3):
    return load_model(every_family.model_with_layers(family, layers))[0]


def _inputs(model):
    ids = torch.randint(5, 20, (3, 9), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        **({"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}),
    }


def _between(model, parts):
    """Return, by part, the states before and behind it, as its block computes them.

    Where norms come first, a norm reads the states before its part, and the next norm (or the next block)
    what is behind it. Where they come last, a norm reads what is behind its part.
    """
    seen, handles = {}, []
    for part in parts:
        norm, block = model.get_submodule(part.norm), part.block.module
        handles += [
            norm.register_forward_hook(
                lambda m, given, out, key=part.norm: seen.update({key: (given[0], out)})
            ),
            block.register_forward_hook(
                lambda m, given, out, key=part.block.module_path: seen.update(
                    {key: (given[0], out[0] if isinstance(out, tuple) else out)}
                )
            ),
        ]
    with torch.no_grad():
        model(**_inputs(model))
    for handle in handles:
        handle.remove()
    found = {}
    for at, part in enumerate(parts):
        same = part.block.module_path
        if part.block.stack.stream.pre_norm:
            last = at + 1 == len(parts) or parts[at + 1].block.module_path != same
            found[part] = seen[part.norm][0], seen[same][1] if last else seen[parts[at + 1].norm][0]
        else:
            first = at == 0 or parts[at - 1].block.module_path != same
            found[part] = seen[same][0] if first else seen[parts[at - 1].norm][1], seen[part.norm][0]
    return found


@pytest.mark.parametrize("family", SEPARATE_BLOCKS)
def test_influence_is_that_of_the_states_before_and_behind_a_part(family):
    model = _loaded(family)
    parts = layer_parts(model)
    found = part_influence(model, parts, [_inputs(model)])
    for part, states in _between(model, parts).items():
        before, behind = (x.flatten(0, -2) for x in states)  # some of OPT's have no axis of texts
        cosine = (normalize(before.double(), dim=-1) * normalize(behind.double(), dim=-1)).sum(-1)
        assert found[part] == pytest.approx(1 - cosine.mean().item(), abs=1e-6)
        assert 1e-3 < found[part] < 2
    kinds = (
        ["attention", "cross-attention", "ffn"] if model.config.is_encoder_decoder else ["attention", "ffn"]
    )
    assert [part.kind for part in parts if part.stack == parts[-1].stack] == kinds * 3


@pytest.mark.parametrize("family", ["t5", "marian", "modernbert", "qwen2", "opt"])
def test_model_without_parts_is_the_one_that_was_made_so(family):
    model = _loaded(family)
    parts = layer_parts(model)
    gone = [parts[0], parts[3], parts[-2]]
    whole = harness.logits(model)
    with without_parts(model, parts, gone):
        found = harness.logits(model)
    assert torch.equal(harness.logits(model), whole)
    for part in gone:
        skip_sublayer(model, part.block.module_path, part.index)
    assert torch.allclose(harness.logits(model), found, atol=1e-4)
    assert not torch.allclose(found, whole, atol=1e-2)


def test_a_product_that_two_blocks_share_is_told_apart_by_their_norms():
    model = _loaded("llama")
    layers = model.model.layers
    layers[2].mlp.down_proj = layers[0].mlp.down_proj
    parts = layer_parts(model)
    wanted = {part.name: value for part, value in part_influence(model, parts, [_inputs(model)]).items()}
    by_states = _between(model, parts)
    for part in (parts[1], parts[5]):
        cosine = torch.cosine_similarity(*(x.double() for x in by_states[part]), dim=-1)
        assert wanted[part.name] == pytest.approx(1 - cosine.mean().item(), abs=1e-6)
