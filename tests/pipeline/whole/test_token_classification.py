"""A token classifier is trained, made smaller, exported, packaged, and asked for entities."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import smelt
from smelt.export.package.standalone.packaged_model import PackagedModel
from tests.support import harness
from tests.support.expected_errors import command_error, error_codes, raises_code
from tests.support.models import masked, taggers

CONFIG = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 40,
}  # fmt: skip
RECIPE = """
model: {config: bert.json, tokenizer: {train: wordpiece, vocab_size: 60}}
task: token-classification
data: {train: train.jsonl, validation: test.jsonl, test: test.jsonl}
stages:
  - finetune: {epochs: 8, batch_size: 16, learning_rate: 5.0e-3}
    name: tuned
  - prune: {targets: [heads, ffn], keep_ratio: 0.5}
  - factorize: {keep_ratio: 0.8}
  - distill:
      teacher: tuned
      losses: {logits: 1.0, labels: 0.5, hidden_states: 1.0}
      max_steps: 20
      batch_size: 16
      learning_rate: 2.0e-3
    name: small
  - onnx: {target: ort-cpu}
    name: onnx-fp32
  - quantize: {scheme: int8-dynamic}
    from: small
    name: int8
  - onnx: {target: ort-cpu}
    name: onnx-int8
baseline: tuned
score: {quality: [entity_f1, tag_accuracy, "own:count_right"], latency: false}
"""
OWN_METRIC = """
def count_right(predictions, references, sources):
    return [float(prediction == reference) for prediction, reference in zip(predictions, references)]
"""
TEXTS = ["Grace, Ada and Alan met.", "in Buenos Aires it rains", "Who is it?", "Edsger lives in New York."]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "bert.json").write_text(json.dumps(CONFIG))
    (home / "own.py").write_text(OWN_METRIC)
    taggers.write_entities(home / "train.jsonl", 200)
    taggers.write_entities(home / "test.jsonl", 60, seed=1)
    (home / "recipe.yaml").write_text(RECIPE)
    result = harness.smelt("run", home / "recipe.yaml", "--out", home / "run", "--quiet")
    assert result.exit_code == 0, result.output
    return home


@pytest.fixture(scope="module")
def package(home):
    result = harness.smelt("package", home / "run" / "artifacts" / "onnx-int8", "--out", home / "package")
    assert result.exit_code == 0, result.output
    return home / "package"


def steps_of(folder: Path) -> dict[str, dict]:
    return {step["name"]: step for step in json.loads((folder / "report.json").read_text())["steps"]}


def entities(results):
    return [[(e["entity_group"], e["word"], e["start"], e["end"]) for e in row] for row in results]


def test_every_step_finds_entities(home):
    steps = steps_of(home / "run")
    for name in ("tuned", "small", "onnx-fp32", "onnx-int8"):
        quality = steps[name]["quality"]
        assert quality["entity_f1"]["value"] > 90, name
        assert quality["entity_f1"]["n"] == quality["own:count_right"]["n"] == 60
        assert [row["label"] for row in steps[name]["classes"]] == ["NAME", "CITY"]
    small, fp32 = steps["small"]["quality"], steps["onnx-fp32"]["quality"]
    assert fp32["entity_f1"]["value"] == small["entity_f1"]["value"]
    assert steps["small"]["parameters"] < steps["tuned"]["parameters"]
    comparison = steps["onnx-int8"]["against_baseline"]["entity_f1"]
    assert comparison["n"] == 60
    assert steps["onnx-int8"]["agreement"]["equal"] > 80


def test_exported_model_finds_entities_of_pipeline(home):
    pipe = transformers.pipeline(
        "token-classification", str(home / "run" / "artifacts" / "tuned"), aggregation_strategy="first"
    )
    expected = [[(e["entity_group"], e["start"], e["end"]) for e in pipe(text)] for text in TEXTS]
    assert list(map(len, expected)) == [3, 1, 0, 2]
    for step in ("tuned", "onnx-fp32"):
        with smelt.load(home / "run" / "artifacts" / step) as model:
            results = model.tag(TEXTS)
        assert [[(e.entity_group, e.start, e.end) for e in row] for row in results] == expected
    result = harness.smelt("predict", home / "run" / "artifacts" / "onnx-fp32", "--json", *TEXTS)
    assert entities(json.loads(line)["entities"] for line in result.output.splitlines()) == [
        [(e.entity_group, e.word, e.start, e.end) for e in row] for row in results
    ]


def test_predict_reads_words_and_texts(home, tmp_path):
    rows = [{"tokens": TEXTS[3].replace(".", " .").split()}, {"text": TEXTS[3]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("predict", home / "run" / "artifacts" / "onnx-fp32", "--data", tmp_path / "rows.jsonl")
    of_words, of_text = harness.smelt(*command).output.splitlines()[:2]
    assert of_words == of_text == harness.smelt(*command[:2], TEXTS[3]).output.splitlines()[0]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"sentence": TEXTS[3]}) + "\n")
    assert harness.smelt(*command, "--column", "sentence").output.splitlines()[0] == of_text
    assert command_error(harness.smelt(*command)).code == "missing-column"


def test_python_takes_texts_and_words(home):
    with smelt.load(home / "run" / "artifacts" / "onnx-fp32") as model:
        text, words = model.tag(["in New York it rains", ["in", "New", "York", "it", "rains"]])
        assert text == words != []
        assert model.tag([]) == []
        for value, code in (([["a", ""]], "empty-word"), ([3], "not-a-text"), ("a", "not-a-list")):
            with raises_code(code):
                model.tag(value)
        with raises_code("does-not-fit-task"):
            model.predict(["a"])
        with pytest.warns(smelt.core.errors.TruncationWarning):
            model.tag(["Ada " * 100])
        assert model.truncated == 1


def test_eval_scores_the_same_on_words(home):
    artifact = home / "run" / "artifacts" / "onnx-fp32"
    result = harness.smelt(
        "eval", artifact, "--data", home / "test.jsonl", "--metric", "entity_recall", "--json"
    )
    expected = steps_of(home / "run")["onnx-fp32"]["quality"]["entity_f1"]["value"]
    assert json.loads(result.output)["entity_recall"]["n"] == 60
    result = harness.smelt("eval", artifact, "--data", home / "test.jsonl", "--json")
    assert json.loads(result.output)["entity_f1"]["value"] == expected


def test_package_finds_the_same_entities(home, package):
    words = ["in", "New York", "Ada", "it", "rains"]
    texts = [*TEXTS, "", "Ada \u6771\u4eac Rome", "Ada " * 60, words, ["Grace"], []]
    with smelt.load(home / "run" / "artifacts" / "onnx-int8") as model, pytest.warns():
        expected = model.tag(texts)
    served = PackagedModel(package, "Tagger", threads=1)
    results = served.answer([served.read(text) for text in texts])
    assert entities(results) == [[(e.entity_group, e.word, e.start, e.end) for e in row] for row in expected]
    assert served.cut == 1
    command = [sys.executable, package / "infer.py", TEXTS[0]]
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert line == harness.smelt("predict", home / "run" / "artifacts" / "onnx-int8", TEXTS[0]).output
    for value in (["a", 1], ["a", " "], ["a", "\ud800"], {}):
        with pytest.raises(ValueError):  # noqa: PT011 - the service answers 422 to any
            served.read(value)


def test_encoder_gets_head_for_the_tags_of_the_data(tmp_path):
    masked.write_model(tmp_path / "m")
    taggers.write_rows(tmp_path / "r.jsonl")
    (tmp_path / "recipe.yaml").write_text(
        "model: m\ntask: token-classification\ndata: {train: r.jsonl, test: r.jsonl}\n"
        "stages:\n  - finetune: {max_steps: 2, batch_size: 4}\nscore: {latency: false}\n"
    )
    result = harness.smelt("run", tmp_path / "recipe.yaml", "--out", tmp_path / "run", "--quiet")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "run" / "artifacts" / "finetune" / "config.json").read_text())
    assert config["architectures"] == ["BertForTokenClassification"]
    assert list(config["id2label"].values()) == ["O", "B-BEING", "B-PLACE"]
    assert [w["code"] for w in steps_of(tmp_path / "run")["model"]["warnings"]] == ["new-classifier"]


@pytest.mark.parametrize(("rows", "code"), [
    ('{"tokens": ["a"], "tags": [0]}\n{"tokens": ["a"], "tags": [1]}\n', "unnamed-tags"),
    ('{"tokens": ["a"], "tags": ["O", "O"]}\n', "tag-count-mismatch"),
    ('{"tokens": ["a"], "tags": ["O"]}\n', "one-label"),
])  # fmt: skip
def test_plan_refuses_tags_that_a_head_cannot_have(tmp_path, rows, code):
    masked.write_model(tmp_path / "m")
    (tmp_path / "r.jsonl").write_text(rows)
    recipe = "model: m\ntask: token-classification\ndata: {train: r.jsonl, test: r.jsonl}\n"
    (tmp_path / "r.yaml").write_text(f"{recipe}stages:\n  - finetune: {{max_steps: 2}}\n")
    error = command_error(harness.smelt("plan", tmp_path / "r.yaml"))
    assert code in error_codes(error)


@pytest.mark.parametrize(("settings", "data"), [
    ("augmentation: {model: m}", ""), ("cache_logits: {}", ""),
    ("train_on: unlabeled", "unlabeled: r.jsonl, "),
])  # fmt: skip
def test_plan_refuses_distillation_that_needs_no_tags(tmp_path, settings, data):
    masked.write_model(tmp_path / "m")
    taggers.write_model(tmp_path / "tagger")
    taggers.write_rows(tmp_path / "r.jsonl")
    (tmp_path / "r.yaml").write_text(
        f"model: tagger\ntask: token-classification\ndata: {{{data}train: r.jsonl, test: r.jsonl}}\n"
        f"stages:\n  - distill: {{losses: {{logits: 1.0, labels: 0.0}}, {settings}}}\n"
    )
    error = command_error(harness.smelt("plan", tmp_path / "r.yaml"))
    assert {"does-not-fit-task", "unsupported-task"} & {*error_codes(error)}


def test_calibration_needs_no_tags(tmp_path):
    taggers.write_model(tmp_path / "m")
    taggers.write_rows(tmp_path / "r.jsonl")
    (tmp_path / "c.jsonl").write_text(json.dumps({"tokens": ["two", "dogs"]}) + "\n")
    recipe = (
        "model: m\ntask: token-classification\ndata: {calibration: c.jsonl, test: r.jsonl}\n"
        "score: {latency: false}\nstages:\n"
    )
    steps = "  - quantize: {scheme: int8-static, calibration_samples: 1}\n"
    (tmp_path / "r.yaml").write_text(recipe + steps)
    result = harness.smelt("run", tmp_path / "r.yaml", "--out", tmp_path / "run", "--quiet")
    assert result.exit_code == 0, result.output
    (tmp_path / "r.yaml").write_text(f"{recipe}  - prune: {{targets: [ffn], importance: taylor}}\n")
    error = command_error(harness.smelt("plan", tmp_path / "r.yaml"))
    assert "missing-labels" in error_codes(error)


def test_classifier_of_texts_gets_new_head(tmp_path):
    taggers.every_family.make_model(tmp_path / "m", "bert")
    taggers.write_rows(tmp_path / "r.jsonl")
    (tmp_path / "r.yaml").write_text(
        "model: m\ntask: token-classification\ndata: {train: r.jsonl, test: r.jsonl}\n"
        "stages:\n  - finetune: {max_steps: 2, batch_size: 4}\nscore: {latency: false}\n"
    )
    result = harness.smelt("run", tmp_path / "r.yaml", "--out", tmp_path / "run", "--quiet")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "run" / "artifacts" / "finetune" / "config.json").read_text())
    assert config["architectures"] == ["BertForTokenClassification"]
    assert list(config["id2label"].values()) == ["O", "B-BEING", "B-PLACE"]


def test_init_recognizes_task_from_model_and_from_rows(tmp_path):
    taggers.write_model(tmp_path / "tagger")
    masked.write_model(tmp_path / "encoder")
    taggers.write_rows(tmp_path / "train.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    renamed = "".join(json.dumps({"words": row["tokens"], "ner_tags": row["tags"]}) + "\n" for row in rows)
    (tmp_path / "train.jsonl").write_text(renamed)
    (tmp_path / "test.jsonl").write_text(renamed)
    data = ("--data", tmp_path / "train.jsonl", "--data", tmp_path / "test.jsonl")
    for model, first_step in (("tagger", "prune"), ("encoder", "finetune")):
        result = harness.smelt("init", tmp_path / model, *data, "--out", tmp_path / f"{model}.yaml")
        assert result.exit_code == 0, result.output
        text = (tmp_path / f"{model}.yaml").read_text()
        assert "task: token-classification\n" in text
        assert "columns: {tokens: words, tags: ner_tags}" in text
        assert next(line for line in text.splitlines() if line.startswith("  - ")).startswith(
            f"  - {first_step}:"
        )
        assert harness.smelt("plan", tmp_path / f"{model}.yaml").exit_code == 0
