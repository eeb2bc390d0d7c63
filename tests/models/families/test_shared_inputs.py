"""What feeds products, of every family: each product is in one feed, and a maker's rows may be scaled."""

from collections import Counter

import pytest
import torch

from smelt.models.families.registry import blocks_of, shared_inputs
from tests.support.models import family_models


@pytest.mark.parametrize("family", family_models.NAMES)
def test_every_linear_layer_has_one_input(family):
    model = family_models.load(family)
    readers = Counter(name for feed in shared_inputs(model) for name in feed.consumers)
    parts = [part for block in blocks_of(model) for part in block.parts]
    assert readers == Counter({name: 1 for part in parts for name in part.linear_layers})
    produced = {name for feed in shared_inputs(model) if feed.producer for name in feed.consumers}
    # the rows of values that are packed by heads are not consecutive
    outs = {a.out for block in blocks_of(model) for a in block.attentions if a.packed != "per_head"}
    feeds = [part for block in blocks_of(model) for part in block.feed_forwards]
    config = model.config.to_dict()
    scalable = {feed.down for feed in feeds if feed.gate or config[feed.activation_key] == "relu"}
    assert produced == outs | scalable


@pytest.mark.parametrize("family", family_models.NAMES)
@torch.no_grad()
def test_rescaling_producer_and_consumer_preserves_outputs(family):
    model = family_models.load(family)
    batch = family_models.example_batch(model)
    before = family_models.run_model(model, batch).logits
    draw = torch.Generator().manual_seed(0)
    for feed in shared_inputs(model):
        if feed.producer is None:
            continue
        maker, (name,) = model.get_submodule(feed.producer), feed.consumers
        rows = slice(feed.start, feed.stop)
        scales = torch.rand(len(maker.weight[rows]), generator=draw) + 0.5
        maker.weight[rows] /= scales[:, None]
        if maker.bias is not None:
            maker.bias[rows] /= scales
        heads = scales.reshape(-1, 1, feed.head_dim) if feed.repeats > 1 else scales.reshape(1, 1, -1)
        model.get_submodule(name).weight.mul_(heads.expand(-1, feed.repeats, -1).flatten())
    torch.testing.assert_close(family_models.run_model(model, batch).logits, before, rtol=1e-4, atol=1e-4)
