"""How texts are generated, from the recipe and the command line to the score and its signature."""

import json

import pytest

import smelt
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.models import tiny
from tests.support.processes import forked_workers

RECIPE = """
model: m
task: translation
data: {test: data.jsonl}
stages: []
score:
  quality: [bleu]
  generation: {num_beams: 3, length_penalty: 0.5, max_new_tokens: 6}
  latency: {batch_sizes: [1], rounds: 3, texts: 2, min_round_ms: 1, threads: 1}
"""
SIGNATURE = "|gen:beam 3|length_penalty:0.5|early_stopping:false|max_new_tokens:6|bad_words:1|forced_eos:[0]"


@pytest.fixture(scope="module", autouse=True)
def _forked():
    with pytest.MonkeyPatch.context() as patch:
        forked_workers.install(patch)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    tiny.write_marian(folder / "m")
    tiny.write_pairs(folder / "data.jsonl", 8)
    (folder / "recipe.yaml").write_text(RECIPE)
    smelt.run(folder / "recipe.yaml", out=folder / "run", quiet=True)
    return folder


def _said(*arguments, code=0):
    return harness.smelt(*arguments, code=code).output


def _model_step(folder):
    return json.loads((folder / "report.json").read_text())["steps"][0]


def test_beam_settings_of_recipe_are_scored_timed_and_named(home):
    step = _model_step(home / "run")
    assert SIGNATURE in step["quality"]["bleu"]["signature"]
    assert step["latency"][0]["output_tokens"] > 0
    plan = _said("plan", home / "recipe.yaml")
    assert "beam 3, at most 6 new tokens" in " ".join(plan.split())


def test_other_generation_settings_give_other_scores_and_latency(home):
    other = "score.generation.length_penalty=-2.0"
    _said("run", home / "recipe.yaml", "--out", home / "run2", "--quiet", "--set", other)
    signature = _model_step(home / "run2")["quality"]["bleu"]["signature"]
    assert "length_penalty:-2|" in signature
    assert _model_step(home / "run2")["latency"] != _model_step(home / "run")["latency"]


def test_eval_and_predict_accept_beam_options(home):
    artifact = home / "run" / "artifacts" / "model"
    options = ("--max-new-tokens", 6, "--num-beams", 3)
    arguments = ["eval", artifact, "--data", home / "data.jsonl", "--metric", "bleu", "--json", *options]
    result = harness.smelt(*arguments)
    scores = json.loads(result.stdout)
    assert all(value in result.stderr for value in ("warning: 8 of 8 outputs", "6 tokens"))
    assert "gen:beam 3|length_penalty:1|early_stopping:false|max_new_tokens:6" in scores["bleu"]["signature"]
    with smelt.load(artifact) as model:
        expected = model.generate(tiny.SENTENCES[:2], num_beams=3, max_new_tokens=6)
    assert _said("predict", artifact, *tiny.SENTENCES[:2], *options).splitlines() == expected


def test_predict_samples_reproducibly_with_seed(home):
    artifact = home / "run" / "artifacts" / "model"
    options = ("--sample", "--temperature", 2.0, "--top-k", 20, "--top-p", 0.95)
    first = _said("predict", artifact, *tiny.SENTENCES, *options, "--seed", 1)
    assert _said("predict", artifact, *tiny.SENTENCES, *options, "--seed", 1) == first
    assert _said("predict", artifact, *tiny.SENTENCES, *options, "--seed", 2) != first


@pytest.mark.parametrize(("words", "named"), [
    (["--temperature", "0.5"], ("--temperature", "--sample")), (["--top-k", "3"], ("--top-k", "--sample")),
    (["--sample", "--num-beams", "2"], ("error[settings-conflict]: ", "do_sample", "num_beams: 1")),
    (["--num-beams", "0"], ("--num-beams", "0 ", "1<=x<=64")),
    (["--sample", "--top-p", "0"], ("--top-p", "0.0 ", "0<x<=1")),
])  # fmt: skip
def test_ineffective_search_options_are_rejected_with_exit_code_2(home, words, named):
    output = _said("predict", home / "run" / "artifacts" / "model", "a man", *words, code=2)
    text = " ".join(output.split()).rpartition("Error: ")[2]
    assert [value for value in named if value not in text] == []


def test_missing_columns_error_names_option(home, tmp_path):
    (tmp_path / "test.jsonl").write_text('{"english": "a", "german": "b"}')
    error = command_error(
        harness.smelt("eval", home / "run/artifacts/model", "--data", tmp_path / "test.jsonl", code=2)
    )
    assert error.code == "missing-column"
    assert "--column source=NAME --column target=NAME" in str(error)
