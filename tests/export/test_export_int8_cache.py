"""Graphs with int8 caches say what torch says whose keys and values are rounded with the same scales."""

import shutil

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import ParityError, RunError
from smelt.data.splits import Columns
from smelt.export import kv_cache
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationSettings, resolve_generation
from smelt.generation.generating_runners import token_nll
from smelt.generation.search import generate, generate_in_graph, generate_resolved
from smelt.runtimes.registry import open_folder
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import causal, every_family, tiny
from tests.support.shared_folders import make_once

INT8 = OnnxSettings(kv_cache="int8")
IDS = np.random.default_rng(0).integers(1, 290, (3, 9))
MASK = np.ones_like(IDS)
MASK[1, :4], MASK[2, :8] = 0, 0
ROUNDED = "rounded-caches"


def context(out, folder):
    causal.write_lines(folder / "t.txt", 2)
    split = read_split("t.txt", "language-modeling", Columns(), folder)
    return harness.make_context(out, "language-modeling", {"train": split})


def exported(family, settings=INT8):
    """Return the folder of a tiny model, and that of its graphs."""

    def make(home):
        home.mkdir()
        config_options = {"n_embd": 64, "n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
        if family in causal.FAMILIES:
            folder = causal.write_model(home / "m", family, **config_options)
        else:  # a window of few tokens (Mistral), norms of queries and keys (Qwen3)
            folder = every_family.write_model(home / "m", family, **config_options)
        Onnx()(tiny.as_artifact(folder, "language-modeling"), settings, context(home / "out", folder))

    home = make_once(f"int8-caches-{family}-{settings.generation_graph}", make)
    return home / "m", home / "out"


def torch_with_rounded_caches(folder, graphs):
    """Return the model of transformers; attention sees keys and values as the graph's scales round them."""
    model = onnx.load(graphs / "model.onnx")
    scales = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name.endswith("_scale")}
    torch_model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def rounded(x, layer, cache_kind):
        scale = torch.tensor(scales[f"past_key_values.{layer}.{cache_kind}_scale"])
        return torch.clamp(torch.round(x / scale), -128, 127) * scale

    def attend(module, query, key, value, mask, **more):
        key, value = rounded(key, module.layer_idx, "key"), rounded(value, module.layer_idx, "value")
        return sdpa_attention_forward(module, query, key, value, mask, **more)

    AttentionInterface.register(ROUNDED, attend)
    AttentionMaskInterface.register(ROUNDED, sdpa_mask)
    torch_model.set_attn_implementation(ROUNDED)
    return torch_model


@torch.no_grad()
def continued(model, tokens):
    """Return what torch adds to the rows, which are padded on the left, without a cache.

    Places count from the beginning of a row, padding included, as the graph's do. For float caches that is
    the same as from the first token; which codes a rotated key has depends on it.
    """
    ids, mask = torch.from_numpy(IDS), torch.from_numpy(MASK)
    for _ in range(tokens):
        positions = torch.arange(ids.shape[1])[None]
        if not getattr(model.config, "rope_parameters", None):  # a table of places, which the graph reads
            positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(
            ids, attention_mask=mask, position_ids=positions.expand_as(ids), use_cache=False
        ).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids[:, IDS.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral", "qwen3"])
def test_tokens_and_logits_equal_torch_with_rounded_caches(family):
    folder, out = exported(family)
    model, ids = torch_with_rounded_caches(folder, out), torch.from_numpy(IDS)
    expected_tokens = continued(model, 8)
    with open_folder(out, "onnx", "ort-cpu", 1) as graph:
        graph_tokens = generate(graph, Batch(IDS, MASK), GenerationSettings(max_new_tokens=8))
        assert graph_tokens == expected_tokens
        with torch.no_grad():
            logits = model(ids).logits.numpy()
        state = graph.start(1)
        step_logits = [graph.extend(state, IDS[:1, a:b], MASK[:1, a:b]) for a, b in ((0, 5), (5, 6), (6, 9))]
        np.testing.assert_allclose(
            np.concatenate(step_logits, axis=1), logits[:1], atol=2e-4 * logits.std(), rtol=0
        )
        losses = torch.nn.functional.cross_entropy(
            torch.from_numpy(logits[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none"
        )
        np.testing.assert_allclose(token_nll(graph, IDS), losses.numpy(), atol=2e-3)
    floats = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():  # rounding is seen at all
        assert np.abs(floats(ids).logits.numpy() - logits).mean() > 5e-3 * logits.std()


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_graph_equals_step_by_step_decoding(beams):
    _, out = exported("llama")
    batch = Batch(IDS, MASK)
    with open_folder(out, "onnx", "ort-cpu", 1) as graph:
        decoding = resolve_generation(GenerationSettings(num_beams=beams, max_new_tokens=9), graph)
        generated = generate_in_graph(graph, batch, decoding)
        assert generated == generate_resolved(graph, batch, decoding)
        cache_values = graph.encode(batch).backend_state.caches
        assert {str(cache.numpy().dtype) for cache in cache_values} == {"int8"}


def test_details_contain_bytes_samples_and_logits_difference(tmp_path):
    folder = causal.write_model(tmp_path / "m", "llama")
    ctx = context(tmp_path / "out", folder)
    Onnx()(tiny.as_artifact(folder, "language-modeling"), INT8, ctx)
    details = ctx.details["kv_cache"]
    # keys and values of 2 layers with 2 heads of 16
    assert details["bytes_per_token"] == {"float32": 4 * 2 * 2 * 2 * 16, "int8": 2 * 2 * 2 * 16}
    assert (details["dtype"], details["split"], details["rows"]) == ("int8", "train", 12)
    assert 0 < details["against_float"]["mean"] < 0.1
    assert details["codes"] > 10_000
    assert details["rounded_otherwise"] <= details["codes"] * 1e-3
    assert ctx.details["parity"]["model"]["largest"] < 1e-4  # of the float graph, before


def test_quantized_model_without_generation_graph_writes_step_only(tmp_path):
    folder = causal.write_model(tmp_path / "m", "qwen2")
    codes = context(tmp_path / "codes", folder)
    Quantize()(
        tiny.as_artifact(folder, "language-modeling"), QuantizeSettings(scheme="int4", group_size=16), codes
    )
    ctx = context(tmp_path / "out", folder)
    settings = OnnxSettings(kv_cache="int8", generation_graph=False)
    Onnx()(tiny.as_artifact(codes.out, "language-modeling"), settings, ctx)
    assert [p.name for p in ctx.out.glob("*.onnx*")] == ["model.onnx"]
    assert ctx.details["kv_cache"]["bytes_per_token"]["int8"] == 128
    with open_folder(ctx.out, "onnx", "ort-cpu", 1) as graph:
        assert len(generate(graph, Batch(IDS, MASK), GenerationSettings(max_new_tokens=3))[0]) > 0


def test_too_small_scales_are_reported(tmp_path, monkeypatch):
    """As of rows that are unlike all others: the codes are right, and the logits far off."""
    folder = causal.write_model(tmp_path / "m", "llama")
    original = kv_cache.cache_scales
    monkeypatch.setattr(kv_cache, "cache_scales", lambda largest: original(largest / 50))
    with raises_code("parity-failed", ParityError):
        Onnx()(tiny.as_artifact(folder, "language-modeling"), INT8, context(tmp_path / "out", folder))


def test_runtime_without_int8_caches_is_named(tmp_path, monkeypatch):
    folder, out = exported("llama")
    shutil.copytree(out, tmp_path / "out")
    original = kv_cache.quantize_kv_cache

    def unknown(model, scales):
        original(model, scales)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "k_quant_type":
                    attribute.s = b"PER_PLANET"

    monkeypatch.setattr(kv_cache, "quantize_kv_cache", unknown)
    ctx = context(tmp_path / "again", folder)
    with raises_code("unsupported-operator", RunError):
        Onnx()(tiny.as_artifact(folder, "language-modeling"), INT8, ctx)
