"""Recipes that are refused: what they begin with, the home they are read in, what must be reported of them.

A file of tests that asks for its fixtures says `pytest_plugins = ["invalid_recipes"]`.
"""

import shutil

import pytest

from tests.support import harness
from tests.support.expected_errors import command_error, error_codes
from tests.support.models import tiny

RECIPE_HEAD = "model: m\ntask: text-classification\ndata: {train: data.jsonl, test: data.jsonl}\n"
RECIPE = RECIPE_HEAD + "stages: [{prune: {keep_ratio: 0.5}}]\nscore: {quality: [accuracy], latency: false}\n"
TRANSLATION_HEAD = "model: t\ntask: translation\ndata: {train: pairs.jsonl, test: pairs.jsonl}\n"
TRANSLATION_RECIPE = (
    TRANSLATION_HEAD + "stages: [{prune: {keep_ratio: 0.5}}]\nscore: {quality: [bleu], latency: false}\n"
)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    tiny.write_bert(folder / "m")
    tiny.write_marian(folder / "t")
    tiny.write_labeled(folder / "data.jsonl", 8)
    tiny.write_pairs(folder / "pairs.jsonl", 8)
    return folder


@pytest.fixture
def home(template, tmp_path):
    """A folder with models, data and a recipe, in which a test may break what it likes."""
    shutil.copytree(template, tmp_path / "home")
    (tmp_path / "home" / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "home"


def assert_refused(home, recipe, *codes, command="plan"):
    """Expect exit code 2 and errors with `codes`, in the order of their lines; return the error."""
    if recipe is not None:
        (home / "recipe.yaml").write_text(recipe)
    options = ["--out", home / "r", "--quiet"] if command == "run" else []
    error = command_error(harness.smelt(command, home / "recipe.yaml", *options, code=2))
    assert error_codes(error) == list(codes), str(error)
    return error
