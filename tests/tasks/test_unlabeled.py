"""Texts without labels, however they are stored; whatever stands in the labels' column is not read."""

import json

import pytest

from smelt.core.errors import InputError
from smelt.data.splits import Columns
from smelt.tasks.read_split import read_split, read_unlabeled
from tests.support.expected_errors import raises_code

TASK = "text-classification"


def test_plain_text_has_one_sample_per_line(tmp_path):
    (tmp_path / "x.txt").write_text("one\r\n\n  \ntwo words\n", encoding="utf-8")
    rows = read_unlabeled("x.txt", TASK, Columns(), tmp_path).examples
    assert [(e.text, e.line, e.label) for e in rows] == [("one", 1, None), ("two words", 4, None)]


@pytest.mark.parametrize("columns", [Columns(), Columns(label="label")])
def test_unlabeled_rows_ignore_label_column(tmp_path, columns):
    lines = [{"text": "one"}, {"text": "two", "label": {"no": "label"}}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = read_unlabeled("x.jsonl", TASK, columns, tmp_path).examples
    assert [(e.text, e.label) for e in rows] == [("one", None), ("two", None)]


def test_columns_named_in_recipe_are_read(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"a": "one", "b": "two"}) + "\n")
    (row,) = read_unlabeled("x.jsonl", TASK, Columns(text="a", text_pair="b"), tmp_path).examples
    assert (row.text, row.text_pair) == ("one", "two")
    with raises_code("missing-column", InputError) as excinfo:
        read_unlabeled("x.jsonl", TASK, Columns(), tmp_path)
    assert all(part in str(excinfo.value) for part in ("x.jsonl:1:", "'text'", "a, b"))


def test_empty_file_and_task_without_labels_are_rejected(tmp_path):
    (tmp_path / "x.txt").write_text("\n \n")
    with raises_code("empty-data", InputError):
        read_unlabeled("x.txt", TASK, Columns(), tmp_path)
    with raises_code("unsupported-task", InputError) as excinfo:
        read_unlabeled("x.txt", "translation", Columns(), tmp_path)
    assert "translation" in str(excinfo.value)


USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(("task", "without", "target"), [
    ("translation", {"source": "a"}, {"target": "b"}),
    ("summarization", {"source": "a", "target": ""}, {"targets": ["b", "c"]}),
    ("text-classification", {"text": "a"}, {"label": "b"}),
    ("text-generation", {"prompt": "a"}, {"response": "b"}),
    ("text-generation", {"instruction": "a", "input": "x", "output": None}, {"output": "b"}),
    ("text-generation", {"messages": [USER]}, {"messages": [USER, ASSISTANT]}),
    ("text-generation", {"messages": json.dumps([USER])}, {"messages": json.dumps([USER, ASSISTANT])}),
])  # fmt: skip
def test_targets_are_optional_only_if_not_scored(tmp_path, task, without, target):
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(without)}\n{json.dumps(without | target)}\n")
    columns = Columns(target="target", label="label")  # a train split may have them
    first, second = read_split("x.jsonl", task, columns, tmp_path, targets_optional=True).examples
    assert (first.references, first.label) == ((), None)
    assert second.references or second.label
    assert first.text == second.text
    with pytest.raises(InputError):
        read_split("x.jsonl", task, columns, tmp_path)
