"""A whole recipe with ONNX Runtime and OpenVINO side by side."""

import json

import pytest

import smelt
from smelt.core.artifact import read_artifact
from smelt.evaluate.report.schema import validate_report
from tests.support import harness
from tests.support.models import tiny
from tests.support.processes import forked_workers

RECIPE = """
model: m
task: text-classification
data: {validation: data.jsonl, test: data.jsonl}
stages:
  - onnx: {target: ort-cpu}
    name: ort
  - onnx: {target: openvino}
    from: model
    name: ov
  - onnx: {target: openvino, dtype: bf16}
    from: model
    name: ov-bf16
score: {quality: [accuracy], latency: {batch_sizes: [1], rounds: 3, texts: 2, min_round_ms: 1}}
"""


@pytest.fixture(scope="module", autouse=True)
def _forked():
    with pytest.MonkeyPatch.context() as patch:
        forked_workers.install(patch)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    tiny.write_bert(folder / "m")
    tiny.write_labeled(folder / "data.jsonl", 8)
    (folder / "recipe.yaml").write_text(RECIPE)
    harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", code=0)
    return folder


def test_report_has_quality_size_and_latency_of_both_runtimes(home):
    report = json.loads((home / "run" / "report.json").read_text())
    validate_report(report)
    steps = {step["name"]: step for step in report["steps"]}
    assert {name: (step["status"], step["target"]) for name, step in steps.items() if name != "model"} == {
        "ort": ("done", "ort-cpu"), "ov": ("done", "openvino"), "ov-bf16": ("done", "openvino"),
    }  # fmt: skip
    for name in ("ort", "ov", "ov-bf16"):
        assert steps[name]["latency"], name
        assert steps[name]["size_bytes"] > 0
    assert steps["ov"]["quality"]["accuracy"]["value"] == steps["ort"]["quality"]["accuracy"]["value"]
    assert "openvino" in report["environment"]["versions"]


def test_artifact_is_loaded_in_exported_dtype(home):
    predictions = {}
    for name, dtype in (("ov", "fp32"), ("ov-bf16", "bf16")):
        folder = home / "run" / "artifacts" / name
        assert read_artifact(folder).manifest.details["dtype"] == dtype
        with smelt.load(folder, threads=1) as model:
            assert model._runner.backend.dtype == dtype
            assert model.device == "cpu"
            predictions[name] = model.predict(["a b c", "d"])
    assert len(predictions["ov"]) == 2


def test_predict_eval_and_bench_accept_openvino_artifact(home):
    folder = home / "run" / "artifacts" / "ov"
    assert harness.smelt("predict", folder, "a b c", code=0).output.strip()
    assert "accuracy" in harness.smelt("eval", folder, "--data", home / "data.jsonl", code=0).output
    timed = harness.smelt("bench", folder, "--texts", 2, "--rounds", 3, "--batch-size", 1, "--json", code=0)
    assert json.loads(timed.output[timed.output.index("{") :])
