"""Recipes that start from a config without weights, from the command line to a scored artifact."""

import json

import pytest
import tiny
from click.testing import CliRunner

import smelt
from smelt.cli import main
from smelt.core.errors import InputError
from smelt.plan.plan import describe_plan, load_plan

BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 64, "max_position_embeddings": 32}
BART = {"model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64}
BART |= {"decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"max_position_embeddings": 64, "dropout": 0.0}
HEAD = "data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}\nthreads: 1\n"
HEAD += "score: {latency: false}\n"
CLASSIFIER = f"""
model: {{config: bert.json, tokenizer: {{train: wordpiece, vocab_size: 120}}}}
task: text-classification
{HEAD}stages:
  - finetune: {{max_steps: 60, batch_size: 8, evals: 1, learning_rate: 3.0e-3, precision: fp32}}
  - quantize
"""


def _run(home, text, out="run", *more):
    (home / "recipe.yaml").write_text(text)
    arguments = ["run", str(home / "recipe.yaml"), "--out", str(home / out), "--quiet", *more]
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 0, result.output
    report = json.loads((home / out / "report.json").read_text())
    return {step["name"]: step for step in report["steps"]} | {"": report}


@pytest.fixture
def home(tmp_path):
    (tmp_path / "bert.json").write_text(json.dumps(BERT))
    tiny.labelled(tmp_path / "data.jsonl", 10)
    return tmp_path


def test_a_classifier_is_trained_from_nothing(home):
    steps = _run(home, CLASSIFIER)
    assert steps["finetune"]["quality"]["accuracy"]["value"] == 100  # it has learned its ten rows
    assert steps[""]["baseline"] == "finetune"
    assert steps["quantize"]["against_baseline"]["accuracy"]
    root = steps["model"]
    assert (root["status"], root["quality"]) == ("done", {})
    assert "random" in root["reason"]
    assert root["facts"]["untrained"] is True
    config = json.loads((home / "run" / "artifacts" / "finetune" / "config.json").read_text())
    assert config["vocab_size"] <= 120
    tokenizer = json.loads((home / "run" / "artifacts" / "finetune" / "tokenizer.json").read_text())
    assert tokenizer["model"]["type"] == "WordPiece"


def test_a_config_that_names_the_class_of_a_classifier_takes_its_outputs_from_the_data(home):
    (home / "bert.json").write_text(json.dumps(BERT | {"architectures": ["BertForSequenceClassification"]}))
    rows = "".join(json.dumps({"text": f"word {i}", "label": "abc"[i % 3]}) + "\n" for i in range(6))
    (home / "data.jsonl").write_text(rows)
    _run(home, CLASSIFIER, "run", "--until", "finetune", "--set", "finetune.max_steps=1")
    config = json.loads((home / "run" / "artifacts" / "finetune" / "config.json").read_text())
    assert config["id2label"] == {"0": "a", "1": "b", "2": "c"}


def test_the_same_start_is_taken_from_the_store_and_another_seed_is_another_model(home):
    until = ("--until", "finetune", "--set", "finetune.max_steps=1")
    first = _run(home, CLASSIFIER, "a", *until)
    again = _run(home, CLASSIFIER, "b", *until)
    other = _run(home, CLASSIFIER, "c", *until, "--set", "seed=1")
    assert [first["model"]["status"], again["model"]["status"]] == ["done", "cached"]
    assert first["model"]["key"] == again["model"]["key"] != other["model"]["key"]


def test_a_sequence_model_is_trained_from_nothing(home):
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(BART))
    tiny.pairs(home / "data.jsonl", 10)
    steps = _run(
        home,
        f"""
model: {{config: model, tokenizer: {{train: bpe, vocab_size: 300}}}}
task: translation
{HEAD.replace("latency", "generation: {max_new_tokens: 8}, latency")}stages:
  - finetune: {{max_steps: 60, batch_size: 10, evals: 1, learning_rate: 5.0e-3, precision: fp32}}
""",
    )
    training = steps["finetune"]["facts"]["training"]
    assert training["train_loss"] < 5.0  # ln 300 = 5.7 at the start
    assert steps["finetune"]["quality"]["chrf"]["n"] == 10
    config = json.loads((home / "run" / "artifacts" / "finetune" / "config.json").read_text())
    assert (config["decoder_start_token_id"], config["eos_token_id"], config["pad_token_id"]) == (2, 2, 1)


def test_a_tokenizer_can_be_taken_from_a_folder(home):
    tiny.bert(home / "other")
    text = CLASSIFIER.replace("{train: wordpiece, vocab_size: 120}", "other")
    steps = _run(home, text, "run", "--set", "finetune.max_steps=1", "--until", "finetune")
    folder = home / "run" / "artifacts" / "model"
    assert (folder / "vocab.txt").read_text() == (home / "other" / "vocab.txt").read_text()
    words = len((home / "other" / "vocab.txt").read_text().splitlines())
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == words
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"]["tokenizer"] == "other"
    assert steps["model"]["parameters"] == manifest["facts"]["parameters"]


def test_plan_says_what_it_starts_from(home):
    (home / "recipe.yaml").write_text(CLASSIFIER)
    text = describe_plan(load_plan(home / "recipe.yaml"))
    words = " ".join(text.split())
    assert "model bert.json, untrained; tokenizer: wordpiece, at most 120 tokens, from train" in words


MISTAKES = {
    "config: bart.json": "bart.json: no such file; expected a model's config. Did you mean 'bert.json'",
    "tokenizer: {train: bpe, vocab_size: 200}": "model.tokenizer: vocab_size 200 is too small for bpe",
    "tokenizer: {train: bbpe}": "tokenizer.train: expected one of 'bpe', 'unigram', 'wordpiece'",
    "tokenizer: nowhere": "model.tokenizer: .*nowhere: no such folder",
    "task: translation": "model.config: a bert model is not supported for translation",
    "stages: [quantize]": "stages: no step trains the model, whose weights are random; add finetune",
    "baseline: model": "baseline: 'model' has random weights; name a step that is trained",
    "- distill: {}": "distill: teacher: 'model' has random weights",
    "data: {test: data.jsonl}": "there are no training rows to learn it from",
}


@pytest.mark.parametrize("change", MISTAKES)
def test_what_cannot_work_is_said_before_any_work(home, change):
    text = CLASSIFIER
    key = change.split(":")[0]
    if key == "config":
        text = text.replace("config: bert.json", change)
    elif key == "tokenizer":
        text = text.replace("tokenizer: {train: wordpiece, vocab_size: 120}", change)
    elif key == "task":
        text = text.replace("task: text-classification", change)
    elif key == "stages":
        text = text.split("stages:")[0] + change
    elif key == "- distill":
        text += f"  {change}\n"
    elif key == "data":
        text = text.replace("data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}", change)
    else:
        text += f"{change}\n"
    assert text != CLASSIFIER
    (home / "recipe.yaml").write_text(text)
    with pytest.raises(InputError, match=MISTAKES[change]):
        load_plan(home / "recipe.yaml")


BARE = """
model: m
task: text-classification
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}
stages:
  - finetune: {max_steps: 1, precision: fp32}
    name: tuned
  - distill: {max_steps: 1, precision: fp32}
baseline: tuned
score: {latency: false}
"""


@pytest.fixture
def bare(home):
    """A folder with an encoder that has no classifier yet."""
    from transformers import BertConfig, BertModel

    folder = tiny.bert(home / "m")
    BertModel(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    return home


def test_a_classifier_that_is_still_to_be_made_teaches_nobody(bare):
    (bare / "recipe.yaml").write_text(BARE)
    message = (
        r"recipe.yaml:8: distill: teacher: 'model' is a bare BertModel, whose new classifier has random"
        r" weights; name a step that is trained \(teacher: tuned\)"
    )
    with pytest.raises(InputError, match=message):
        load_plan(bare / "recipe.yaml")
    first = BARE.replace("  - finetune: {max_steps: 1, precision: fp32}\n    name: tuned\n", "")
    (bare / "recipe.yaml").write_text(first.replace("baseline: tuned\n", ""))
    with pytest.raises(InputError, match=r"put a finetune before it and name that as the teacher"):
        load_plan(bare / "recipe.yaml")


def test_a_step_that_is_the_baseline_already_is_not_advised(bare):
    recipe = BARE.replace("distill: {", "distill: {teacher: tuned, ")
    for text, advised in ((recipe, False), (recipe.replace("baseline: tuned\n", ""), True)):
        (bare / "recipe.yaml").write_text(text)
        (said,) = [w for w in load_plan(bare / "recipe.yaml").warnings if "no classifier yet" in w]
        assert ("begin with a finetune step and take that as the baseline" in said) == advised


def test_a_tuned_encoder_teaches(bare):
    steps = _run(bare, BARE.replace("distill: {", "distill: {teacher: tuned, "), "run")
    assert steps["distill"]["status"] == "done"
    manifest = json.loads((bare / "run" / "artifacts" / "model" / "manifest.json").read_text())
    assert manifest["facts"]["new_head"] is True


def test_an_encoder_that_was_fetched_is_noticed_when_the_stage_begins(bare, monkeypatch):
    """Nothing is known of a hub's model when the recipe is planned."""
    monkeypatch.setattr("smelt.plan.inputs.local_folder", lambda model, base: None)
    monkeypatch.setattr("smelt.plan.plan.fetch_model", lambda model, base, task: bare / "m")
    (bare / "recipe.yaml").write_text(BARE)
    result = smelt.run(bare / "recipe.yaml", out=bare / "run")
    (step,) = [s for s in result.report["steps"] if s["name"] == "distill"]
    assert step["status"] == "error"
    assert (
        "the classifier of the teacher 'model' is random; name a trained step: teacher: tuned"
        in step["error"]
    )
