"""Thresholds of labels: chosen on validation by a training, and kept to the package."""

import importlib.util
import json

import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_recall_curve

import smelt
from smelt.data.labels import MULTI_LABEL
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.models import classifiers

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}
stages:
  - finetune: {max_steps: 4, batch_size: 4, num_evals: 1, label_thresholds: per-label}
  - quantize: {}
  - onnx: {}
score: {latency: false, quality: [f1_micro]}
"""


def home(folder, recipe):
    names = dict(enumerate(classifiers.CLASS_NAMES))
    classifiers.distilbert(folder / "m", labels=3, id2label=names, problem_type=MULTI_LABEL)
    classifiers.write_labeled_rows(folder / "data.jsonl", MULTI_LABEL)
    (folder / "recipe.yaml").write_text(recipe)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = home(tmp_path_factory.mktemp("thresholds"), RECIPE)
    result = harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet")
    assert result.exit_code == 0, result.output
    return folder


def test_chosen_thresholds_are_in_report_and_all_later_artifacts(folder):
    steps = {step["name"]: step for step in json.loads((folder / "run/report.json").read_text())["steps"]}
    chosen = steps["finetune"]["details"]["label_thresholds"]
    assert list(chosen) == classifiers.CLASS_NAMES
    assert set(chosen.values()) != {0.5}
    for step in ("finetune", "quantize", "onnx"):
        config = json.loads((folder / "run" / "artifacts" / step / "config.json").read_text())
        assert config["label_thresholds"] == pytest.approx(chosen, abs=1e-4)


def test_package_predicts_and_report_scores_with_thresholds(folder):
    result = harness.smelt("package", folder / "run" / "artifacts" / "onnx", "--out", folder / "package")
    assert result.exit_code == 0, result.output
    spec = importlib.util.spec_from_file_location("infer", folder / "package" / "infer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    answers = module.Classifier(folder / "package")([row["text"] for row in rows])
    config = json.loads((folder / "run" / "artifacts" / "onnx" / "config.json").read_text())
    limits = [config["label_thresholds"][name] for name in classifiers.CLASS_NAMES]
    expected = np.array([list(chances.values()) for _, chances in answers]) > limits
    gold = np.array([[name in row["label"] for name in classifiers.CLASS_NAMES] for row in rows])
    for (label, _), is_predicted in zip(answers, expected, strict=True):
        assert label == tuple(np.array(classifiers.CLASS_NAMES)[is_predicted])
    score = json.loads((folder / "run/report.json").read_text())["steps"][-1]["quality"]["f1_micro"]
    assert score["value"] == pytest.approx(100 * f1_score(gold, expected, average="micro", zero_division=0))


def test_distill_chooses_thresholds_on_validation_alone(tmp_path):
    """The highest micro F1 on validation, as scikit-learn's curve has it; test samples have other labels."""
    recipe = RECIPE.replace("finetune: {", "distill: {").replace("per-label", "shared")
    folder = home(tmp_path, recipe.replace("test: data.jsonl", "test: test.jsonl"))
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"label": classifiers.CLASS_NAMES}) for row in rows]
    (folder / "test.jsonl").write_text("\n".join(lines))
    result = harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet")
    assert result.exit_code == 0, result.output
    with smelt.load(folder / "run" / "artifacts" / "distill") as model:
        predictions = model.predict([row["text"] for row in rows])
    probabilities = np.array(
        [[p.probabilities[name] for name in classifiers.CLASS_NAMES] for p in predictions]
    )
    gold = np.array([[name in row["label"] for name in classifiers.CLASS_NAMES] for row in rows])
    config = json.loads((folder / "run" / "artifacts" / "distill" / "config.json").read_text())
    [threshold] = set(config["label_thresholds"].values())
    precision, recall, _ = precision_recall_curve(gold.ravel(), probabilities.ravel())
    best = np.max(2 * precision * recall / np.maximum(precision + recall, 1e-12))
    assert f1_score(gold, probabilities > threshold, average="micro") == pytest.approx(best)


@pytest.mark.parametrize(("value", "config", "code"), [
    ("{clam: 0.3}", {}, "wrong-label-thresholds"), ("1.5", {}, "wrong-label-thresholds"),
    ("shared", {"problem_type": "single_label_classification"}, "does-not-fit-model"),
])  # fmt: skip
def test_thresholds_that_do_not_fit_are_refused_by_plan(value, config, code, tmp_path):
    folder = home(tmp_path, RECIPE.replace("per-label", value))
    path = folder / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    error = command_error(harness.smelt("plan", folder / "recipe.yaml", code=2))
    assert code in {error.code, *(message.code for message in error.messages)}


def test_thresholds_of_model_without_problem_type_follow_labels_of_data(tmp_path):
    """The lists in the data make the classifier multi-label, also a new one."""
    folder = home(tmp_path, RECIPE.replace("per-label", "{calm: 0.3}"))
    path = folder / "m" / "config.json"
    config = json.loads(path.read_text())
    del config["problem_type"]
    path.write_text(json.dumps(config))
    assert harness.smelt("plan", folder / "recipe.yaml").exit_code == 0
    path.write_text(json.dumps(config | {"architectures": ["DistilBertModel"], "id2label": {}}))
    assert harness.smelt("plan", folder / "recipe.yaml").exit_code == 0
