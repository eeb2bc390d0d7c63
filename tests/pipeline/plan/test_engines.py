"""How long a text the engines of a recipe are built for."""

import pytest
import tiny

from smelt.core.errors import InputError
from smelt.plan.load import load_plan

RECIPE = """
model: m
task: translation
data: {{validation: data.jsonl, test: data.jsonl}}
stages:
  - onnx: {{target: tensorrt}}
  - tensorrt: {engine}
    optional: true
score: {{quality: [bleu], generation: {score}}}
"""


@pytest.fixture
def home(tmp_path):
    tiny.marian(tmp_path / "m")
    tiny.pairs(tmp_path / "data.jsonl", 4)
    return tmp_path


def _longest(home, engine, score):
    (home / "recipe.yaml").write_text(RECIPE.format(engine=engine, score=score))
    return load_plan(home / "recipe.yaml").step("tensorrt").settings.max_new_tokens


def test_an_engine_takes_the_longest_output_of_the_scoring(home):
    assert _longest(home, "{}", "{max_new_tokens: 300}") == 300
    assert _longest(home, "{max_new_tokens: 400}", "{max_new_tokens: 300}") == 400


def test_the_stage_asks_the_model_where_nobody_says_it(home):
    assert _longest(home, "{}", "{}") is None
    assert _longest(home, "{max_new_tokens: 50}", "{}") == 50


def test_an_engine_that_is_too_short_for_the_scoring_is_a_mistake(home):
    with pytest.raises(InputError, match=r"recipe.yaml:7: .*: 50 is less than the 300 of score"):
        _longest(home, "{max_new_tokens: 50}", "{max_new_tokens: 300}")
