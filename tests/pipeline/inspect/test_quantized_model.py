"""Codes that a model has before any stage: of a checkpoint, and of an artifact of smelt."""

import json

import pytest

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.pipeline.inspect.model_info import inspect_model, inspect_quantization
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import causal, every_family

RECIPE = """\
model: artifact
task: language-modeling
data: {train: train.txt, test: train.txt, windows: {length: 32}}
stages:
  - STAGE
score: {latency: false}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coded")
    source = causal.write_model(folder / "float", "llama")
    every_family.run_stage(Quantize(), QuantizeSettings(scheme="int3"), source, "llama", folder / "artifact")
    details = {"details": {"parameters": 12_300_000}}
    (folder / "artifact" / "manifest.json").write_text(json.dumps(details))
    causal.write_lines(folder / "train.txt", 1)
    return folder


def test_schemes_are_ordered_by_number_of_matrices(folder):
    config = json.loads((folder / "artifact" / "config.json").read_text())
    quantization = inspect_quantization(folder / "artifact", config)
    assert quantization.description == "int3 and int4"
    assert quantization.schemes["int3"]["group_size"] == 64
    assert quantization.targets == ["ort-cpu"]
    assert quantization.unsupported_by("openvino") == "int3 weights (MatMulNBits)"
    assert (
        quantization.unsupported_by("ort-cuda") == "int3 weights (MatMulNBits) and int4 weights (MatMulNBits)"
    )
    assert inspect_quantization(folder / "float", config) is None
    (folder / "broken").mkdir()
    (folder / "broken" / "structure.json").write_text("{")
    assert inspect_quantization(folder / "broken", config) is None


@pytest.mark.parametrize(("stage", "code", "named"), [
    ("factorize: {}", "already-quantized", ("int3 and int4",)),
    ("onnx: {target: openvino}", "unsupported-scheme", ("int3 weights (MatMulNBits)", "(int3 and int4)")),
    ("finetune: {qat: {weight_splitting: true}}", "unsupported-scheme", ("int3",)),
    ("finetune: {qat: {scales: lsq}}", None, ()), ("prune: {}", None, ()), ("sparsify: {}", None, ()),
    ("onnx: {autotune: true}", None, ()),
])  # fmt: skip
def test_quantized_artifact_is_planned_by_its_schemes(stage, code, named, folder):
    (folder / "r.yaml").write_text(RECIPE.replace("STAGE", stage))
    if code is None:
        assert "nothing-to-tune" not in message_codes(load_plan(folder / "r.yaml").warnings)
        return
    with raises_code(code, InputError) as excinfo:
        load_plan(folder / "r.yaml")
    [error] = excinfo.value.messages
    assert error.setting == f"stages[0].{stage.partition(':')[0]}"
    assert [value for value in named if value not in error.message] == []


def test_init_proposes_stages_allowed_for_quantized_model(folder):
    info = inspect_model(str(folder / "artifact"))
    assert (info.parameters, info.dtype) == (12_300_000, "int3 and int4")
    text = harness.smelt(
        "init", folder / "artifact", "--data", folder / "train.txt", "--out", folder / "new.yaml", "--force"
    )
    assert text.exit_code == 0, text.output
    recipe = (folder / "new.yaml").read_text()
    assert "  - prune" not in recipe
    assert "- onnx: {target: ort-cpu}" in recipe
    assert "openvino" not in recipe.partition("stages:")[2]
    assert "an artifact from before `quantize`" in " ".join(recipe.replace("\n#", "").split())
