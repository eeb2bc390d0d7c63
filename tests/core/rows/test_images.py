"""Images come as rows that name files, folders of classes, or an archive; what is wrong names its row."""

import json

import images
import numpy as np
import pytest

from smelt.core.data import Columns
from smelt.core.errors import InputError
from smelt.core.rows import images as module
from smelt.core.rows.examples import read_split
from smelt.core.rows.images import image_bytes
from smelt.core.shares import divide


def test_rows_of_a_file_name_images_beside_it(tmp_path):
    split = images.split(images.rows(tmp_path / "train.jsonl", 4))
    assert [e.label for e in split.examples] == ["dark", "light", "dark", "light"]
    assert [(e.line, e.row) for e in split.examples] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert split.examples[1].text == str(tmp_path / "train-images" / "1.png")
    assert split.images


def test_a_folder_has_a_folder_for_each_class(tmp_path):
    split = images.split(images.classes(tmp_path / "data", 5))
    assert [e.label for e in split.examples] == ["dark", "dark", "dark", "light", "light"]
    assert split.examples[0].text.endswith("dark/0.png")


def test_an_archive_holds_all_images(tmp_path):
    path = images.archive(tmp_path / "train.npz", 3)
    split = images.split(path)
    assert [e.label for e in split.examples] == [0, 1, 0]
    assert split.examples[2].text == f"{path}#2"
    stored = np.load(path)
    assert image_bytes(f"{path}#2") == stored["jpeg"][stored["offsets"][2] :].tobytes()


def test_equal_images_give_equal_keys_wherever_they_lie(tmp_path):
    one, other = (images.split(images.rows(tmp_path / name / "a.jsonl", 4)) for name in ("x", "y"))
    assert one.examples[0].text != other.examples[0].text
    assert one.fingerprint == other.fingerprint != one.head(3).fingerprint
    images.picture(7).save(tmp_path / "y" / "a-images" / "0.png")
    assert images.split(tmp_path / "y" / "a.jsonl").fingerprint != one.fingerprint


def test_copies_of_an_image_stay_in_one_split(tmp_path):
    folder = images.classes(tmp_path / "data", 12)
    for number in range(12):
        images.picture(number).save(folder / images.LABELS[number % 2] / f"copy-{number}.png")
    parts = divide(images.split(folder), {"test": 0.25}, 0)
    contents = {name: set(part.contents) for name, part in parts.items()}
    assert len(parts["test"]) in (4, 6)
    assert all(part.images for part in parts.values())
    assert not contents["train"] & contents["test"]


def wrong_rows(folder):
    path = images.rows(folder / "train.jsonl", 3)
    (folder / "bad.png").write_text("no image")
    lines = path.read_text().splitlines()
    odd = [
        {"image": "bad.png", "label": 1},
        {"image": "train-images/3.png", "label": 1},
        {"image": 3, "label": 1},
    ]
    path.write_text("\n".join([lines[0], *map(json.dumps, odd)]) + "\n")
    return path


def test_what_is_no_image_is_told_with_its_row(tmp_path):
    path = wrong_rows(tmp_path)
    with pytest.raises(InputError) as error:
        images.split(path)
    first, second, third = str(error.value).splitlines()
    assert first.startswith(f"{path}:2: {tmp_path}/bad.png: not an image that is read here (JPEG, PNG")
    assert second.startswith(f"{path}:3: {tmp_path}/train-images/3.png: no such image file.")
    assert third == f"{path}:4: column 'image' must be text, read 3"


def test_images_beyond_the_limits_are_not_opened(tmp_path, monkeypatch):
    path = images.rows(tmp_path / "train.jsonl", 1)
    monkeypatch.setattr(module, "MOST_PIXELS", 255)
    with pytest.raises(InputError, match=r"train.jsonl:1: .*0.png: an image of 16 x 16 pixels; at most"):
        images.split(path)
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    with pytest.raises(InputError, match=r"bytes; an image file of at most 10 is read"):
        images.split(path)


def test_the_usual_name_of_the_column_is_proposed(tmp_path):
    path = images.rows(tmp_path / "train.jsonl", 1, columns=("file_name", "label"))
    with pytest.raises(InputError, match=r"no column 'image'.*columns: \{image: file_name\}"):
        images.split(path)
    named = read_split(str(path), images.TASK, Columns(image="file_name"), tmp_path)
    assert len(named) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"label": np.zeros(2, np.uint8)}, "its arrays do not fit each other"),
        ({"offsets": np.array([0, 5, 3])}, "its offsets do not rise"),
        ({"jpeg": None}, "no array 'jpeg' in it"),
        ({"label": np.array([None, "x"])}, "Object arrays cannot be loaded"),
    ],
)
def test_a_broken_archive_is_told(change, said, tmp_path):
    values = {"jpeg": np.zeros(9, np.uint8), "offsets": np.array([0, 4, 9]), "label": np.zeros(2, np.uint8)}
    if "label" in change and len(change["label"]) == 2 and change["label"].dtype != object:
        values["offsets"] = np.array([0, 2, 4, 9])
    kept = {name: value for name, value in (values | change).items() if value is not None}
    np.savez(tmp_path / "train.npz", allow_pickle=True, **kept)
    with pytest.raises(InputError, match=said):
        images.split(tmp_path / "train.npz")


def test_folders_without_classes_or_images_are_told(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        read_split("nothing", images.TASK, Columns(), tmp_path)
    with pytest.raises(InputError, match="no folders of classes"):
        images.split(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(InputError, match="no images in this folder of a class"):
        images.split(tmp_path)
