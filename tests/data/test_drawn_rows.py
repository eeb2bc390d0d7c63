"""Samples of sets that do not fit into memory: drawn through a shuffle buffer, as `datasets` does."""

import json
from functools import partial

import datasets
import pytest

import smelt
from smelt.data import dataset_rows
from smelt.data.read_rows import RowDraw, draw_rows, read_file_rows
from smelt.data.splits import Columns
from smelt.tasks.read_split import read_split, read_unlabeled
from tests.support.expected_errors import raises_code
from tests.support.models import tiny

TASK = "text-classification"


class CountedRows:
    """Rows without an end, and how many of them were read; it is pickled by reference to its module."""

    num_read = 0

    @classmethod
    def read(cls):
        while True:
            cls.num_read += 1
            yield f"source row {cls.num_read}", {"text": f"text {cls.num_read}", "label": cls.num_read % 2}


def write_rows(path, count):
    path.write_text("".join(f'{{"text": "text {n}", "label": {n % 2}}}\n' for n in range(count)))
    return path


@pytest.mark.quick
def test_endless_rows_are_read_only_up_to_the_buffer():
    CountedRows.num_read = 0
    drawn = list(draw_rows(CountedRows.read, RowDraw(max_samples=20, buffer_size=30, seed=0)))
    assert len({location for location, _ in drawn}) == 20
    assert CountedRows.num_read <= 20 + 2 * 30


@pytest.mark.quick
def test_draw_is_that_of_datasets_and_the_same_again(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 50)
    rows = [row["text"] for _, row in read_file_rows(path)]

    def texts(seed):
        draw = RowDraw(max_samples=9, buffer_size=20, seed=seed)
        return [row["text"] for _, row in draw_rows(partial(read_file_rows, path), draw)]

    reference = datasets.Dataset.from_dict({"text": rows}).to_iterable_dataset()
    expected = [row["text"] for row in reference.shuffle(seed=3, buffer_size=20).take(9)]
    assert texts(3) == texts(3) == expected
    assert texts(4) != expected


@pytest.mark.quick
def test_error_in_drawn_row_names_its_line(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 8)
    with path.open("a") as file:
        file.write('{"text": 5, "label": 1}\n')
    with raises_code("wrong-column-type") as caught:
        read_split("rows.jsonl", TASK, Columns(), tmp_path, draw=RowDraw(9, 4, 0))
    assert (caught.value.file, caught.value.line) == (str(path), 9)
    with path.open("a") as file:
        file.write("{\n")
    with raises_code("invalid-json") as caught:
        list(draw_rows(partial(read_file_rows, path), RowDraw(20, 4, 0)))
    assert caught.value.line == 10


@pytest.mark.quick
def test_drawn_rows_keep_class_names_of_features(tmp_path):
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER"]))
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "tags": tags})
    saved = datasets.Dataset.from_list([{"tokens": ["Ada", "sleeps"], "tags": [1, 0]}], features=features)
    saved.to_parquet(str(tmp_path / "rows.parquet"))
    split = read_split("rows.parquet", "token-classification", Columns(), tmp_path, draw=RowDraw(1, 1, 0))
    assert split.examples[0].label == ("B-PER", "O")


@pytest.mark.quick
def test_plain_text_cannot_be_drawn_from(tmp_path):
    (tmp_path / "texts.txt").write_text("a\nb\n")
    with raises_code("wrong-format"):
        read_split("texts.txt", "language-modeling", Columns(), tmp_path, draw=RowDraw(1, 1, 0))
    with raises_code("wrong-format"):
        read_unlabeled("texts.txt", TASK, Columns(), tmp_path, draw=RowDraw(1, 1, 0))


@pytest.mark.quick
def test_hub_data_set_is_streamed(tmp_path, monkeypatch):
    CountedRows.num_read = 0

    def load_dataset(repository, config, *, split, streaming):
        assert (repository, split, streaming) == ("owner/name", "train", True)
        return (row for _, row in CountedRows.read())

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(dataset_rows, "hub_unreachable_reason", lambda: None)
    split = read_split(
        "owner/name", TASK, Columns(), tmp_path, "train", draw=RowDraw(5, 10, 0), streaming=True
    )
    assert len(split) == 5
    assert CountedRows.num_read <= 5 + 2 * 10


def test_recipe_trains_on_drawn_samples(tmp_path):
    tiny.write_bert(tmp_path / "m")
    rows = [{"text": f"{text} {n}", "label": n % 2} for n in range(9) for text in tiny.SENTENCES]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(
        "model: m\ntask: text-classification\n"
        "data: {train: rows.jsonl, test: rows.jsonl, max_samples: {train: 8, test: 6}, buffer_size: 16}\n"
        "stages:\n  - finetune: {max_steps: 1, batch_size: 4, num_evals: 1}\nscore: {latency: false}\n"
    )
    result = smelt.run(tmp_path / "recipe.yaml", out=tmp_path / "run", quiet=True)
    assert result.exit_code == 0
    assert result.report["steps"][-1]["quality"]["accuracy"]["n"] == 6
