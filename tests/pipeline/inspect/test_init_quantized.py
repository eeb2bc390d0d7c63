"""`smelt init` for models of codes: what they can go through, how many values they have, what is said."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import smelt
from smelt.core.errors import InputError
from smelt.models.weight_files import weight_tensors
from smelt.pipeline.inspect.init_recipe import InitOptions, init_recipe
from smelt.pipeline.inspect.init_stages import MachineInfo, quantized_model_steps
from smelt.pipeline.inspect.model_info import inspect_model
from smelt.pipeline.plan.load_plan import load_plan
from tests.support.expected_errors import raises_code
from tests.support.models import causal, quantized_checkpoints, tiny

CPU = MachineInfo(2, gpu=False, tensorrt=False)
EVERYTHING = MachineInfo(2, gpu=True, tensorrt=True, openvino=True, ort_tensorrt=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coded")
    quantized_checkpoints.write_gptq(
        causal.write_model(folder / "float", "llama"), folder / "gptq", symmetric=False
    )
    quantized_checkpoints.write_awq(folder / "float", folder / "awq")
    (folder / "train.txt").write_text("\n".join(tiny.SENTENCES * 40))
    shutil.copy(folder / "train.txt", folder / "test.txt")
    return folder


def written(folder, kind, path, *data, fast=False):
    wishes = InitOptions("language-modeling", fast=fast)
    files = [folder / name for name in data]
    return init_recipe(str(folder / kind), files, str(path), force=True, options=wishes)[0]


def flat(text):
    return " ".join(text.replace("\n# ", " ").split())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_init_recipe_for_quantized_model_plans(kind, fast, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("r.yaml")
    for machine in (CPU, EVERYTHING):
        monkeypatch.setattr(
            "smelt.pipeline.inspect.init_recipe.inspect_machine", lambda machine=machine: machine
        )
        text = written(folder, kind, path, "train.txt", "test.txt", fast=fast)
        assert max(len(line) for line in text.splitlines() if not line.startswith("model:")) <= 80
        plan = load_plan(path)
        names = [step.name for step in plan.steps if step.name != "openvino"]
        assert names == ["onnx-codes", "tuned", "onnx-tuned"]
        assert ("openvino" in [step.name for step in plan.steps]) == (machine is EVERYTHING)
        parents = {step.name: step.parent for step in plan.steps}
        assert parents | {"openvino": "model"} == {
            "onnx-codes": "model",
            "openvino": "model",
            "tuned": "model",
            "onnx-tuned": "tuned",
        }
    path.write_text(text.replace("\n# gates:", "\ngates:"))
    assert load_plan(path).gates[-1].at == ("onnx-tuned",)


def test_quantized_model_without_training_data_is_only_exported(folder, tmp_path):
    text = written(folder, "gptq", tmp_path / "r.yaml", "test.txt")
    assert [s.name for s in load_plan(tmp_path / "r.yaml").steps if s.name != "openvino"] == ["onnx-codes"]
    assert "speedup: {min: 1.5, at: onnx-codes}" in text


def test_pairs_without_scores_are_not_trained_on(folder):
    info = replace(inspect_model(str(folder / "gptq")), task="sentence-similarity")
    assert [step.stage for step in quantized_model_steps(info, CPU, train=True)] == ["onnx"]


@pytest.mark.parametrize(("kind", "fast"), [("gptq", False), ("awq", True)])
def test_init_recipe_notes_quantization_method(kind, fast, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = flat(written(folder, kind, "r.yaml", fast=fast))
    assert f"({kind})" in text.partition("Note: ")[2].partition(". ")[0]
    assert ("--fast" in text) == fast
    of_floats = flat(written(folder, "float", "f.yaml", fast=True))
    assert "Note: " not in of_floats


def test_quantized_parameters_are_counted_unpacked(folder):
    num_parameters = sum(int(np.prod(tensor["shape"])) for _, _, tensor in weight_tensors(folder / "float"))
    for kind in ("gptq", "awq"):
        info = inspect_model(str(folder / kind))
        assert (info.parameters, info.dtype) == (num_parameters, "4-bit quantized weights")
    info = inspect_model(str(folder / "float"))
    assert (info.parameters, info.dtype, info.quantization) == (num_parameters, "float32", None)


def test_quantization_of_hub_model_is_read_from_config(folder, tmp_path, monkeypatch):
    config = json.loads((folder / "gptq" / "config.json").read_text())
    monkeypatch.setattr("smelt.pipeline.inspect.model_info.fetch_config_folder", lambda model, base: tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert inspect_model("some/gptq").quantization.description == "gptq"
    config["quantization_config"]["bits"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    with raises_code("unsupported-bits", InputError):
        inspect_model("some/gptq")


def test_init_recipe_for_quantized_model_runs(folder, tmp_path):
    path = tmp_path / "r.yaml"
    written(folder, "gptq", path, "train.txt", "test.txt")
    changes = {"score.latency": False, "threads": 1, "tuned.max_steps": 1}  # only to be quick
    changes |= {"tuned.learning_rate": 1e-9, "tuned.qat.learning_rate": 1e-9, "data.windows": {"length": 32}}
    result = smelt.run(path, overrides=changes, out=tmp_path / "run", quiet=True)
    steps = {step["name"]: step for step in result.report["steps"]}
    assert result.exit_code == 0, result.report
    assert {step["status"] for step in steps.values()} == {"done"}
    # training starts from the very codes
    assert steps["tuned"]["details"]["latent_weights"] == "codes"
    assert steps["tuned"]["details"]["codes_changed"] == 0
    assert steps["onnx-tuned"]["size_bytes"] == pytest.approx(steps["onnx-codes"]["size_bytes"], rel=0.01)
