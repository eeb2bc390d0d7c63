"""Queries with lists of passages are read as pairs with labels."""

import json

import pytest

from smelt.data.read_rows import read_file_rows
from smelt.data.splits import Columns
from smelt.tasks.read_split import read_split
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick
COLUMNS = Columns(text="query", text_pair="passage")


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_lists_become_pairs_at_line_of_query(tmp_path):
    path = write(
        tmp_path / "q.jsonl",
        {"query": "who", "positive": ["he", "she"], "negative": ["it"]},
        {"query": "where", "negative": ["here"]},
        {"query": "when", "passage": "now", "label": 1},
    )
    split = read_split(path.name, "text-classification", COLUMNS, tmp_path)
    pairs = [(e.text, e.text_pair, e.label, e.line) for e in split.examples]
    assert pairs == [
        ("who", "he", 1, 1), ("who", "she", 1, 1), ("who", "it", 0, 1), ("where", "here", 0, 2),
        ("when", "now", 1, 3),
    ]  # fmt: skip


def test_triplets_of_texts_are_kept(tmp_path):
    row = {"query": "who", "positive": "he", "negative": "it"}
    [(_, read)] = read_file_rows(write(tmp_path / "q.jsonl", row))
    assert read == row


@pytest.mark.parametrize("lists", [{"positive": [1]}, {"positive": [], "negative": []}])
def test_wrong_passages_are_named_with_line(lists, tmp_path):
    path = write(tmp_path / "q.jsonl", {"query": "a", "positive": ["b"]}, {"query": "who", **lists})
    with raises_code("wrong-passages") as caught:
        list(read_file_rows(path))
    assert (caught.value.file, caught.value.line) == (str(path), 2)


def test_parquet_has_queries_too(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    pq.write_table(
        pa.table({"query": ["who"], "positive": [["he"]], "negative": [["it"]]}), tmp_path / "q.parquet"
    )
    assert [row["label"] for _, row in read_file_rows(tmp_path / "q.parquet")] == [1, 0]
