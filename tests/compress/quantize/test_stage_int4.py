import pytest

from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import InputError
from smelt.data.splits import Example, Split
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model
from smelt.quantization.layers import layer_scheme
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import tiny

ROWS = Split("x", tuple(Example(s) for s in tiny.SENTENCES))


def context(out, task="translation"):
    return harness.make_context(out, task, data={"validation": ROWS})


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    return tiny.write_marian(tmp_path_factory.mktemp("int4") / "model")


def quantized(src, out, task="translation", **settings):
    return harness.run_stage(Quantize(), QuantizeSettings(scheme="int4", **settings), src, out, task)


def test_stage_quantizes_all_layers_and_reports_padding(marian, tmp_path):
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


def test_targets_that_need_other_options_are_rejected(marian, tmp_path):
    quantized(marian, tmp_path / "out")
    for target, code, hint in (
        ("ort-cuda", "unsupported-scheme-options", "`accuracy_level: 0`"),
        ("tensorrt", "unsupported-scheme-options", "`symmetric: positive` and `accuracy_level: 0`"),
    ):
        with raises_code(code, InputError) as caught:
            Onnx()(
                tiny.as_artifact(tmp_path / "out"), OnnxSettings(target=target), context(tmp_path / "onnx")
            )
        assert hint in str(caught.value)
