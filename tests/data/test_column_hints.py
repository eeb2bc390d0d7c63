"""Errors about columns speak the syntax of what the user wrote: a recipe, or the options of a command."""

import json
import shlex

import pytest

from smelt.api.predict import read_examples
from smelt.core.errors import InputError
from smelt.data.splits import Columns, column_options, columns_hint
from smelt.pipeline.inspect.data_files import inspect_data, parse_columns
from smelt.tasks.read_split import read_split
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def test_columns_hint_shows_recipe_setting_or_command_options():
    names = {"text": "my text", "label": "stars"}
    assert "data: {columns: {text: my text, label: stars}}" in columns_hint(names)
    with column_options():
        options = shlex.split(columns_hint(names).removesuffix("."))
    values = [options[index + 1] for index, option in enumerate(options) if option == "--column"]
    assert parse_columns(values) == Columns(text="my text", label="stars")
    assert "data: {columns:" in columns_hint(names)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"question": "a", "answer": "b"}))
    return path


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda path: read_split(str(path), "text-generation", Columns(), path.parent), "data: {columns: {"),
        (lambda path: read_examples(path, "text-generation", ()), "--column prompt=question."),
    ],
    ids=["recipe", "predict"],
)
def test_each_reader_names_its_own_setting(rows, read, expected):
    with raises_code("missing-column", InputError) as excinfo:
        read(rows)
    assert expected in str(excinfo.value)


def test_all_missing_columns_are_named_at_once(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"x": "a", "y": "b"}))
    with raises_code("missing-column", InputError) as excinfo:
        inspect_data([path], "translation")
    assert "--column source=NAME --column target=NAME" in str(excinfo.value)
    with raises_code("missing-column", InputError) as excinfo:
        read_examples(path, "text-classification", ("text=first", "text_pair=second"))
    assert all(name in str(excinfo.value) for name in ("'first'", "'second'"))
