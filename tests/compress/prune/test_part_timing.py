"""Parts that are timed: they compute what they stand for, and larger ones take longer."""

import numpy as np
import pytest
import torch
from onnx import numpy_helper
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from smelt.compress.prune import latency_costs
from smelt.compress.prune.costs import LinearShape
from smelt.compress.prune.latency_costs import TimedAttention, TimedPart, time_parts

QKV = (LinearShape(16, 24, bias=True), LinearShape(16, 12, bias=True), LinearShape(16, 12, bias=True))
OUT = LinearShape(24, 16, bias=True)
READS = TimedPart(7, QKV, OUT, TimedAttention(keys=2, queries=2, width=6, context_length=7))
STEPS = TimedPart(1, QKV, OUT, TimedAttention(keys=2, queries=2, width=6, context_length=9, cached=True))
LOOKS = TimedPart(1, QKV[:1], OUT, TimedAttention(keys=2, queries=2, width=6, context_length=9, cached=True))
GATED = TimedPart(
    5, (LinearShape(16, 32), LinearShape(16, 32)), LinearShape(32, 16), activation="silu", gated=True
)
PACKED = TimedPart(5, (LinearShape(16, 64),), LinearShape(32, 16), activation="gelu", gated=True)
PAIRS = TimedPart(3, (LinearShape(16, 32, rank=4, bias=True),), LinearShape(32, 16, rank=3))
ALONE = TimedPart(6, QKV[1:])
PARTS = {"reads": READS, "steps": STEPS, "looks": LOOKS, "gated": GATED, "packed": PACKED, "pairs": PAIRS,
         "alone": ALONE}  # fmt: skip


def by_hand(part, graph):
    """What attention between two products gives, in numpy and torch, from the weights in the graph."""
    weights = [numpy_helper.to_array(t) for t in graph._tensors]
    matrices = [w for w in weights if w.ndim == 2]
    biases = [w for w in weights if w.ndim == 1 and w.dtype == np.float32]
    projected = torch.from_numpy(graph.feeds["x"] @ matrices[0] + biases[0])
    heads = part.heads
    query, key, value = projected.split([24, 12, 12], dim=1)
    query, key, value = (
        t.view(part.tokens, -1, heads.width).transpose(0, 1).unsqueeze(0) for t in (query, key, value)
    )
    if heads.cached:
        key = torch.from_numpy(graph.feeds["keys"]).transpose(1, 2).unsqueeze(0)
        value = torch.from_numpy(graph.feeds["values"]).unsqueeze(0)
    attended = scaled_dot_product_attention(query, key, value, enable_gqa=True, scale=1.0)
    return attended[0].transpose(0, 1).reshape(part.tokens, 24).numpy() @ matrices[1] + biases[1]


@pytest.mark.parametrize("part", [READS, STEPS], ids=["reads", "steps"])
def test_onnx_attention_part_equals_reference(part):
    import onnxruntime

    graph = latency_costs._OnnxPart(part, int8=False)
    for name in graph.feeds:  # as they are drawn, every score is about 0
        graph.feeds[name] = 50 * graph.feeds[name]
    session = onnxruntime.InferenceSession(graph.model().SerializeToString())
    np.testing.assert_allclose(session.run(None, graph.feeds)[0], by_hand(part, graph), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("on", ["ort-cpu", "ort-cpu-int8"])
@pytest.mark.parametrize("name", list(PARTS))
def test_every_timed_part_runs_with_expected_output_shape(name, on):
    part = PARTS[name]
    (output,) = latency_costs._onnx_call(part, on == "ort-cpu-int8", 1)()
    wide = part.output_layer.outputs if part.output_layer else sum(p.outputs for p in part.input_layers)
    assert output.shape == (part.tokens, wide)


@pytest.mark.parametrize("name", list(PARTS))
def test_torch_part_has_expected_flops(name):
    part = PARTS[name]
    products = [*part.input_layers, *([part.output_layer] if part.output_layer else [])]
    with FlopCounterMode(display=False) as counter:
        latency_costs._TorchPart(part)()
    assert counter.get_total_flops() / 2 == part.tokens * sum(p.num_weights for p in products)


@pytest.mark.parametrize("on", ["ort-cpu", "ort-cpu-int8", "torch"])
def test_much_larger_part_takes_longer(on):
    small, large = (
        TimedPart(tokens, (LinearShape(64, wide),), LinearShape(wide, 64))
        for tokens, wide in ((1, 32), (64, 512))
    )
    times = time_parts([small, large], on, 1)
    assert 0 < times[0] < times[1]
