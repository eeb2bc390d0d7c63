"""Folders of codes: what of them is refused when the folder is looked at, before torch is there."""

import json
import subprocess
import sys

import pytest

from smelt.pipeline.inspect.model_folder import check_model_folder, quantization_problems
from tests.support.models import causal, quantized_checkpoints, tiny

TASK = "language-modeling"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return causal.write_model(tmp_path_factory.mktemp("float") / "llama", "llama")


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_quantized_folder_is_accepted(kind, llama, tmp_path):
    folder, _ = getattr(quantized_checkpoints, f"write_{kind}")(llama, tmp_path / kind)
    assert check_model_folder(folder, TASK) == ([], [])
    assert (
        quantization_problems(llama, json.loads((llama / "config.json").read_text()), TASK, has_headers=True)
        == []
    )


def test_group_size_different_from_config_is_rejected(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq", group=32, group_size=64)
    [problem], _ = check_model_folder(folder, TASK)
    assert problem.code == "shape-mismatch"
    assert problem.message.startswith(f"{folder}: the tensor 'model.layers.0.")
    assert all(value in problem.message for value in ("groups of 64", "int32 [2, 8]"))


def test_quantization_config_without_quantized_weights_is_rejected(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    quantized_checkpoints.save_tensors(folder, quantized_checkpoints.load_tensors(llama))
    [problem], _ = check_model_folder(folder, TASK)
    assert problem.code == "not-quantized"


def test_unsupported_quantization_layout_is_rejected(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq", act_bits=8)
    [problem], _ = check_model_folder(folder, TASK)
    assert problem.code == "quantized-activations"
    assert problem.message.startswith(f"{folder / 'config.json'}: quantization_config: act_bits is 8")


def test_damaged_quantized_weights_are_reported_once(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    (folder / "model.safetensors").write_bytes(b"\x00")
    [problem], _ = check_model_folder(folder, TASK)
    assert problem.code == "damaged-weights"


def test_quantized_encoder_without_classifier_is_rejected(tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(tiny.write_bert(tmp_path / "bert"), tmp_path / "gptq")
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["BertModel"]}
    [problem] = quantization_problems(folder, config, "text-classification", has_headers=False)
    assert problem.code == "head-on-quantized"
    assert problem.message.startswith(f"{folder}: ")
    config["architectures"] = ["BertForSequenceClassification"]
    assert quantization_problems(folder, config, "text-classification", has_headers=False) == []
    assert (
        quantization_problems(folder, config | {"architectures": ["BertModel"]}, None, has_headers=False)
        == []
    )


def test_quantized_weights_without_config_are_rejected(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    [problem], _ = check_model_folder(folder, TASK)
    assert problem.code == "missing-quantization-config"
    assert ".qweight'" in problem.message


def test_quantized_encoder_decoder_without_head_is_rejected(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    config = json.loads((folder / "config.json").read_text())
    for name, is_rejected in (
        ("T5Model", True),
        ("T5ForConditionalGeneration", False),
        ("MarianMTModel", False),
    ):
        problems = quantization_problems(
            folder,
            config | {"architectures": [name], "is_encoder_decoder": True},
            "translation",
            has_headers=True,
        )
        assert [problem.code for problem in problems] == ["head-on-quantized"] * is_rejected, name


def test_quantized_folder_is_checked_without_torch(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq", group=24)
    code = (
        "import sys; from pathlib import Path;"
        "from smelt.pipeline.inspect.model_folder import check_model_folder;"
        f"[found] = check_model_folder(Path({str(folder)!r}), {TASK!r})[0]; print(found.code, found);"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("unsupported-group-size ")
    assert all(value in done.stdout for value in ("groups of 24", "16, 32, 64, 128"))
