"""Folders of data sets: what `datasets` saves, and Parquet files in parts."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import smelt
from smelt.data.dataset_rows import folder_splits
from smelt.data.read_rows import read_file_rows
from smelt.data.splits import Columns
from smelt.pipeline.inspect.data_files import inspect_data
from smelt.tasks.read_split import read_split
from tests.support.expected_errors import raises_code
from tests.support.models import tiny

ROWS = [{"text": f"text {number}", "label": number % 2} for number in range(7)]
TASK = "text-classification"


def dataset(rows=ROWS):
    return datasets.Dataset.from_list(rows)


def texts(folder, name="train"):
    return [
        example.text for example in read_split(folder.name, TASK, Columns(), folder.parent, name).examples
    ]


def write_shards(folder, splits):
    """Write each split as two files, named as on the hub."""
    folder.mkdir()
    for name, rows in splits.items():
        for part in range(2):
            pq.write_table(dataset(rows[part::2]).data.table, folder / f"{name}-0000{part}-of-00002.parquet")
    return folder


@pytest.mark.quick
def test_saved_dataset_is_read_as_any_split(tmp_path):
    dataset().save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert texts(tmp_path / "saved", "test") == [row["text"] for row in ROWS]
    assert folder_splits(tmp_path / "saved") == []


@pytest.mark.quick
def test_split_of_saved_dataset_dict_is_read(tmp_path):
    saved = datasets.DatasetDict({"train": dataset(), "test": dataset(ROWS[:2])})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert texts(tmp_path / "saved", "test") == texts(tmp_path / "saved" / "test") == ["text 0", "text 1"]
    assert len(texts(tmp_path / "saved", "train")) == 7
    with raises_code("missing-split") as caught:
        texts(tmp_path / "saved", "validation")
    assert caught.value.file == str(tmp_path / "saved")


@pytest.mark.quick
def test_class_names_of_tags_come_from_features(tmp_path):
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER"]))
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "tags": tags})
    rows = [{"tokens": ["Ada", "sleeps"], "tags": [1, 0]}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    [example] = read_split("saved", "token-classification", Columns(), tmp_path).examples
    assert example.label == ("B-PER", "O")


@pytest.mark.quick
def test_parts_of_a_split_are_read_in_order(tmp_path):
    folder = write_shards(tmp_path / "parts", {"train": ROWS, "test": ROWS[:4]})
    assert texts(folder, "train") == [row["text"] for row in [*ROWS[::2], *ROWS[1::2]]]
    assert texts(folder, "test") == ["text 0", "text 2", "text 1", "text 3"]
    with raises_code("missing-split"):
        texts(folder, "validation")


@pytest.mark.quick
def test_folder_of_parquet_files_without_splits_is_one_split(tmp_path):
    for number in range(2):
        pq.write_table(dataset(ROWS[number::2]).data.table, tmp_path / f"part{number}.parquet")
    assert len(texts(tmp_path, "validation")) == 7
    (tmp_path / "part1.parquet").write_bytes(b"no parquet")
    with raises_code("damaged-file") as caught:
        texts(tmp_path, "validation")
    assert caught.value.file == str(tmp_path / "part1.parquet")


@pytest.mark.quick
@pytest.mark.parametrize("damage", ["state.json", "dataset_dict.json", "data-00000-of-00001.arrow"])
def test_damaged_dataset_is_named(damage, tmp_path):
    dataset().save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / damage).write_text("{")
    with raises_code("damaged-file") as caught:
        texts(tmp_path / "saved")
    assert caught.value.file.startswith(str(tmp_path / "saved"))


@pytest.mark.quick
def test_other_folders_are_no_data(tmp_path):
    assert folder_splits(tmp_path) is None
    with raises_code("not-a-file"):
        texts(tmp_path)
    with raises_code("not-a-file"):
        read_file_rows(tmp_path)


@pytest.mark.quick
def test_init_finds_splits_of_folders(tmp_path):
    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": dataset(), "dev": dataset(), "test": dataset()}).save_to_disk(str(saved))
    splits = inspect_data([saved], TASK).splits
    assert splits == {"train": saved / "train", "validation": saved / "dev", "test": saved / "test"}
    parts = write_shards(tmp_path / "parts", {"train": ROWS, "test": ROWS})
    assert inspect_data([parts], TASK).splits == {"train": parts, "test": parts}
    single = tmp_path / "single"
    dataset().save_to_disk(str(single))
    assert inspect_data([single], TASK).splits == {"train": single}


def test_recipe_runs_from_saved_dataset(tmp_path):
    tiny.write_bert(tmp_path / "m")
    rows = [{"text": text, "label": number % 2} for number, text in enumerate(tiny.SENTENCES)]
    datasets.DatasetDict({"train": dataset(rows), "test": dataset(rows)}).save_to_disk(str(tmp_path / "data"))
    (tmp_path / "recipe.yaml").write_text(
        "model: m\ntask: text-classification\ndata: {train: data, test: data}\n"
        "stages:\n  - finetune: {max_steps: 1, batch_size: 4, num_evals: 1}\nscore: {latency: false}\n"
    )
    result = smelt.run(tmp_path / "recipe.yaml", out=tmp_path / "run", quiet=True)
    assert result.exit_code == 0
    assert result.report["steps"][-1]["quality"]["accuracy"]["n"] == len(rows)


@pytest.mark.quick
@pytest.mark.parametrize("new_writer", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_files_are_read_as_parquet_files_are(new_writer, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, rows in {"train": ROWS, "test": ROWS[:3]}.items():
        table = dataset(rows).data.table
        path = folder / f"{name}-00000-of-00001.arrow"
        with new_writer(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    assert texts(folder, "train") == [row["text"] for row in ROWS]
    assert texts(folder, "test") == ["text 0", "text 1", "text 2"]
    assert [location for location, _ in read_file_rows(path)] == [f"{path} row {n}" for n in (1, 2, 3)]
    assert inspect_data([folder], TASK).splits == {
        "train": folder / "train-00000-of-00001.arrow",
        "test": path,
    }
    path.write_bytes(b"no arrow")
    with raises_code("damaged-file") as caught:
        texts(folder, "test")
    assert caught.value.file == str(path)
