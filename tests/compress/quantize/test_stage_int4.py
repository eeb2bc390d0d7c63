import harness
import onnx
import pytest
import tiny
from expected_errors import raises_code

from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import InputError
from smelt.data.splits import Example, Split
from smelt.export.onnx_stage import Onnx, OnnxSettings
from smelt.models.checkpoint import load_model
from smelt.models.count_parameters import count_parameters
from smelt.quantization.layers import QuantizedLinear, layer_scheme

ROWS = Split("x", tuple(Example(s) for s in tiny.SENTENCES))


def context(out, task="translation"):
    return harness.make_context(out, task, data={"validation": ROWS})


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    return tiny.write_marian(tmp_path_factory.mktemp("int4") / "model")


def quantized(src, out, task="translation", **settings):
    return harness.run_stage(Quantize(), QuantizeSettings(scheme="int4", **settings), src, out, task)


def test_stage_covers_linears_embeddings_and_head_and_says_what_it_left(marian, tmp_path):
    ctx = quantized(marian, tmp_path / "out", group_size=64, symmetric=False)
    model, edits = load_model(tmp_path / "out")
    assert ctx.details["linear_layers"] == 2 * 6 + 2 * 10 + 1
    assert ctx.details["float_linear_layers"] == []
    # d_model is 32: all but the second FFN matrix (64 inputs) have groups that are filled up
    assert "model.encoder.layers.0.fc1" in ctx.details["padded_layers"]
    assert "model.encoder.layers.0.fc2" not in ctx.details["padded_layers"]
    assert layer_scheme(model.model.shared) == "int4"
    assert model.lm_head.matrix is model.model.shared.matrix
    assert edits[0]["scheme"] == "int4"
    assert (edits[0]["group_size"], edits[0]["symmetric"], edits[0]["accuracy_level"]) == (64, False, 4)


def test_vocabulary_may_take_another_scheme(marian, tmp_path):
    quantized(marian, tmp_path / "out", embedding_scheme="int8-dynamic")
    model, _ = load_model(tmp_path / "out")
    assert layer_scheme(model.model.shared) == "int8-dynamic"
    assert model.lm_head.matrix is model.model.shared.matrix
    assert layer_scheme(model.model.encoder.layers[0].fc1) == "int4"


def test_bytes_on_disk_are_what_the_bits_per_weight_predict(tmp_path):
    sizes = {"d_model": 256, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
    src = tiny.write_marian(tmp_path / "model", **sizes)
    ctx = quantized(src, tmp_path / "out", group_size=32)
    assert ctx.details["bits_per_weight"] == 4 + 16 / 32
    model, _ = load_model(tmp_path / "out")
    weights = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantizedLinear))
    rest = [p for n, p in model.named_parameters() if ".matrix." not in n and "position" not in n]
    floats = sum(p.numel() for p in rest)
    predicted = weights * ctx.details["bits_per_weight"] / 8 + 4 * floats
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == pytest.approx(predicted, rel=0.05)
    assert count_parameters(tmp_path / "out") == pytest.approx(weights + floats, rel=0.001)


def test_exported_graph_computes_what_torch_computes(tmp_path):
    """A classifier with zero points; symmetric codes are exported in test_binary.py."""
    src = tiny.write_bert(tmp_path / "model")
    task = "text-classification"
    quantized(src, tmp_path / "int4", task, symmetric=False, accuracy_level=0, group_size=16)
    ctx = context(tmp_path / "onnx", task)
    Onnx()(tiny.as_artifact(tmp_path / "int4", task), OnnxSettings(), ctx)
    assert ctx.details["parity"]["model"]["largest"] < 1e-4
    found = ctx.details["graphs"]["model"]["operators"]
    # per layer packed queries, keys and values, out, two of the FFN; pooler and classifier
    assert found["MatMulNBits"] == 2 * 4 + 2
    assert "MatMul" not in found
    stored = [t for t in onnx.load(tmp_path / "onnx" / "model.onnx").graph.initializer if len(t.dims) == 3]
    assert {t.data_type for t in stored} == {onnx.TensorProto.UINT8}


def test_targets_without_matmul_nbits_are_refused(marian, tmp_path):
    quantized(marian, tmp_path / "out")
    for target, code, named in (
        ("ort-cuda", "unsupported-scheme", "MatMulNBits"),
        ("tensorrt", "unsupported-scheme-options", "`symmetric: positive` and `accuracy_level: 0`"),
    ):
        with raises_code(code, InputError) as caught:
            Onnx()(
                tiny.as_artifact(tmp_path / "out"), OnnxSettings(target=target), context(tmp_path / "onnx")
            )
        assert named in str(caught.value)
