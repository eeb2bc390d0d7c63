"""The modules whose forwards are replaced for a graph compute what transformers' modules do, in torch.

A quick check of a family's description, without a graph: the modules that are traced run with the operators
of TensorRT, which torch computes too.
"""

from dataclasses import replace

import pytest
import torch

from smelt.export.graphs.export_graph import model_graphs
from smelt.models.families.registry import FAMILIES
from smelt.quantization.emit import exporting_to
from tests.support.models import family_models

TARGET = "tensorrt"


def padded_batch(model):
    """The second of three texts is padded."""
    batch = family_models.example_batch(model)
    batch["attention_mask"][1, 5:] = 0
    return batch


def expected_logits(model, batch):
    positions = {}
    if FAMILIES[model.config.model_type].architecture == "decoder":
        positions = {"position_ids": positions_of(batch["attention_mask"])}
    with torch.no_grad():
        return family_models.run_model(model, batch, **positions).logits


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def replaced_logits(model, batch):
    """The logits of the modules of the graphs of `model`; a decoder's step by step."""
    graphs = model_graphs(model)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    architecture = FAMILIES[model.config.model_type].architecture
    with torch.no_grad(), exporting_to(TARGET):
        if architecture == "encoder":
            types = [torch.zeros_like(ids)] * (len(graphs[0].inputs) - 2)
            return graphs[0].module(ids, mask, *types)
        past = [cache[:1].repeat(len(ids), 1, 1, 1)[:, :, :0] for cache in example_caches(graphs[-1])]
        if architecture == "decoder":
            return graphs[0].module(ids, mask, positions_of(mask), past, torch.tensor(0))[0]
        _, *cross = graphs[0].module(ids, mask)
        steps = []
        for column in batch["decoder_input_ids"].split(1, dim=1):
            logits, *past = graphs[1].module(column, mask, past, cross)
            steps.append(logits)
        return torch.stack(steps, dim=1)


def example_caches(graph):
    return next(value for value in graph.inputs if isinstance(value, list))


def real_tokens(model, batch, logits):
    """The logits of tokens that are not padding."""
    if FAMILIES[model.config.model_type].architecture == "decoder":
        return logits[batch["attention_mask"].bool()]
    return logits


def test_replaced_forwards_equal_a_model_with_narrow_embeddings():
    check_replaced_forwards("electra", embedding_size=16)


@pytest.mark.parametrize("kind", ["relu", "gated-gelu", "gated-silu"])
def test_replaced_forwards_equal_t5_with_a_head_of_its_own(kind):
    """Flan-T5 and ByT5 have GELU gates, UL2 and Flan-UL2 SiLU gates."""
    check_replaced_forwards("t5", gated=True, feed_forward_proj=kind)


@pytest.mark.parametrize("name", family_models.NAMES)
def test_replaced_forwards_equal_the_model(name):
    check_replaced_forwards(name)


def check_replaced_forwards(name, **config):
    model = family_models.load(name, **config)
    batch = padded_batch(model)
    expected = real_tokens(model, batch, expected_logits(model, batch))
    logits = real_tokens(model, batch, replaced_logits(model, batch))
    assert expected.std() > 1e-2
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_undeclared_module_computation_is_not_replaced(monkeypatch):
    """ALBERT's attention module adds its input and applies a norm: without the field the graph lacks both."""
    incomplete = replace(FAMILIES["albert"], attention_fields={"residual_norm": None})
    monkeypatch.setitem(FAMILIES, "albert", incomplete)
    with pytest.raises(AssertionError):
        check_replaced_forwards("albert")
