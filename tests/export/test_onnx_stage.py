import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
import transformers
from pydantic import ValidationError

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Example, Split
from smelt.export.autotune import available_cores
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.backend import Batch
from smelt.models.checkpoint import load_model, load_tokenizer, save_model
from smelt.models.edits import apply_edits, replace_module
from smelt.models.tokenizer import RustTokenizer, open_tokenizer, read_tokenizer_info
from smelt.runtimes.graph_walk import iter_initializers
from smelt.runtimes.registry import open_folder
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes


def tokenizer_files(folder):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnop"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "model_max_length": 32})
    )


def artifact(folder, target=None):
    return SimpleNamespace(
        path=folder,
        format="onnx" if target else "torch",
        manifest=SimpleNamespace(details={"target": target}),
    )


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    """Random Marian with fewer heads in one layer, a low-rank layer and a bias on the logits."""
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32,
        pad_token_id=0, eos_token_id=3, decoder_start_token_id=0, init_std=0.3,
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    model.final_logits_bias = torch.nn.Buffer(torch.linspace(-1, 1, 64)[None])
    edits = [{"op": "low_rank", "module": "model.decoder.layers.1.fc1", "rank": 6}]
    for name in (
        "model.encoder.layers.1.self_attn",
        "model.decoder.layers.0.encoder_attn",
        "model.decoder.layers.1.self_attn",
    ):
        edits += [
            *(
                {"op": "linear", "module": f"{name}.{p}_proj", "in_features": 32, "out_features": 24}
                for p in "qkv"
            ),
            {"op": "linear", "module": f"{name}.out_proj", "in_features": 24, "out_features": 32},
            {"op": "set", "module": name, "attribute": "num_heads", "value": 3},
        ]
    apply_edits(model, edits)
    folder = tmp_path_factory.mktemp("marian")
    tokenizer_files(folder)
    save_model(model, edits, folder, folder.parent)
    return folder


@pytest.fixture(scope="module")
def quantized(marian, tmp_path_factory):
    model, edits = load_model(marian)
    names = [
        "model.shared",
        "lm_head",
        *(n for n, m in model.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"),
    ]
    for name in names:
        replace_module(model, name, quantize_module(model.get_submodule(name), "int8-dynamic"))
        edits.append(
            {
                "op": "quantize",
                "module": name,
                "scheme": "int8-dynamic",
                "granularity": "channel",
                "symmetric": True,
            }
        )
    for name, other in (
        ("model.encoder.embed_tokens", "model.shared"),
        ("model.decoder.embed_tokens", "model.shared"),
        ("lm_head.matrix", "model.shared.matrix"),
    ):
        edits.append({"op": "share", "module": name, "with": other})
    apply_edits(model, edits[-3:])
    folder = tmp_path_factory.mktemp("quantized")
    save_model(model, edits, folder, marian)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
        max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("bert")
    tokenizer_files(folder)
    save_model(transformers.BertForSequenceClassification(config).eval(), [], folder, folder.parent)
    return folder


ROWS = Split("x", tuple(Example("a b c d e f g"[: 2 * n + 1]) for n in range(1, 7)))


def export(folder, out, data=ROWS, **settings):
    ctx = harness.make_context(out, data={"validation": data} if data else {})
    Onnx()(artifact(folder), OnnxSettings(**settings), ctx)
    return ctx


@pytest.fixture(scope="module")
def exported(marian, tmp_path_factory):
    out = tmp_path_factory.mktemp("fp32")
    return out, export(marian, out)


@pytest.fixture(scope="module")
def exported_int8(quantized, tmp_path_factory):
    out = tmp_path_factory.mktemp("int8")
    return out, export(quantized, out)


def operators(path):
    return Counter(n.op_type for n in onnx.load(path).graph.node)


def greedy_by_hand(runner, batch, steps):
    state, tokens, all_logits = runner.encode(batch), np.zeros(len(batch.input_ids), dtype=np.int64), []
    for _ in range(steps):
        all_logits.append(runner.decode_step(state, tokens))
        tokens = all_logits[-1].argmax(-1)
    return np.stack(all_logits, 1)


def test_decoder_steps_equal_transformers_forward_on_padded_rows(marian, exported):
    batch = Batch(np.array([[5, 6, 7, 8, 3], [9, 10, 3, 0, 0]]), np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
    with open_folder(exported[0], "onnx", "ort-cpu", 1) as runner:
        logits = greedy_by_hand(runner, batch, 6)
    model, _ = load_model(marian)
    decoder_ids = np.concatenate([np.zeros((2, 1), dtype=np.int64), logits[:, :-1].argmax(-1)], axis=1)
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor(batch.input_ids), attention_mask=torch.tensor(batch.attention_mask),
            decoder_input_ids=torch.tensor(decoder_ids),
        ).logits.numpy()  # fmt: skip
    assert np.abs(logits - expected).max() < 1e-4


def test_graphs_contain_and_report_fused_operators(exported):
    out, ctx = exported
    op_counts = operators(out / "decoder_with_past_model.onnx")
    assert op_counts["MultiHeadAttention"] == 4
    assert op_counts["Concat"] == 0
    assert ctx.details["graphs"]["decoder_with_past_model"]["operators"] == dict(op_counts)
    assert ctx.details["parity"]["decoder_with_past_model"]["largest"] < 2e-3
    assert ctx.details["parity"]["decoder_with_past_model"]["agreement"] == 1.0
    assert ctx.warnings == []
    assert {p.name for p in out.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "vocab.txt",
        "encoder_model.onnx",
    }


def test_exported_model_tokenizes_without_transformers(marian, exported):
    out, ctx = exported
    assert ctx.details["tokenizer"] == read_tokenizer_info(out).reader == "tokenizers"
    texts = [example.text for example in ROWS.examples]
    assert open_tokenizer(out).encode_batch(texts, 32).ids == load_tokenizer(marian)(texts)["input_ids"]


def test_tokenizer_differing_on_data_falls_back_with_warning(bert, tmp_path, monkeypatch):
    original = RustTokenizer.encode_batch

    def spoiled(self, texts, max_length, pairs=None):
        encoded = original(self, texts, max_length, pairs)
        for text, ids in zip(texts, encoded.ids, strict=True):
            if text == ROWS.examples[3].text:
                ids[1] += 1
        return encoded

    monkeypatch.setattr(RustTokenizer, "encode_batch", spoiled)
    ctx = export(bert, tmp_path / "out", simplify=False)
    assert ctx.details["tokenizer"] == read_tokenizer_info(tmp_path / "out").reader == "transformers"
    assert message_codes(ctx.warnings) == ["slow-tokenizer"]
    assert "'a b c d e'" in ctx.warnings[0].message


def test_int8_graphs_multiply_integers_and_store_the_shared_matrix_once(exported_int8):
    out, ctx = exported_int8
    graph = onnx.load(out / "decoder_with_past_model.onnx").graph
    op_counts = Counter(n.op_type for n in graph.node)
    # per layer: packed qkv, out, cross q, cross out, fc1, fc2; one of the fc1 has two factors; the head
    assert op_counts["DynamicQuantizeMatMul"] == 2 * 6 + 1 + 1
    assert op_counts["MatMul"] == op_counts["Gemm"] == 0
    assert sum(sorted(t.dims) == [32, 64] for t in graph.initializer) == 1
    assert ctx.details["parity"]["decoder_with_past_model"]["mean"] < 0.05


def test_tied_matrix_has_same_layout_in_every_graph(exported_int8):
    out, _ = exported_int8
    arrays_by_graph = {}
    for path in out.glob("*.onnx"):
        model = onnx.load(path)
        arrays_by_graph[path.stem] = [onnx.numpy_helper.to_array(t) for t in iter_initializers(model.graph)]
    assert arrays_by_graph.keys() >= {
        "encoder_model",
        "decoder_with_past_model",
        "generate",
        "generate_beams",
    }
    encoder = onnx.load(out / "encoder_model.onnx").graph.initializer
    [table] = [t for t in encoder if t.name.endswith("embed_tokens.matrix.codes")]
    codes = onnx.numpy_helper.to_array(table)
    for name, arrays in arrays_by_graph.items():
        assert any(np.array_equal(a, codes) for a in arrays), name
        assert not any(np.array_equal(a, codes.T) for a in arrays), name


def test_classifier_equals_transformers_for_any_batch_and_length(bert, tmp_path):
    ctx = export(bert, tmp_path / "out")
    assert list(ctx.details["graphs"]) == ["model"]
    ids = np.array([[2, 5, 6, 3], [2, 7, 3, 0], [2, 3, 0, 0]])
    batch = Batch(ids, (ids > 0).astype(np.int64), np.array([[0, 0, 1, 1]] * 3))
    model, _ = load_model(bert)
    with torch.no_grad():
        expected = model(
            torch.tensor(ids), attention_mask=torch.tensor(batch.attention_mask),
            token_type_ids=torch.tensor(batch.token_type_ids),
        ).logits.numpy()  # fmt: skip
    with open_folder(tmp_path / "out", "onnx", "ort-cpu", 1) as runner:
        assert np.abs(runner.forward(batch) - expected).max() < 1e-5


def test_dynamic_int8_is_rejected_for_static_target(quantized, tmp_path):
    with raises_code("unsupported-scheme", InputError) as excinfo:
        export(quantized, tmp_path / "out", target="tensorrt")
    assert "int8-dynamic" in str(excinfo.value)
    assert "`from: NAME`" in str(excinfo.value)


def test_half_on_cpu_is_rejected_when_recipe_is_parsed():
    with raises_setting_codes("unsupported-dtype"):
        OnnxSettings(dtype="fp16")


def test_threads_are_saved_only_if_set(bert, tmp_path):
    assert "threads" not in export(bert, tmp_path / "plain", simplify=False).details
    assert export(bert, tmp_path / "two", threads=2, simplify=False).details["threads"] == 2
    details = export(bert, tmp_path / "tuned", threads="autotune", simplify=False).details
    assert set(details["threads_ms"]) == {
        f"{n} thread{'s' * (n > 1)}" for n in range(1, available_cores() + 1)
    }
    assert 1 <= details["threads"] <= available_cores()


def test_threads_for_gpu_are_rejected_when_recipe_is_parsed():
    with raises_setting_codes("unused-setting") as excinfo:
        OnnxSettings(target="ort-cuda", threads=1)
    assert "ort-cuda" in str(excinfo.value)


@pytest.mark.parametrize("wrong", [0, 2000, "all", 1.5])
def test_invalid_thread_counts_are_rejected(wrong):
    with pytest.raises(ValidationError):
        OnnxSettings(threads=wrong)
