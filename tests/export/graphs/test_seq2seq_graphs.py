"""T5, BART and mBART as ONNX graphs: what they compute equals transformers, token for token."""

import warnings
from collections import Counter

import onnx
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.compress.share_weights import ShareWeightsSettings, share_layers
from smelt.data.splits import Example, Split
from smelt.export.graphs.attention import attention_modules, pack_projections
from smelt.export.graphs.export_graph import Seq2SeqEncoder
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings, TensorrtSettings
from smelt.export.tensorrt.profiles import profile_ranges
from smelt.export.tensorrt.stage import plan_graphs
from smelt.generation.config import GenerationSettings
from smelt.generation.search import generate
from smelt.models.checkpoint import load_model, load_tokenizer, write_text_rules
from smelt.models.text_rules import TextRules
from smelt.runtimes.predict_texts import make_batches
from smelt.runtimes.registry import open_folder, open_runner
from tests.support import harness
from tests.support.models import seq2seq, tiny
from tests.support.pairs import matrix

ROWS = Split("rows", tuple(Example(s, (s,)) for s in tiny.SENTENCES))
EVERY = ["t5", "t5-gated", "bart", "mbart"]
NEW_TOKENS = 20  # beyond T5's farthest distance, 12


def make(name, folder):
    if name in ("bart", "mbart"):
        seq2seq.write_bart(folder, kind=name, scale_embedding=name == "mbart")
        if name == "mbart":
            rules = TextRules(source_language="en_XX", target_language="de_DE")
            write_text_rules(folder, rules)
        return folder
    seq2seq.write_t5(folder, gated=name == "t5-gated")
    write_text_rules(folder, TextRules(prefix=seq2seq.PREFIX))
    return folder


def run(stage, folder, settings, out):
    return harness.run_stage(stage, settings, folder, out, "summarization", ROWS)


@pytest.fixture(scope="module", params=EVERY if matrix.is_full_matrix() else ["t5-gated", "mbart"])
def exported(request, tmp_path_factory):
    base = tmp_path_factory.mktemp(request.param)
    folder = make(request.param, base / "model")
    return folder, run(Onnx(), folder, OnnxSettings(), base / "onnx")


def theirs(folder, batch):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            torch.from_numpy(batch.input_ids), attention_mask=torch.from_numpy(batch.attention_mask),
            num_beams=1, do_sample=False, max_new_tokens=NEW_TOKENS,
        )[:, 1:].tolist()  # fmt: skip
    eos = model.generation_config.eos_token_id
    return [row[: row.index(eos) + 1] if eos in row else row for row in out]


def test_greedy_in_onnx_and_torch_equals_generate(exported):
    folder, ctx = exported
    tokenizer = load_tokenizer(ctx.out)
    ((_, batch),) = make_batches(tiny.SENTENCES, tokenizer, 16, 40)
    assert set(batch.attention_mask.sum(axis=1)) != {batch.input_ids.shape[1]}, "no row is padded"
    expected = theirs(folder, batch)
    assert len({tuple(row) for row in expected}) > 3, "every text gave the same: the test shows nothing"
    assert max(map(len, expected)) > 13
    generation = GenerationSettings(max_new_tokens=NEW_TOKENS)
    for runner in (open_runner(tiny.as_artifact(folder), 1), open_folder(ctx.out, "onnx", "ort-cpu", 1)):
        with runner:
            assert generate(runner, batch, generation) == expected


def test_graphs_contain_fused_operators(exported):
    _, ctx = exported
    for name, attentions in (("encoder_model", 2), ("decoder_with_past_model", 4)):
        op_counts = Counter(n.op_type for n in onnx.load(ctx.out / f"{name}.onnx").graph.node)
        split = op_counts["Softmax"]  # masked self-attention of an encoder
        assert op_counts["FusedMatMul"] == 2 * split
        assert op_counts["MultiHeadAttention"] + split == attentions
        assert split == 0 or name == "encoder_model"
        assert op_counts["Log"] == 0, "T5's buckets are looked up, not counted in the graph"
        assert op_counts["Reciprocal"] == op_counts["Tanh"] == 0, (
            "norms and GELU are not in a form that is fused"
        )
        assert ctx.details["parity"][name]["largest"] < 2e-3
    assert ctx.warnings == []


def test_prefix_and_languages_are_exported(exported):
    folder, ctx = exported
    text = tiny.SENTENCES[0]
    ((_, batch),) = make_batches([text], load_tokenizer(ctx.out), 1, 40)
    source_tokenizer = load_tokenizer(folder)
    if "T5" in str(load_model(folder)[0].config.architectures):
        assert batch.input_ids[0].tolist() == source_tokenizer(seq2seq.PREFIX + text)["input_ids"]
    else:
        assert batch.input_ids[0].tolist() == source_tokenizer(text)["input_ids"]
    if hasattr(source_tokenizer, "lang_code_to_id"):
        assert batch.input_ids[0, 0] == source_tokenizer.lang_code_to_id["en_XX"]
        with open_folder(ctx.out, "onnx", "ort-cpu", 1) as runner:
            first = {row[0] for row in generate(runner, batch, GenerationSettings(max_new_tokens=3))}
        assert first == {source_tokenizer.lang_code_to_id["de_DE"]}


@pytest.mark.parametrize("name", ["t5-gated", "mbart"] if matrix.is_full_matrix() else ["mbart"])
def test_int8_graphs_equal_torch_after_pruning(name, tmp_path):
    folder = make(name, tmp_path / "model")
    settings = PruneSettings(targets=["heads", "ffn"], keep_ratio=0.5, importance="magnitude")
    pruned = run(Prune(), folder, settings, tmp_path / "pruned").out
    quantized = run(Quantize(), pruned, QuantizeSettings(), tmp_path / "quantized").out
    ctx = run(Onnx(), quantized, OnnxSettings(), tmp_path / "onnx")
    op_counts = Counter(n.op_type for n in onnx.load(ctx.out / "decoder_with_past_model.onnx").graph.node)
    assert op_counts["MatMul"] == op_counts["Gemm"] == 0
    assert op_counts["DynamicQuantizeMatMul"] == 2 * (6 + (name == "t5-gated")) + 1
    assert ctx.details["parity"]["decoder_with_past_model"]["mean"] < 0.05


@pytest.mark.parametrize("name", ["t5", "bart"] if matrix.is_full_matrix() else ["t5"])
def test_fp16_standard_operators_pass_parity(name, tmp_path):
    folder = make(name, tmp_path / "model")
    ctx = run(Onnx(), folder, OnnxSettings(target="tensorrt", dtype="fp16"), tmp_path / "onnx")
    for graph in ("encoder_model", "decoder_with_past_model"):
        model = onnx.load(ctx.out / f"{graph}.onnx")
        assert {n.domain for n in model.graph.node} <= {"", "ai.onnx"}
        floats = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
        assert all(len(t.dims) < 2 for t in floats)  # of norms
    assert 0 < ctx.details["parity"]["decoder_with_past_model"]["mean"] < 0.01
    [ranges], limit = profile_ranges(ctx.out, TensorrtSettings(max_new_tokens=30), ctx)
    assert limit == (48 if name == "bart" else None)  # T5 has no table of positions that could end
    shapes = plan_graphs(ctx.out, [ranges], limit, ctx.warnings)
    assert ctx.warnings == []
    past = shapes[ctx.out / "decoder_with_past_model.onnx"][0]["past_key_values.0.decoder.key"]
    assert [shape[2] for shape in past] == [0, ranges["past"].opt, 29]


def test_shared_cross_attention_keys_are_computed_once(tmp_path):
    model, _ = load_model(tiny.write_marian(tmp_path / "model", decoder_layers=3))
    ids = torch.randint(5, 20, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    share_layers(model, [], ShareWeightsSettings(stacks=["decoder_layers"]))
    encoder = Seq2SeqEncoder(model)
    assert encoder.pack.sizes == [32] * 4
    with torch.no_grad():
        hidden, *caches = encoder(ids, mask)
        for layer_index, layer in enumerate(model.model.decoder.layers):
            for cache, product in zip(
                caches[2 * layer_index : 2 * layer_index + 2],
                (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj),
                strict=True,
            ):
                torch.testing.assert_close(cache.transpose(1, 2).flatten(2), product(hidden))


def test_layers_with_shared_projections_share_one_pack(tmp_path):
    model, _ = load_model(tiny.write_marian(tmp_path / "model", encoder_layers=3))
    share_layers(model, [], ShareWeightsSettings(stacks=["encoder_layers"]))
    pack_projections(attention_modules(model, "encoder_layers"))
    first, second, third = (layer.self_attn.pack for layer in model.model.encoder.layers)
    assert first is second
    assert first is not third
