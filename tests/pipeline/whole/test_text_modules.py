"""A whole recipe of a text CNN: trained, sparsified, distilled, quantized, exported and packaged."""

import json
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch

import smelt
from smelt.models.checkpoint import load_model
from tests.support.models import text_modules


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def finished_steps(recipe, out):
    steps = smelt.run(recipe, out=out).report["steps"]
    assert [step["status"] for step in steps] == ["done"] * len(steps), [step["error"] for step in steps]
    return {step["name"]: step for step in steps}


def test_text_cnn_passes_all_stages(tmp_path):
    recipe = text_modules.write_recipe(text_modules.write_module(tmp_path), stages=(
        "finetune: {epochs: 5, learning_rate: 0.01, num_evals: 1, precision: fp32}\n    name: trained",
        "sparsify: {method: wanda, sparsity: 0.5, calibration_samples: 16}",
        "distill: {max_steps: 4, teacher: trained, num_evals: 1, precision: fp32, learning_rate: 0.001}",
        "quantize: {scheme: int8-dynamic}",
        "onnx",
    ))  # fmt: skip
    steps = finished_steps(recipe, tmp_path / "run")
    for name in ("trained", "onnx"):
        assert steps[name]["quality"]["accuracy"]["value"] > 90, name
    assert steps["quantize"]["details"]["linear_layers"] == 2
    artifacts = tmp_path / "run" / "artifacts"
    original = text_modules.build("text_cnn").embed.weight
    with smelt.load(artifacts / "trained") as model:
        assert model.predict(["the film was great"])[0].label == "positive"
    trained = load_model(artifacts / "trained")[0].network.embed.weight
    assert not torch.allclose(trained, original, atol=0.01)
    assert not trained[0].any()  # padding_idx
    package = tmp_path / "package"
    smelt.package(artifacts / "onnx", out=package)
    command = [sys.executable, "infer.py", "the film was awful"]
    printed = subprocess.run(command, cwd=package, check=True, capture_output=True, text=True).stdout
    assert printed.split()[0] == "negative"


def test_graph_computes_like_the_module_on_texts_of_any_length(tmp_path):
    recipe = text_modules.write_recipe(text_modules.write_module(tmp_path))
    finished_steps(recipe, tmp_path / "run")
    graph = tmp_path / "run" / "artifacts" / "onnx" / "model.onnx"
    session = onnxruntime.InferenceSession(graph)
    module, draw = text_modules.build("text_cnn"), np.random.default_rng(0)
    for rows, length in ((1, 3), (4, 9), (2, 40)):
        ids = draw.integers(0, 23, (rows, length))
        mask = (np.arange(length) < draw.integers(1, length + 1, (rows, 1))).astype(np.int64)
        with torch.no_grad():
            expected = module(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
        (logits,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
        np.testing.assert_allclose(logits, expected, atol=1e-5)
    config = json.loads((graph.parent / "config.json").read_text())
    assert config["id2label"]["1"] == "positive"
