"""An encoder is distilled on raw text, exported, and then trained for a task."""

import json
import subprocess
import sys

import pytest

import smelt
from smelt.export.package.standalone.packaged_model import PackagedModel
from tests.support import harness
from tests.support.models import masked, tiny
from tests.support.models.tiny import SENTENCES

GENERAL = """
model: m
task: masked-language-modeling
data: {train: t.txt, validation: t.txt, test: t.txt, windows: {length: 16}}
stages:
  - distill:
      student: {layers: 1}
      losses: {logits: 5, labels: 2, cosine: 1}
      temperature: 2
      max_steps: 2
      batch_size: 4
    name: general
  - prune: {targets: [heads, ffn], keep_ratio: 0.5, calibration_samples: 8}
    name: pruned
  - onnx: {target: ort-cpu}
    name: onnx
score: {latency: false}
"""
TASK = """
model: general/artifacts/pruned
task: text-classification
data: {train: c.jsonl, validation: c.jsonl, test: c.jsonl}
stages:
  - finetune: {max_steps: 2, batch_size: 4}
    name: tuned
  - distill: {max_steps: 2, batch_size: 4, teacher: tuned, augmentation: {model: m, copies: 3}}
score: {latency: false}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    masked.write_model(home / "m")
    masked.write_lines(home / "t.txt")
    tiny.write_labeled(home / "c.jsonl")
    for name, recipe in {"general": GENERAL, "task": TASK}.items():
        (home / f"{name}.yaml").write_text(recipe)
        result = harness.smelt("run", home / f"{name}.yaml", "--out", home / name, "--quiet")
        assert result.exit_code == 0, result.output
    return home


def steps_of(home, name):
    return json.loads((home / name / "report.json").read_text())["steps"]


def test_every_step_is_scored_on_the_same_masked_tokens(home):
    scores = [step["quality"] for step in steps_of(home, "general")]
    assert len(scores) == 4
    assert (
        len({(s["perplexity"]["n"], s["perplexity"]["signature"].split("|device")[0]) for s in scores}) == 1
    )
    for score in scores:
        accuracy = score["masked_accuracy"]
        assert accuracy["n"] == score["perplexity"]["n"] > 20
        assert accuracy["ci95"][0] <= accuracy["value"] <= accuracy["ci95"][1]
    pruned, onnx = scores[2:]
    assert onnx["perplexity"]["value"] == pytest.approx(pruned["perplexity"]["value"], rel=1e-3)


def test_exported_model_fills_masks(home):
    text = " ".join(["[MASK]", *SENTENCES[0].split()[1:]])
    outputs = []
    for step in ("pruned", "onnx"):
        with smelt.load(home / "general" / "artifacts" / step) as model:
            [[predictions]] = model.fill_mask([text], top_k=3)
            outputs.append([prediction.token_str for prediction in predictions])
    assert outputs[0] == outputs[1]
    result = harness.smelt("predict", home / "general" / "artifacts" / "onnx", text, "--json")
    assert result.exit_code == 0, result.output
    assert [p["token_str"] for p in json.loads(result.output)["masks"][0]][:3] == outputs[0]
    arguments = ["predict", home / "general" / "artifacts" / "onnx", text, "--top-k", 3]
    masks = json.loads(harness.smelt(*arguments, "--json", code=0).output)["masks"]
    assert [[p["token_str"] for p in predictions] for predictions in masks] == [outputs[0]]
    harness.smelt(*arguments, code=2)  # a line has one token
    assert harness.smelt(*arguments[:-1], 0, "--json", code=2).error.code == "wrong-value"


def test_package_fills_masks_and_refuses_texts_without(home):
    harness.smelt("package", home / "general" / "artifacts" / "onnx", "--out", home / "package")
    command = [sys.executable, home / "package" / "infer.py"]
    texts = ["a [MASK]", "[MASK] b [MASK]"]
    answer = subprocess.run([*command, *texts], check=True, capture_output=True, text=True)
    assert [len(line.split("\t")[0].split("|")) for line in answer.stdout.splitlines()] == [1, 2]
    refused = subprocess.run([*command, "a [MASK]", "a"], check=False, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    served = PackagedModel(home / "package", "MaskFiller", threads=1)
    [[tokens]] = served.answer([served.read("a [MASK]")])
    assert tokens[0]["token_str"] == answer.stdout.split("\t")[0]
    with pytest.raises(ValueError):  # noqa: PT011 - the service answers 422 to any
        served.read("a")


def test_pruned_encoder_gets_classifier_and_augmented_samples(home):
    model, _, distilled = steps_of(home, "task")
    assert [warning["code"] for warning in model["warnings"]] == ["new-classifier"]
    edits = [
        json.loads((home / run / "artifacts" / step / "structure.json").read_text())["edits"]
        for run, step in (("general", "pruned"), ("task", "model"))
    ]
    assert edits[0] == edits[1] != []
    assert distilled["details"]["augmentation"]["copies"] > 8
    assert distilled["details"]["training"]["rows"] == 8 + distilled["details"]["augmentation"]["copies"]
