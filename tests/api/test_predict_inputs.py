"""The texts that `smelt predict` is given: words, lines, or rows of a file."""

import gzip
import io
import json

import numpy as np
import pytest

from smelt.api.predict import as_examples, read_examples, strip_lines
from smelt.core.errors import InputError
from smelt.data.splits import Example
from tests.support.expected_errors import raises_code
from tests.support.models import images

pytestmark = pytest.mark.quick

CLASSIFIER, TRANSLATOR = "text-classification", "translation"


def rows(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_tab_separates_text_pair_only_for_classifier():
    texts = ["a", "a\tb", "a\t"]
    examples = as_examples(texts, CLASSIFIER)
    assert examples == [Example("a"), Example("a", text_pair="b"), Example("a", text_pair="")]
    assert as_examples(texts, TRANSLATOR) == [Example(text) for text in texts]


def test_lines_of_plain_text_are_texts(tmp_path):
    (tmp_path / "t.txt").write_text("one\n\ntwo\n")
    assert read_examples(tmp_path / "t.txt", TRANSLATOR, ()) == [Example("one"), Example(""), Example("two")]
    with gzip.open(tmp_path / "t.txt.gz", "wt") as stream:
        stream.write("a\tb\n")
    assert read_examples(tmp_path / "t.txt.gz", CLASSIFIER, ()) == [Example("a", text_pair="b")]
    with raises_code("no-columns", InputError) as excinfo:
        read_examples(tmp_path / "t.txt", TRANSLATOR, ("x",))
    assert all(value in str(excinfo.value) for value in ("--column x", "t.txt"))


@pytest.mark.parametrize(("task", "columns", "expected"), [
    (TRANSLATOR, (), "s"), (TRANSLATOR, ("text",), "t"), (TRANSLATOR, ("source=text",), "t"),
    (TRANSLATOR, ("a=b",), "c"),  # a name with a sign of its own
    ("language-modeling", (), "t"), (CLASSIFIER, (), "t"), (CLASSIFIER, ("text=source",), "s"),
])  # fmt: skip
def test_column_is_default_of_task_or_named(tmp_path, task, columns, expected):
    path = rows(tmp_path / "d.jsonl", {"source": "s", "text": "t", "a=b": "c"})
    assert read_examples(path, task, columns) == [Example(expected)]


def test_classifier_reads_second_text_if_present(tmp_path):
    path = rows(
        tmp_path / "d.jsonl", {"text": "a", "text_pair": "b"}, {"text": "c", "text_pair": ""}, {"text": "d"}
    )
    assert read_examples(path, CLASSIFIER, ()) == [Example("a", text_pair="b"), Example("c"), Example("d")]
    assert read_examples(path, "language-modeling", ()) == [Example("a"), Example("c"), Example("d")]
    named_path = rows(tmp_path / "n.jsonl", {"text": "a", "second": "b"})
    assert read_examples(named_path, CLASSIFIER, ("text_pair=second",)) == [Example("a", text_pair="b")]


def test_csv_and_parquet_are_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "d.csv").write_text('source,n\n"a, b",1\nc,2\n')
    assert read_examples(tmp_path / "d.csv", TRANSLATOR, ()) == [Example("a, b"), Example("c")]
    pyarrow.parquet.write_table(pyarrow.table({"source": ["x"]}), tmp_path / "d.parquet")
    assert read_examples(tmp_path / "d.parquet", TRANSLATOR, ()) == [Example("x")]


@pytest.mark.parametrize(("value", "task", "columns", "code", "named"), [
    ({"src": "a"}, TRANSLATOR, (), "missing-column", ("'source'", ": src.")),
    ({"text": "a"}, CLASSIFIER, ("txt",), "missing-column", ("'text'?",)),
    ({"text": 3}, CLASSIFIER, (), "wrong-column-type", ("'text'", "3")),
    ({"text": "a", "text_pair": 3}, CLASSIFIER, (), "wrong-column-type", ("'text_pair'", "3")),
    ({"text": "\ud800"}, CLASSIFIER, (), "lone-surrogate", ("'text'",)),
    ({"text": "a"}, CLASSIFIER, ("text_pair=b",), "missing-column", ("'b'",)),
    ({"source": "a"}, TRANSLATOR, ("text_pair=b",), "does-not-fit-task", ("text_pair=b",)),
])  # fmt: skip
def test_unreadable_rows_are_reported(tmp_path, value, task, columns, code, named):
    path = rows(tmp_path / "d.jsonl", value)
    with raises_code(code, InputError) as excinfo:
        read_examples(path, task, columns)
    assert [fragment for fragment in named if fragment not in str(excinfo.value)] == []
    if code != "does-not-fit-task":
        assert (excinfo.value.file, excinfo.value.line) == (str(path), 1)


def test_missing_file_and_folder_are_reported(tmp_path):
    with raises_code("missing-file", InputError):
        read_examples(tmp_path / "nowhere.jsonl", TRANSLATOR, ())
    with raises_code("not-a-file", InputError) as excinfo:
        read_examples(tmp_path, TRANSLATOR, ())
    assert f"--data {tmp_path}: " in str(excinfo.value)


@pytest.mark.parametrize(("name", "text"), [("d.jsonl", "\n"), ("d.csv", "source\n"), ("d.txt", "")])
def test_file_without_rows_is_rejected(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with raises_code("empty-data", InputError) as excinfo:
        read_examples(tmp_path / name, TRANSLATOR, ())
    assert excinfo.value.file == str(tmp_path / name)


LINES = {
    "a\nb": ["a", "b"], "a\n\n": ["a", ""],  # an answer for each line, also for an empty one at the end
    "\n": [""], "a\r\nb\rc\n": ["a", "b", "c"],
    # ends of lines to str.splitlines alone
    "a\u2028b\x0cc\x85d\n": ["a\u2028b\x0cc\x85d"],
    "\ufeffa\n\ufeffb\n": ["a", "\ufeffb"], "": [],
}  # fmt: skip


@pytest.mark.parametrize("text", LINES)
def test_lines_of_file_and_standard_input_are_equal(tmp_path, text):
    (tmp_path / "t.txt").write_bytes(text.encode())
    expected = [Example(line) for line in LINES[text]]
    if expected:
        assert read_examples(tmp_path / "t.txt", TRANSLATOR, ()) == expected
    stream = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
    assert strip_lines(stream) == LINES[text]


@pytest.mark.parametrize("task", [TRANSLATOR, CLASSIFIER])
def test_bytes_that_are_not_text_are_rejected(task):
    broken = b"M\xe4rz".decode("utf-8", "surrogateescape")
    with raises_code("not-utf8", InputError) as excinfo:
        as_examples(["a man", broken], task, "standard input, line")
    assert str(excinfo.value).startswith("standard input, line 2: ")
    assert "'M\\udce4rz'" in str(excinfo.value)


def test_two_columns_for_one_text_are_rejected(tmp_path):
    path = rows(tmp_path / "d.jsonl", {"a": "x", "b": "y"})
    for columns in (("a", "b"), ("a", "text=b"), ("text_pair=a", "text_pair=b")):
        with raises_code("settings-conflict", InputError) as excinfo:
            read_examples(path, CLASSIFIER, columns)
        assert all(f"--column {column}" in str(excinfo.value) for column in columns)


def test_missing_image_error_names_image(tmp_path):
    with raises_code("missing-file", InputError) as excinfo:
        as_examples([str(tmp_path / "photo.jpg")], "image-classification")
    assert str(excinfo.value).startswith(f"image 1: {tmp_path / 'photo.jpg'}: ")
    with raises_code("not-a-file", InputError) as excinfo:
        as_examples([str(tmp_path)], "image-classification", "photos.txt line")
    assert str(excinfo.value).startswith(f"photos.txt line 1: {tmp_path}: ")


def test_lines_of_files_are_relative_to_their_list(tmp_path):
    images.make_image(0).save(tmp_path / "0.png")
    np.savez(tmp_path / "0.npz", audio=np.zeros(9, dtype=np.float32))
    path = tmp_path / "files.txt"
    path.write_text("0.png\ta //b\ta dog\n")
    [example] = read_examples(path, "image-text", [])
    assert (example.text, example.choices) == (str(tmp_path / "0.png"), ("a //b", "a dog"))
    path.write_text("0.npz\n\n")
    [example] = read_examples(path, "speech-recognition", [])
    assert example.text == str(tmp_path / "0.npz")


def test_folder_of_audio_with_metadata_is_read(tmp_path):
    np.savez(tmp_path / "0.npz", audio=np.zeros(9, dtype=np.float32))
    (tmp_path / "metadata.csv").write_text("file_name\n0.npz\n")
    [example] = read_examples(tmp_path, "speech-recognition", [])
    assert example.text == str(tmp_path / "0.npz")
    with raises_code("not-a-file"):
        read_examples(tmp_path, CLASSIFIER, [])
