"""Regression with several numbers per text: from `init` to the package's service."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_squared_error
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertModel

from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.models import tiny

RECIPE = """
model: m
task: text-classification
data: {train: train.jsonl, validation: train.jsonl, test: train.jsonl, calibration: texts.jsonl,
  unlabeled: texts.jsonl}
stages:
  - finetune: {max_steps: 4, batch_size: 4, num_evals: 1}
    name: tuned
  - distill: {teacher: tuned, student: {layers: 1}, losses: {logits: 1, labels: 1}, train_on: both,
      max_steps: 4, batch_size: 4, num_evals: 1}
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: wanda, calibration_samples: 4}
  - quantize: {}
  - onnx: {}
score: {latency: false}
baseline: tuned
"""
NUMBERS = [[0.1 * (n % 7), 2.0 - 0.3 * (n % 5)] for n in range(len(tiny.SENTENCES))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bare encoder, which gets two outputs, and a finished run."""
    folder = tmp_path_factory.mktemp("numbers")
    tiny.write_bert(folder / "m")
    BertModel.from_pretrained(folder / "m").save_pretrained(folder / "m")
    rows = ({"text": t, "label": label} for t, label in zip(tiny.SENTENCES, NUMBERS, strict=True))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = "".join(json.dumps({"text": text}) + "\n" for text in tiny.SENTENCES)
    (folder / "texts.jsonl").write_text(texts)
    (folder / "recipe.yaml").write_text(RECIPE)
    result = harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet")
    assert result.exit_code == 0, result.output
    return folder


def predicted(folder, step):
    result = harness.smelt("predict", folder / "run" / "artifacts" / step, *tiny.SENTENCES)
    assert result.exit_code == 0, result.output
    return np.array([[float(number) for number in line.split("|")] for line in result.output.splitlines()])


def test_predicted_numbers_equal_transformers(folder):
    artifact = folder / "run" / "artifacts" / "tuned"
    model = AutoModelForSequenceClassification.from_pretrained(artifact).eval()
    assert (model.config.num_labels, model.config.problem_type) == (2, "regression")
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    with torch.no_grad():
        logits = model(**tokenizer(tiny.SENTENCES, padding=True, return_tensors="pt")).logits
    np.testing.assert_allclose(predicted(folder, "tuned"), logits.numpy(), atol=1e-4)


def test_loss_is_that_of_transformers(folder):
    """The training loss of several numbers is the mean squared error over samples and outputs."""
    from smelt.training.losses import classification_loss

    model = AutoModelForSequenceClassification.from_pretrained(folder / "run" / "artifacts" / "tuned").eval()
    inputs, labels = torch.tensor([[5, 6, 7], [8, 9, 5]]), torch.tensor(NUMBERS[:2])
    outputs = model(input_ids=inputs, labels=labels)
    ours = classification_loss(model.config, outputs.logits, labels)
    torch.testing.assert_close(ours, outputs.loss)


def test_report_has_error_of_each_output_and_their_mean(folder):
    report = json.loads((folder / "run" / "report.json").read_text())
    assert [step["status"] for step in report["steps"]] == ["done"] * 6
    score = report["steps"][-1]["quality"]["mse"]
    each = mean_squared_error(NUMBERS, predicted(folder, "onnx"), multioutput="raw_values")
    assert score["parts"] == pytest.approx({"LABEL_0": each[0], "LABEL_1": each[1]}, abs=1e-3)
    assert score["value"] == pytest.approx(each.mean(), abs=1e-3)


def test_package_answers_with_numbers(folder):
    result = harness.smelt("package", folder / "run" / "artifacts" / "onnx", "--out", folder / "package")
    assert result.exit_code == 0, result.output
    spec = importlib.util.spec_from_file_location("infer", folder / "package" / "infer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    classifier = module.Classifier(folder / "package")
    answers = classifier(tiny.SENTENCES)
    expected = predicted(folder, "onnx")
    np.testing.assert_allclose([label for label, _ in answers], expected, atol=1e-4)
    lines = module.answer_lines(classifier, tiny.SENTENCES)
    assert [[float(number) for number in line.split("|")] for line in lines] == expected.tolist()
    [answer] = json.loads(json.dumps(classifier.to_json(answers[:1])))  # what the service returns
    assert answer["label"] == pytest.approx(expected[0], abs=1e-4)


def test_init_writes_recipe_for_several_numbers(folder, tmp_path):
    (tmp_path / "data.jsonl").write_text((folder / "train.jsonl").read_text())
    options = ("--data", tmp_path / "data.jsonl", "--out", tmp_path / "r.yaml")
    result = harness.smelt("init", folder / "m", *options)
    assert result.exit_code == 0, result.output
    result = harness.smelt("plan", tmp_path / "r.yaml")
    assert result.exit_code == 0, result.output
    assert "pearson" in (tmp_path / "r.yaml").read_text()


def test_rows_with_another_number_of_values_are_named(folder, tmp_path):
    rows = [{"text": "a", "label": [0.5, 1]}, {"text": "b", "label": [0.5, 1, 2]}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    artifact = folder / "run" / "artifacts" / "onnx"
    error = command_error(harness.smelt("eval", artifact, "--data", tmp_path / "test.jsonl", code=2))
    assert (error.code, error.line) == ("label-count", 2)
