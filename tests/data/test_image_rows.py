"""Images come as rows that name files, folders of classes, or an archive; what is wrong names its row."""

import json

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.data import images as module
from smelt.data.images import read_image_bytes
from smelt.data.split_division import divide_split
from smelt.data.splits import Columns
from smelt.tasks.read_split import read_split
from tests.support.expected_errors import raises_code
from tests.support.models import images

pytestmark = pytest.mark.quick


def test_rows_name_image_files_relative_to_file(tmp_path):
    split = images.read_rows(images.write_rows(tmp_path / "train.jsonl", 4))
    assert [e.label for e in split.examples] == ["dark", "light", "dark", "light"]
    assert [(e.line, e.row) for e in split.examples] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert split.examples[1].text == str(tmp_path / "train-images" / "1.png")
    assert split.images


def test_class_folders_are_labels(tmp_path):
    split = images.read_rows(images.write_class_folders(tmp_path / "data", 5))
    assert [e.label for e in split.examples] == ["dark", "dark", "dark", "light", "light"]
    assert split.examples[0].text.endswith("dark/0.png")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_metadata_of_image_folder_names_files_and_labels(kind, tmp_path):
    images.write_class_folders(tmp_path / "data", 2)
    names = [f"{name}/{number}.png" for number, name in enumerate(images.LABELS)]
    rows = [{"file_name": name, "label": f"very {name[:4]}"} for name in names]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "csv":
        text = "file_name,label\n" + "".join(",".join(row.values()) + "\n" for row in rows)
    (tmp_path / "data" / f"metadata.{kind}").write_text(text)
    split = images.read_rows(tmp_path / "data")
    assert [e.label for e in split.examples] == [f"very {name[:4]}" for name in names]
    assert split.examples[1].text == str(tmp_path / "data" / names[1])
    (tmp_path / "data" / f"metadata.{kind}").write_text(text.replace("/1.png", "/9.png"))
    with raises_code("missing-file") as caught:
        images.read_rows(tmp_path / "data")
    assert caught.value.file == str(tmp_path / "data" / f"metadata.{kind}")


def test_archive_contains_all_images(tmp_path):
    path = images.write_archive(tmp_path / "train.npz", 3)
    split = images.read_rows(path)
    assert [e.label for e in split.examples] == [0, 1, 0]
    assert split.examples[2].text == f"{path}#2"
    stored = np.load(path)
    assert read_image_bytes(f"{path}#2") == stored["jpeg"][stored["offsets"][2] :].tobytes()


def test_equal_images_have_equal_fingerprints_in_any_folder(tmp_path):
    split, other = (
        images.read_rows(images.write_rows(tmp_path / name / "a.jsonl", 4)) for name in ("x", "y")
    )
    assert split.examples[0].text != other.examples[0].text
    assert split.fingerprint == other.fingerprint != split.take(3).fingerprint
    images.make_image(7).save(tmp_path / "y" / "a-images" / "0.png")
    assert images.read_rows(tmp_path / "y" / "a.jsonl").fingerprint != split.fingerprint


def test_copies_of_image_are_in_one_split(tmp_path):
    folder = images.write_class_folders(tmp_path / "data", 12)
    for number in range(12):
        images.make_image(number).save(folder / images.LABELS[number % 2] / f"copy-{number}.png")
    splits = divide_split(images.read_rows(folder), {"test": 0.25}, 0)
    contents = {name: set(split.row_contents) for name, split in splits.items()}
    assert len(splits["test"]) in (4, 6)
    assert all(split.images for split in splits.values())
    assert not contents["train"] & contents["test"]


def wrong_rows(folder):
    path = images.write_rows(folder / "train.jsonl", 3)
    (folder / "bad.png").write_text("no image")
    lines = path.read_text().splitlines()
    invalid_rows = [
        {"image": "bad.png", "label": 1},
        {"image": "train-images/3.png", "label": 1},
        {"image": 3, "label": 1},
    ]
    path.write_text("\n".join([lines[0], *map(json.dumps, invalid_rows)]) + "\n")
    return path


def test_invalid_images_are_reported_with_row(tmp_path):
    path = wrong_rows(tmp_path)
    with raises_code("several-errors", InputError) as error:
        images.read_rows(path)
    kinds = [
        (error_message.code, error_message.file, error_message.line) for error_message in error.value.messages
    ]
    assert kinds == [
        ("not-an-image", str(path), 2),
        ("missing-file", str(path), 3),
        ("wrong-column-type", str(path), 4),
    ]
    first, second, third = str(error.value).splitlines()
    assert first.startswith(f"{path}:2: {tmp_path}/bad.png: ")
    assert second.startswith(f"{path}:3: {tmp_path}/train-images/3.png: ")
    assert third.startswith(f"{path}:4: ")


def test_images_beyond_limits_are_rejected_unopened(tmp_path, monkeypatch):
    path = images.write_rows(tmp_path / "train.jsonl", 1)
    monkeypatch.setattr(module, "MAX_IMAGE_PIXELS", 255)
    with raises_code("image-too-large", InputError) as excinfo:
        images.read_rows(path)
    assert all(part in str(excinfo.value) for part in ("train.jsonl:1:", "0.png", "16 x 16"))
    monkeypatch.setattr(module, "MAX_IMAGE_BYTES", 10)
    with raises_code("image-file-too-large", InputError) as excinfo:
        images.read_rows(path)
    assert " 10 " in str(excinfo.value)


def test_common_column_name_is_suggested(tmp_path):
    path = images.write_rows(tmp_path / "train.jsonl", 1, columns=("file_name", "label"))
    with raises_code("missing-column", InputError) as excinfo:
        images.read_rows(path)
    assert all(part in str(excinfo.value) for part in ("'image'", "file_name"))
    split = read_split(str(path), images.TASK, Columns(image="file_name"), tmp_path)
    assert len(split) == 1


@pytest.mark.parametrize(("change", "code", "name"), [
    ({"label": np.zeros(2, np.uint8)}, "inconsistent-arrays", "label"),
    ({"offsets": np.array([0, 5, 3])}, "wrong-offsets", ""), ({"jpeg": None}, "missing-array", "'jpeg'"),
    ({"label": np.array([None, "x"])}, "damaged-file", ""),
])  # fmt: skip
def test_invalid_archive_is_rejected(change, code, name, tmp_path):
    values = {"jpeg": np.zeros(9, np.uint8), "offsets": np.array([0, 4, 9]), "label": np.zeros(2, np.uint8)}
    if "label" in change and len(change["label"]) == 2 and change["label"].dtype != object:
        values["offsets"] = np.array([0, 2, 4, 9])
    arrays = {name: value for name, value in (values | change).items() if value is not None}
    np.savez(tmp_path / "train.npz", allow_pickle=True, **arrays)
    with raises_code(code, InputError) as excinfo:
        images.read_rows(tmp_path / "train.npz")
    assert name in str(excinfo.value)


def test_folders_without_classes_or_images_are_rejected(tmp_path):
    with raises_code("missing-file", InputError):
        read_split("nothing", images.TASK, Columns(), tmp_path)
    with raises_code("no-class-folders", InputError):
        images.read_rows(tmp_path)
    (tmp_path / "cat").mkdir()
    with raises_code("empty-data", InputError):
        images.read_rows(tmp_path)
