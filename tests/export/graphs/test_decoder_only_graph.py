"""The graph of a decoder-only model: prompts, steps and padding on the left equal torch's."""

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Columns
from smelt.export.convert_to_half import convert_to_half
from smelt.export.graphs.decoder_only import unfused_heads_warning
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationSettings
from smelt.generation.generating_runners import token_nll
from smelt.generation.search import generate
from smelt.runtimes.registry import open_folder, open_runner
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import causal, every_family, tiny

PAD = 0
IDS = np.random.default_rng(0).integers(1, 290, (3, 9))
MASK = np.ones_like(IDS)
MASK[1, :4], MASK[2, :8] = 0, 0


def _ctx(out, folder):
    out.mkdir()
    causal.write_lines(folder / "t.txt", 2)
    data = {"train": read_split("t.txt", "language-modeling", Columns(), folder)}
    return harness.make_context(out, "language-modeling", data=data)


def _export(folder, out, **settings):
    ctx = _ctx(out, folder)
    Onnx()(tiny.as_artifact(folder, "language-modeling"), OnnxSettings(**settings), ctx)
    assert set(message_codes(ctx.warnings)) <= {"attention-not-fused"}
    return ctx, open_folder(out, "onnx", settings["target"], 1)


def _same(graph, parent, tolerance):
    """Compare all that a runner does with its parent's."""
    close = {"atol": tolerance, "rtol": 0}
    full_mask = np.ones_like(IDS)
    full_mask[1, 6:] = 0
    full = graph.forward(Batch(IDS, full_mask))
    np.testing.assert_allclose(
        full[full_mask == 1], parent.forward(Batch(IDS, full_mask))[full_mask == 1], **close
    )
    states = [r.encode(Batch(IDS, MASK)) for r in (graph, parent)]
    row_order = np.array([2, 1, 1])
    for tokens in (IDS[:, -1], IDS[:, 0], None, IDS[:, 1]):
        if tokens is None:  # in the middle of a text the rows change places, as beams do
            states = [r.reorder_cache(s, row_order) for r, s in zip((graph, parent), states, strict=True)]
            continue
        actual, expected = (r.decode_step(s, tokens) for r, s in zip((graph, parent), states, strict=True))
        np.testing.assert_allclose(actual, expected, **close)
    single_states = [r.start(1) for r in (graph, parent)]
    for chunk in (slice(0, 4), slice(4, 9)):  # a long text in stretches
        actual, expected = (
            r.extend(s, IDS[:1, chunk], full_mask[:1, chunk])
            for r, s in zip((graph, parent), single_states, strict=True)
        )
        np.testing.assert_allclose(actual, expected, **close)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "phi"])
def test_fused_graph_equals_torch_and_generate(family, tmp_path):
    folder = every_family.make_model(tmp_path / family, family)
    ctx, graph = _export(folder, tmp_path / "out", target="ort-cpu")
    assert ctx.details["parity"]["model"]["largest"] < 1e-4
    counts = ctx.details["graphs"]["model"]["operators"]
    assert counts["GroupQueryAttention"] == 2
    assert "Softmax" not in counts
    with open_runner(tiny.as_artifact(folder, "language-modeling")) as parent:
        _same(graph, parent, 2e-5)
        np.testing.assert_allclose(token_nll(graph, IDS), token_nll(parent, IDS), atol=1e-4)
    other = AutoModelForCausalLM.from_pretrained(folder).eval()
    for num_beams in (1, 3):
        options = {"max_new_tokens": 8, "num_beams": num_beams, "do_sample": False}
        expected = other.generate(
            torch.from_numpy(IDS), attention_mask=torch.from_numpy(MASK), pad_token_id=PAD, **options
        )[:, 9:].tolist()
        actual = generate(graph, Batch(IDS, MASK), GenerationSettings(max_new_tokens=8, num_beams=num_beams))
        padded = [row + [PAD] * (8 - len(row)) for row in actual]
        assert padded == [row + [PAD] * (8 - len(row)) for row in expected]
    with raises_code("unsupported-batch", InputError):
        graph.extend(graph.encode(Batch(IDS, MASK)), IDS, MASK)


def test_names_equal_optimum_and_tied_weights_are_stored_once(tmp_path):
    folder = causal.write_model(tmp_path / "qwen2", "qwen2")
    _, graph = _export(folder, tmp_path / "out", target="tensorrt")
    model = onnx.load(tmp_path / "out" / "model.onnx")
    shapes = {
        i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input
    }
    assert shapes["input_ids"] == shapes["position_ids"] == ["batch", "sequence_length"]
    assert shapes["attention_mask"] == ["batch", "total_sequence_length"]
    assert shapes["past_key_values.1.value"] == ["batch", 2, "past_sequence_length", 16]
    assert [o.name for o in model.graph.output][:3] == ["logits", "present.0.key", "present.0.value"]
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert sum(list(t.dims) in ([299, 64], [64, 299]) for t in model.graph.initializer) == 1
    with open_runner(tiny.as_artifact(folder, "language-modeling")) as parent:
        _same(graph, parent, 2e-5)
        convert_to_half(model, "model")
        half = tmp_path / "half"
        half.mkdir()
        (half / "config.json").write_bytes((folder / "config.json").read_bytes())
        onnx.save(model, half / "model.onnx")
        _same(open_folder(half, "onnx", "tensorrt", 1), parent, 0.05)


@pytest.mark.parametrize(
    ("width", "rotary", "fits"), [(8, False, True), (12, False, False), (24, True, False)]
)
def test_unfused_attention_heads_are_reported(width, rotary, fits):
    attention = SimpleNamespace(heads=SimpleNamespace(head_dim=width), rotary_dim=width if rotary else 0)
    warning = unfused_heads_warning([attention], "ort-cpu")
    assert (warning is None) == fits
    assert warning is None or (warning.code, f" {width} " in warning.message) == ("attention-not-fused", True)
    assert unfused_heads_warning([attention], "openvino") is None  # which has no such operator


def test_pruned_int8_model_is_exported_with_its_head_counts(tmp_path):
    folder = causal.write_model(tmp_path / "qwen2", "qwen2")
    ctx = _ctx(tmp_path / "pruned", folder)
    Prune()(tiny.as_artifact(folder, "language-modeling"), PruneSettings(importance="magnitude"), ctx)
    codes = _ctx(tmp_path / "codes", folder)
    Quantize()(tiny.as_artifact(ctx.out, "language-modeling"), QuantizeSettings(), codes)
    exported, graph = _export(codes.out, tmp_path / "out", target="ort-cpu")
    counts = exported.details["graphs"]["model"]["operators"]
    # per layer: queries, keys and values in one, output, gate, up, down; and the head
    assert counts["DynamicQuantizeMatMul"] == 2 * 5 + 1
    assert counts["GroupQueryAttention"] == 2
    with open_runner(tiny.as_artifact(codes.out, "language-modeling")) as parent:
        batch = Batch(IDS, MASK)
        actual, expected = (r.decode_step(r.encode(batch), IDS[:, -1]) for r in (graph, parent))
        assert np.abs(actual - expected).mean() < 0.05 * expected.std()


def test_unsupported_head_sizes_use_standard_operators(tmp_path):
    folder = causal.write_model(tmp_path / "llama", "llama", head_dim=12, num_hidden_layers=1)
    ctx, graph = _export(folder, tmp_path / "out", target="ort-cpu")
    assert message_codes(ctx.warnings) == ["attention-not-fused"]
    assert " 12 " in ctx.warnings[0].message
    assert "GroupQueryAttention" not in ctx.details["graphs"]["model"]["operators"]
    with open_runner(tiny.as_artifact(folder, "language-modeling")) as parent:
        _same(graph, parent, 2e-5)
