"""Models that begin as a config without weights, made, trained and kept."""

import json

import pytest

from tests.support import untrained_recipes
from tests.support.models import tiny
from tests.support.untrained_recipes import BART, BERT, CLASSIFIER, RECIPE_HEAD, run_recipe


@pytest.fixture
def home(tmp_path):
    return untrained_recipes.write_config_and_data(tmp_path)


def test_classifier_is_trained_from_config(home):
    steps = run_recipe(home, CLASSIFIER)
    assert steps["finetune"]["quality"]["accuracy"]["value"] == 100  # it has learned its ten rows
    assert steps[""]["baseline"] == "finetune"
    assert steps["quantize"]["against_baseline"]["accuracy"]
    root = steps["model"]
    assert (root["status"], root["quality"]) == ("done", {})
    assert "random" in root["reason"]
    assert root["details"]["untrained"] is True
    config = json.loads((home / "run" / "artifacts" / "finetune" / "config.json").read_text())
    assert config["vocab_size"] <= 120
    tokenizer = json.loads((home / "run" / "artifacts" / "finetune" / "tokenizer.json").read_text())
    assert tokenizer["model"]["type"] == "WordPiece"


def test_classifier_config_takes_labels_from_data(home):
    (home / "bert.json").write_text(json.dumps(BERT | {"architectures": ["BertForSequenceClassification"]}))
    rows = "".join(json.dumps({"text": f"word {i}", "label": "abc"[i % 3]}) + "\n" for i in range(6))
    (home / "data.jsonl").write_text(rows)
    run_recipe(home, CLASSIFIER, "run", "--until", "finetune", "--set", "finetune.max_steps=1")
    config = json.loads((home / "run" / "artifacts" / "finetune" / "config.json").read_text())
    assert config["id2label"] == {"0": "a", "1": "b", "2": "c"}


def test_untrained_model_is_cached_and_depends_on_seed(home):
    until = ("--until", "finetune", "--set", "finetune.max_steps=1")
    first = run_recipe(home, CLASSIFIER, "a", *until)
    second = run_recipe(home, CLASSIFIER, "b", *until)
    other = run_recipe(home, CLASSIFIER, "c", *until, "--set", "seed=1")
    assert [first["model"]["status"], second["model"]["status"]] == ["done", "cached"]
    assert first["model"]["key"] == second["model"]["key"] != other["model"]["key"]


def test_sequence_model_is_trained_from_config(home):
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(BART))
    tiny.write_pairs(home / "data.jsonl", 10)
    steps = run_recipe(
        home,
        f"""
model: {{config: model, tokenizer: {{train: bpe, vocab_size: 300}}}}
task: translation
{RECIPE_HEAD.replace("latency", "generation: {max_new_tokens: 8}, latency")}stages:
  - finetune: {{max_steps: 60, batch_size: 10, num_evals: 1, learning_rate: 5.0e-3, precision: fp32}}
""",
    )
    training = steps["finetune"]["details"]["training"]
    assert training["train_loss"] < 5.0  # ln 300 = 5.7 at the start
    assert steps["finetune"]["quality"]["chrf"]["n"] == 10
    config = json.loads((home / "run" / "artifacts" / "finetune" / "config.json").read_text())
    assert (config["decoder_start_token_id"], config["eos_token_id"], config["pad_token_id"]) == (2, 2, 1)


def test_tokenizer_of_untrained_model_can_come_from_folder(home):
    tiny.write_bert(home / "other")
    text = CLASSIFIER.replace("{train: wordpiece, vocab_size: 120}", "other")
    steps = run_recipe(home, text, "run", "--set", "finetune.max_steps=1", "--until", "finetune")
    folder = home / "run" / "artifacts" / "model"
    assert (folder / "vocab.txt").read_text() == (home / "other" / "vocab.txt").read_text()
    num_tokens = len((home / "other" / "vocab.txt").read_text().splitlines())
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == num_tokens
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"]["tokenizer"] == "other"
    assert steps["model"]["parameters"] == manifest["details"]["parameters"]
