"""Recipes that start from a config without weights: what the plan says of them."""

import json

import pytest

import smelt
from smelt.core.errors import InputError
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import untrained_recipes
from tests.support.expected_errors import raises_code
from tests.support.models import tiny
from tests.support.untrained_recipes import CLASSIFIER, run_recipe


@pytest.fixture
def home(tmp_path):
    return untrained_recipes.write_config_and_data(tmp_path)


def test_plan_shows_config_and_tokenizer_of_untrained_model(home):
    (home / "recipe.yaml").write_text(CLASSIFIER)
    text = str(load_plan(home / "recipe.yaml"))
    flat_text = " ".join(text.split())
    assert "model bert.json, untrained; tokenizer: wordpiece, at most 120 tokens, from train" in flat_text


MISTAKES = {
    "config: bart.json": ("missing-config", "model.config", "'bert.json'?"),
    "tokenizer: {train: bpe, vocab_size: 200}": ("wrong-value", "model.tokenizer", "200"),
    "tokenizer: {train: bbpe}": ("wrong-value", "model.tokenizer.train", "'bpe', 'unigram', 'wordpiece'"),
    "tokenizer: nowhere": ("missing-folder", "model.tokenizer", "nowhere"),
    "task: translation": ("unsupported-task", "model.config", "bert"),
    "stages: [quantize]": ("untrained-model", "stages", "finetune"),
    "baseline: model": ("untrained-baseline", "baseline", "'model'"),
    "- distill: {}": ("untrained-teacher", None, "distill: teacher: 'model'"),
    "data: {test: data.jsonl}": ("missing-data", "model.tokenizer.train", ""),
}


@pytest.mark.parametrize("change", MISTAKES)
def test_invalid_untrained_recipes_are_rejected(home, change):
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
    code, setting, fragment = MISTAKES[change]
    with pytest.raises(InputError) as excinfo:
        load_plan(home / "recipe.yaml")
    errors = [error for error in excinfo.value.messages if (error.code, error.setting) == (code, setting)]
    assert len(errors) == 1, str(excinfo.value)
    assert fragment in errors[0].message


def test_invalid_settings_of_the_only_training_are_the_only_error(home):
    """Losses on inner states with two teachers make the whole step invalid, and it trains nevertheless."""
    untrained = CLASSIFIER.split("stages:")[0]
    stage = "distill: {teacher: [{model: a}, {model: b}], losses: {hidden_states: 1}}"
    (home / "recipe.yaml").write_text(f"{untrained}stages: [{stage}]\n")
    with pytest.raises(InputError) as excinfo:
        load_plan(home / "recipe.yaml")
    assert [error.code for error in excinfo.value.messages] == ["several-teachers"]


PROMPTED = """
model: {config: gpt2.json, tokenizer: {train: bpe, vocab_size: 300}}
task: text-generation
data: {train: p.jsonl, test: p.jsonl, prompt_template: TEMPLATE}
stages: [finetune]
score: {latency: false}
"""


@pytest.mark.parametrize(
    ("template", "code"),
    [("'{promt}'", "missing-placeholder"), ("chat", "no-chat-template"), ("'Q: {prompt}'", None)],
)
def test_invalid_prompt_template_of_untrained_model_is_rejected(tmp_path, template, code):
    (tmp_path / "gpt2.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 16, "n_head": 2}))
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "response": "two"}\n' * 4)
    (tmp_path / "recipe.yaml").write_text(PROMPTED.replace("TEMPLATE", template))
    if code is None:
        load_plan(tmp_path / "recipe.yaml")
        return
    with pytest.raises(InputError) as excinfo:
        load_plan(tmp_path / "recipe.yaml")
    assert [(error.code, error.line) for error in excinfo.value.messages] == [(code, 4)]


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


def test_unsupported_config_of_untrained_model_is_rejected(home):
    rope = {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4}}
    config = {"model_type": "modernbert", "rope_parameters": rope}
    (home / "modern.json").write_text(json.dumps(config))
    (home / "recipe.yaml").write_text(CLASSIFIER.replace("config: bert.json", "config: modern.json"))
    with raises_code("unsupported-config", InputError) as excinfo:
        load_plan(home / "recipe.yaml")
    assert [error.setting for error in excinfo.value.messages] == ["model.config"]
    assert "'dynamic'" in str(excinfo.value)


@pytest.fixture
def bare(home):
    """A folder with an encoder that has no classifier yet."""
    from transformers import BertConfig, BertModel

    folder = tiny.write_bert(home / "m")
    BertModel(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    return home


def test_untrained_classifier_is_rejected_as_teacher(bare):
    (bare / "recipe.yaml").write_text(BARE)
    with raises_code("untrained-teacher", InputError) as excinfo:
        load_plan(bare / "recipe.yaml")
    [error] = excinfo.value.messages
    assert error.line == 8
    assert all(value in error.message for value in ("distill: teacher: ", "BertModel", "(teacher: tuned)"))
    first = BARE.replace("  - finetune: {max_steps: 1, precision: fp32}\n    name: tuned\n", "")
    (bare / "recipe.yaml").write_text(first.replace("baseline: tuned\n", ""))
    with raises_code("untrained-teacher", InputError) as excinfo:
        load_plan(bare / "recipe.yaml")
    assert "tuned" not in str(excinfo.value)


def test_baseline_step_is_not_suggested_as_baseline(bare):
    recipe = BARE.replace("distill: {", "distill: {teacher: tuned, ")
    for text, advised in ((recipe, False), (recipe.replace("baseline: tuned\n", ""), True)):
        (bare / "recipe.yaml").write_text(text)
        (warning,) = [
            message
            for message in load_plan(bare / "recipe.yaml").warnings
            if message.code == "new-classifier"
        ]
        assert ("baseline" in warning.message) == advised


def test_finetuned_encoder_is_accepted_as_teacher(bare):
    steps = run_recipe(bare, BARE.replace("distill: {", "distill: {teacher: tuned, "), "run")
    assert steps["distill"]["status"] == "done"
    manifest = json.loads((bare / "run" / "artifacts" / "model" / "manifest.json").read_text())
    assert manifest["details"]["new_head"] is True


def test_downloaded_encoder_without_head_is_rejected_at_stage_start(bare, monkeypatch):
    """Nothing is known of a hub's model when the recipe is planned."""
    monkeypatch.setattr("smelt.pipeline.plan.load_plan.local_model_folder", lambda model, base: None)
    monkeypatch.setattr("smelt.pipeline.plan.plan.fetch_model", lambda model, base, task: bare / "m")
    (bare / "recipe.yaml").write_text(BARE)
    result = smelt.run(bare / "recipe.yaml", out=bare / "run")
    (step,) = [s for s in result.report["steps"] if s["name"] == "distill"]
    assert step["status"] == "error"
    assert step["error"]["code"] == "untrained-teacher"
    assert "teacher: tuned" in step["error"]["message"]


def test_labels_missing_in_train_are_rejected_by_plan(home):
    rows = [json.loads(line) for line in (home / "data.jsonl").read_text().splitlines()]
    other = [row | {"label": "positive"} for row in rows]
    (home / "other.jsonl").write_text("\n".join(map(json.dumps, other)))
    (home / "recipe.yaml").write_text(CLASSIFIER.replace("test: data.jsonl", "test: other.jsonl"))
    with raises_code("unknown-label", InputError) as excinfo:
        load_plan(home / "recipe.yaml")
    assert [error.setting for error in excinfo.value.messages] == ["data.test"]
    assert "'positive'" in str(excinfo.value)
