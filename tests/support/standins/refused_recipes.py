"""Recipes that are refused: what they begin with, the home they are read in, what must be reported of them.

A file of tests that asks for its fixtures says `pytest_plugins = ["refused_recipes"]`.
"""

import shutil

import harness
import pytest
import tiny
from refusals import codes_of, error_of

HEAD = "model: m\ntask: text-classification\ndata: {train: data.jsonl, test: data.jsonl}\n"
RECIPE = HEAD + "stages: [{prune: {keep_ratio: 0.5}}]\nscore: {quality: [accuracy], latency: false}\n"
PAIRS = "model: t\ntask: translation\ndata: {train: pairs.jsonl, test: pairs.jsonl}\n"
TRANSLATE = PAIRS + "stages: [{prune: {keep_ratio: 0.5}}]\nscore: {quality: [bleu], latency: false}\n"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    tiny.bert(folder / "m")
    tiny.marian(folder / "t")
    tiny.labelled(folder / "data.jsonl", 8)
    tiny.pairs(folder / "pairs.jsonl", 8)
    return folder


@pytest.fixture
def home(template, tmp_path):
    """A folder with models, data and a recipe, in which a test may break what it likes."""
    shutil.copytree(template, tmp_path / "home")
    (tmp_path / "home" / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "home"


def refused_recipe(home, recipe, *codes, command="plan"):
    """Expect exit code 2 and mistakes with `codes`, in the order of their lines; return the error."""
    if recipe is not None:
        (home / "recipe.yaml").write_text(recipe)
    more = ["--out", home / "r", "--quiet"] if command == "run" else []
    error = error_of(harness.smelt(command, home / "recipe.yaml", *more, code=2))
    assert codes_of(error) == list(codes), str(error)
    return error
