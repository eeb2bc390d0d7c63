import pytest
import torch
import transformers

from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model, save_model
from smelt.models.edits import apply_edits
from smelt.models.layers import LowRankLinear
from smelt.quantization.layers import QuantizedEmbedding, QuantizedLinear
from tests.support import harness
from tests.support.expected_errors import raises_code


@pytest.fixture
def marian(tmp_path):
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=32,
        pad_token_id=63,
        eos_token_id=0,
        decoder_start_token_id=63,
    )
    model = transformers.MarianMTModel(config).eval()
    edits = [{"op": "low_rank", "module": "model.encoder.layers.0.fc1", "rank": 5}]
    apply_edits(model, edits)
    folder = tmp_path / "src"
    folder.mkdir()
    save_model(model, edits, folder, folder)
    return folder


def run(folder, out, **settings):
    return harness.run_stage(Quantize(), QuantizeSettings(**settings), folder, out)


def test_quantize_covers_linears_factors_embeddings_and_output_layer(marian, tmp_path):
    ctx = run(marian, tmp_path / "out")
    model, _ = load_model(tmp_path / "out")
    # encoder: 2 x 6 linears, one of them two factors; decoder: 2 x 10; the head
    assert ctx.details["linear_layers"] == 13 + 20 + 1
    assert ctx.details["float_linear_layers"] == []
    assert isinstance(model.model.encoder.layers[0].fc1, LowRankLinear)
    assert isinstance(model.model.encoder.layers[0].fc1.up, QuantizedLinear)
    assert model.lm_head.matrix is model.model.decoder.embed_tokens.matrix is model.model.shared.matrix
    assert ctx.details["bytes_after"] < ctx.details["bytes_before"] / 2


def test_tied_matrices_are_stored_once(marian, tmp_path):
    from safetensors.torch import load_file

    run(marian, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert [n for n, t in stored.items() if t.shape == (64, 32)] == ["model.shared.matrix.codes"]


def test_excluded_layers_and_disabled_embeddings_are_kept_float(marian, tmp_path):
    ctx = run(marian, tmp_path / "out", exclude=["*.fc2", "*.nothing"], embeddings=False, output_layer=False)
    model, _ = load_model(tmp_path / "out")
    assert ctx.details["embeddings"] == 0
    assert type(model.lm_head) is torch.nn.Linear
    assert type(model.model.decoder.layers[1].fc2) is torch.nn.Linear
    assert model.lm_head.weight is model.model.shared.weight
    assert message_codes(ctx.warnings) == ["unknown-layer"]
    assert "*.nothing" in ctx.warnings[0].message
    assert "*.fc2" not in ctx.warnings[0].message


def test_only_word_embeddings_of_bert_are_quantized(tmp_path):
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40
    )
    folder = tmp_path / "src"
    folder.mkdir()
    save_model(transformers.BertForSequenceClassification(config).eval(), [], folder, folder)
    run(folder, tmp_path / "out")
    embeddings = load_model(tmp_path / "out")[0].bert.embeddings
    assert isinstance(embeddings.word_embeddings, QuantizedEmbedding)
    assert type(embeddings.position_embeddings) is torch.nn.Embedding
    assert type(embeddings.token_type_embeddings) is torch.nn.Embedding


def test_quantizing_twice_or_nothing_is_rejected(marian, tmp_path):
    run(marian, tmp_path / "out")
    with raises_code("already-quantized", InputError):
        run(tmp_path / "out", tmp_path / "again")
    with raises_code("no-layer-selected", InputError):
        run(marian, tmp_path / "none", exclude=["*"])


def test_no_size_reduction_warns(marian, tmp_path):
    """Of 5 float32 weights, 20 bytes, kmeans4 makes 128 of codes, 16 of values and 2 of a scale."""
    reported = {}
    for scheme in ("int8-dynamic", "kmeans4"):
        skip = [] if scheme == "int8-dynamic" else ["*q_proj", "*k_proj", "*v_proj", "*out_proj", "*fc2"]
        ctx = run(marian, tmp_path / scheme, scheme=scheme, exclude=skip)
        reported[scheme] = [
            message.message for message in ctx.warnings if message.code == "no-size-reduction"
        ]
    assert reported["int8-dynamic"] == []
    (text,) = reported["kmeans4"]
    # rows of 32 inputs take 146 bytes in place of 128: all matrices
    assert "6 of 6" in text
    assert "(model.shared, " in text
