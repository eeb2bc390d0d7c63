"""Graphs that read texts, exported by others: the same classes and scores as the model behind them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import smelt
from tests.support import harness, shared_folders
from tests.support.expected_errors import command_error
from tests.support.models import tiny

TEXTS = [*tiny.SENTENCES, "a"]
RECIPE = """
model: MODEL
task: text-classification
data: {test: test.jsonl, calibration: test.jsonl}
stages: STAGES
score: {latency: false}
"""


def make(folder: Path) -> None:
    """Write a tiny BERT classifier, and the graph that torch.onnx.export makes of it, ids of 32 bits."""
    import torch
    from transformers import AutoModelForSequenceClassification

    tiny.write_bert(folder / "hub")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "hub").eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    torch.onnx.export(
        model, (), kwargs={name: torch.ones((2, 7), dtype=torch.int32) for name in names}, dynamo=True,
        f=str(folder / "exported.onnx"), input_names=names, output_names=["logits"], verbose=False,
        dynamic_shapes=dict.fromkeys(names, sizes), external_data=False,
    )  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model, a graph exported from it, and rows."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(shared_folders.make_once("foreign-bert", make), tmp_path, dirs_exist_ok=True)
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(TEXTS)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def write(here: Path, model: str, stages: str = "[]") -> Path:
    (here / "r.yaml").write_text(RECIPE.replace("MODEL", model).replace("STAGES", stages))
    return here / "r.yaml"


def torch_logits(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt", truncation=True)).logits[0] for text in TEXTS]
    return torch.stack(logits).softmax(-1).numpy()


def test_torch_exported_classifier_is_scored_quantized_and_equals_model(here: Path) -> None:
    stages = "[simplify, quantize, {fp16: {}, from: simplify}]"
    recipe = write(here, "exported.onnx\ntokenizer: hub", stages)
    harness.smelt("run", recipe, code=0)
    steps = json.loads((here / "runs/r/report.json").read_text())["steps"]
    assert [s["name"] for s in steps] == ["model", "simplify", "quantize", "fp16"]
    assert all(s["quality"]["accuracy"]["n"] == len(TEXTS) for s in steps)
    assert steps[0]["quality"] == steps[1]["quality"]
    with smelt.load("runs/r/artifacts/model") as model:
        probabilities = [list(p.probabilities.values()) for p in model.predict(TEXTS)]
    np.testing.assert_allclose(probabilities, torch_logits(here / "hub"), atol=1e-4)
    nodes = onnx.load("runs/r/artifacts/quantize/model.onnx").graph.node
    assert any("Integer" in n.op_type or "Quant" in n.op_type for n in nodes)


def test_static_ranges_are_calibrated_on_padded_texts(here: Path) -> None:
    recipe = write(
        here,
        "exported.onnx\ntokenizer: hub",
        "[quantize: {scheme: int8-static, calibration_method: entropy}]",
    )
    harness.smelt("run", recipe, code=0)
    with smelt.load("runs/r/artifacts/quantize") as model:
        probabilities = [list(p.probabilities.values()) for p in model.predict(TEXTS)]
    np.testing.assert_allclose(probabilities, torch_logits(here / "hub"), atol=0.02)
    step = json.loads((here / "runs/r/report.json").read_text())["steps"][-1]
    assert 0 < step["details"]["parity"]["error"] < 0.3


def test_optimum_folder_requires_no_further_settings(here: Path) -> None:
    """config.json and the tokenizer are next to model.onnx."""
    shutil.copytree(here / "hub", here / "optimum")
    (here / "optimum/model.safetensors").unlink()
    shutil.copyfile(here / "exported.onnx", here / "optimum/model.onnx")
    harness.smelt("run", write(here, "optimum"), code=0)
    assert (here / "runs/r/artifacts/model/tokenizing.json").is_file()
    harness.smelt("package", "runs/r/artifacts/model", "--out", "shipped", code=0)
    assert (here / "shipped/infer.py").is_file()


@pytest.mark.parametrize(
    ("model", "setting"), [("exported.onnx", "model"), ("exported.onnx\ntokenizer: nowhere", "tokenizer")]
)
def test_missing_config_is_rejected(here: Path, model: str, setting: str) -> None:
    error = command_error(harness.smelt("plan", write(here, model), code=2))
    assert ("missing-config", setting) in [(message.code, message.setting) for message in error.messages]


def test_graph_of_other_task_is_rejected(here: Path) -> None:
    recipe = write(here, "exported.onnx\ntokenizer: hub")
    recipe.write_text(recipe.read_text().replace("text-classification", "language-modeling"))
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert {message.code for message in error.messages} >= {"unsupported-graph", "unsupported-task"}
