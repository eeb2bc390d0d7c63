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
from smelt.generation.config import GenerationSettings, resolve_generation
from smelt.generation.runners import token_nll
from smelt.generation.search import generate, generate_in_graph, generate_resolved
from smelt.runtimes.backend import Batch
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
    rows = read_split("t.txt", "language-modeling", Columns(), folder)
    return harness.make_context(out, "language-modeling", {"train": rows})


def exported(family, settings=INT8):
    """Return the folder of a tiny model, and that of its graphs."""

    def make(home):
        home.mkdir()
        more = {"n_embd": 64, "n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
        if family in causal.FAMILIES:
            folder = causal.write_model(home / "m", family, **more)
        else:  # a window of few tokens (Mistral), norms of queries and keys (Qwen3)
            folder = every_family.write_model(home / "m", family, **more)
        Onnx()(tiny.as_artifact(folder, "language-modeling"), settings, context(home / "out", folder))

    home = make_once(f"int8-caches-{family}-{settings.generation_graph}", make)
    return home / "m", home / "out"


def torch_with_rounded_caches(folder, graphs):
    """Return the model of transformers; attention sees keys and values as the graph's scales round them."""
    model = onnx.load(graphs / "model.onnx")
    scales = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name.endswith("_scale")}
    found = AutoModelForCausalLM.from_pretrained(folder).eval()

    def rounded(x, layer, word):
        scale = torch.tensor(scales[f"past_key_values.{layer}.{word}_scale"])
        return torch.clamp(torch.round(x / scale), -128, 127) * scale

    def attend(module, query, key, value, mask, **more):
        key, value = rounded(key, module.layer_idx, "key"), rounded(value, module.layer_idx, "value")
        return sdpa_attention_forward(module, query, key, value, mask, **more)

    AttentionInterface.register(ROUNDED, attend)
    AttentionMaskInterface.register(ROUNDED, sdpa_mask)
    found.set_attn_implementation(ROUNDED)
    return found


@torch.no_grad()
def continued(model, tokens):
    """Return what torch adds to the rows, which are padded on the left, without a cache.

    Places count from the beginning of a row, padding included, as the graph's do. For float caches that is
    the same as from the first token; which codes a rotated key has depends on it.
    """
    ids, mask = torch.from_numpy(IDS), torch.from_numpy(MASK)
    for _ in range(tokens):
        places = torch.arange(ids.shape[1])[None]
        if not getattr(model.config, "rope_parameters", None):  # a table of places, which the graph reads
            places = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=places.expand_as(ids), use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids[:, IDS.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral", "qwen3"])
def test_tokens_and_logits_are_those_of_torch_with_rounded_caches(family):
    folder, out = exported(family)
    model, ids = torch_with_rounded_caches(folder, out), torch.from_numpy(IDS)
    wanted = continued(model, 8)
    with open_folder(out, "onnx", "ort-cpu", 1) as graph:
        got = generate(graph, Batch(IDS, MASK), GenerationSettings(max_new_tokens=8))
        assert got == wanted
        with torch.no_grad():
            logits = model(ids).logits.numpy()
        piece = graph.start(1)
        fed = [graph.extend(piece, IDS[:1, a:b], MASK[:1, a:b]) for a, b in ((0, 5), (5, 6), (6, 9))]
        np.testing.assert_allclose(np.concatenate(fed, axis=1), logits[:1], atol=2e-4 * logits.std(), rtol=0)
        losses = torch.nn.functional.cross_entropy(
            torch.from_numpy(logits[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none"
        )
        np.testing.assert_allclose(token_nll(graph, IDS), losses.numpy(), atol=2e-3)
    floats = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():  # rounding is seen at all
        assert np.abs(floats(ids).logits.numpy() - logits).mean() > 5e-3 * logits.std()


@pytest.mark.parametrize("beams", [1, 3])
def test_one_graph_of_all_steps_says_what_single_steps_say(beams):
    _, out = exported("llama")
    batch = Batch(IDS, MASK)
    with open_folder(out, "onnx", "ort-cpu", 1) as graph:
        decoding = resolve_generation(GenerationSettings(num_beams=beams, max_new_tokens=9), graph)
        found = generate_in_graph(graph, batch, decoding)
        assert found == generate_resolved(graph, batch, decoding)
        held = graph.encode(batch).backend_state.caches
        assert {str(cache.numpy().dtype) for cache in held} == {"int8"}


def test_facts_say_bytes_and_rows_and_how_far_logits_moved(tmp_path):
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


def test_without_loops_and_with_coded_weights_the_step_alone_is_written(tmp_path):
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


def test_scales_that_are_too_small_are_told(tmp_path, monkeypatch):
    """As of rows that are unlike all others: the codes are right, and the logits far off."""
    folder = causal.write_model(tmp_path / "m", "llama")
    before = kv_cache.cache_scales
    monkeypatch.setattr(kv_cache, "cache_scales", lambda largest: before(largest / 50))
    with raises_code("parity-failed", ParityError):
        Onnx()(tiny.as_artifact(folder, "language-modeling"), INT8, context(tmp_path / "out", folder))


def test_a_runtime_without_such_caches_is_named(tmp_path, monkeypatch):
    folder, out = exported("llama")
    shutil.copytree(out, tmp_path / "out")
    before = kv_cache.quantize_kv_cache

    def unknown(model, scales):
        before(model, scales)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "k_quant_type":
                    attribute.s = b"PER_PLANET"

    monkeypatch.setattr(kv_cache, "quantize_kv_cache", unknown)
    ctx = context(tmp_path / "again", folder)
    with raises_code("unsupported-operator", RunError):
        Onnx()(tiny.as_artifact(folder, "language-modeling"), INT8, ctx)
