"""The texts that `smelt predict` is given: words, lines, or rows of a file."""

import gzip
import io
import json

import pytest

from smelt.core.data import Example
from smelt.core.errors import InputError
from smelt.use.predict_data import examples_of, lines_of, read_examples

CLASSIFIER, TRANSLATOR = "text-classification", "translation"


def rows(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_a_tab_parts_the_texts_of_a_pair_for_a_classifier_alone():
    texts = ["a", "a\tb", "a\t"]
    found = examples_of(texts, CLASSIFIER)
    assert found == [Example("a"), Example("a", text_pair="b"), Example("a", text_pair="")]
    assert examples_of(texts, TRANSLATOR) == [Example(text) for text in texts]


def test_lines_of_plain_text_are_texts(tmp_path):
    (tmp_path / "t.txt").write_text("one\n\ntwo\n")
    assert read_examples(tmp_path / "t.txt", TRANSLATOR, ()) == [Example("one"), Example(""), Example("two")]
    with gzip.open(tmp_path / "t.txt.gz", "wt") as stream:
        stream.write("a\tb\n")
    assert read_examples(tmp_path / "t.txt.gz", CLASSIFIER, ()) == [Example("a", text_pair="b")]
    with pytest.raises(InputError, match=r"--column x: .*t\.txt is plain text and has no columns"):
        read_examples(tmp_path / "t.txt", TRANSLATOR, ("x",))


@pytest.mark.parametrize(
    ("task", "columns", "expected"),
    [
        (TRANSLATOR, (), "s"),
        (TRANSLATOR, ("text",), "t"),
        (TRANSLATOR, ("source=text",), "t"),
        (TRANSLATOR, ("a=b",), "c"),  # a name with a sign of its own
        ("language-modeling", (), "t"),
        (CLASSIFIER, (), "t"),
        (CLASSIFIER, ("text=source",), "s"),
    ],
)
def test_the_column_is_the_tasks_or_the_one_that_is_named(tmp_path, task, columns, expected):
    path = rows(tmp_path / "d.jsonl", {"source": "s", "text": "t", "a=b": "c"})
    assert read_examples(path, task, columns) == [Example(expected)]


def test_a_classifier_takes_the_second_text_where_there_is_one(tmp_path):
    path = rows(
        tmp_path / "d.jsonl", {"text": "a", "text_b": "b"}, {"text": "c", "text_b": ""}, {"text": "d"}
    )
    assert read_examples(path, CLASSIFIER, ()) == [Example("a", text_pair="b"), Example("c"), Example("d")]
    assert read_examples(path, "language-modeling", ()) == [Example("a"), Example("c"), Example("d")]
    named = rows(tmp_path / "n.jsonl", {"text": "a", "second": "b"})
    assert read_examples(named, CLASSIFIER, ("text_pair=second",)) == [Example("a", text_pair="b")]


def test_csv_and_parquet_are_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "d.csv").write_text('source,n\n"a, b",1\nc,2\n')
    assert read_examples(tmp_path / "d.csv", TRANSLATOR, ()) == [Example("a, b"), Example("c")]
    pyarrow.parquet.write_table(pyarrow.table({"source": ["x"]}), tmp_path / "d.parquet")
    assert read_examples(tmp_path / "d.parquet", TRANSLATOR, ()) == [Example("x")]


@pytest.mark.parametrize(
    ("value", "task", "columns", "message"),
    [
        ({"src": "a"}, TRANSLATOR, (), r"d\.jsonl:1: no column 'source'; there are: src\."),
        ({"text": "a"}, CLASSIFIER, ("txt",), r"Did you mean 'text'\? Name the right one with --column NAME"),
        ({"text": 3}, CLASSIFIER, (), r"d\.jsonl:1: column 'text' must be text, read 3"),
        ({"text": "a", "text_b": 3}, CLASSIFIER, (), "column 'text_b' must be text, read 3"),
        ({"text": "\ud800"}, CLASSIFIER, (), "half of a surrogate pair"),
        ({"text": "a"}, CLASSIFIER, ("text_pair=b",), "no column 'b'"),
        ({"source": "a"}, TRANSLATOR, ("text_pair=b",), "a model for translation reads no pairs of texts"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, value, task, columns, message):
    path = rows(tmp_path / "d.jsonl", value)
    with pytest.raises(InputError, match=message):
        read_examples(path, task, columns)


def test_no_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_examples(tmp_path / "nowhere.jsonl", TRANSLATOR, ())
    with pytest.raises(InputError, match=f"--data {tmp_path}: a folder; name a file in it"):
        read_examples(tmp_path, TRANSLATOR, ())


@pytest.mark.parametrize(("name", "text"), [("d.jsonl", "\n"), ("d.csv", "source\n"), ("d.txt", "")])
def test_a_file_without_rows_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=f"{name}: no rows in this file"):
        read_examples(tmp_path / name, TRANSLATOR, ())


LINES = {
    "a\nb": ["a", "b"],
    "a\n\n": ["a", ""],  # an answer for each line, also for an empty one at the end
    "\n": [""],
    "a\r\nb\rc\n": ["a", "b", "c"],
    "a\u2028b\x0cc\x85d\n": ["a\u2028b\x0cc\x85d"],  # ends of lines to str.splitlines alone
    "\ufeffa\n\ufeffb\n": ["a", "\ufeffb"],
    "": [],
}


@pytest.mark.parametrize("text", LINES)
def test_lines_of_a_file_and_of_standard_input_are_the_same(tmp_path, text):
    (tmp_path / "t.txt").write_bytes(text.encode())
    expected = [Example(line) for line in LINES[text]]
    if expected:
        assert read_examples(tmp_path / "t.txt", TRANSLATOR, ()) == expected
    stream = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
    assert lines_of(stream) == LINES[text]


@pytest.mark.parametrize("task", [TRANSLATOR, CLASSIFIER])
def test_bytes_that_are_no_text_are_refused(task):
    broken = b"M\xe4rz".decode("utf-8", "surrogateescape")
    with pytest.raises(InputError) as caught:
        examples_of(["a man", broken], task, "standard input, line")
    assert str(caught.value) == (
        "standard input, line 2: not UTF-8 text, read 'M\\udce4rz'. Convert it to UTF-8."
    )


def test_two_columns_for_one_text_are_refused(tmp_path):
    path = rows(tmp_path / "d.jsonl", {"a": "x", "b": "y"})
    for given in (("a", "b"), ("a", "text=b"), ("text_pair=a", "text_pair=b")):
        with pytest.raises(InputError, match=r"--column (text_pair=)?\w+ and --column \S+: name one"):
            read_examples(path, CLASSIFIER, given)


def test_an_image_that_is_missing_is_called_one(tmp_path):
    with pytest.raises(InputError, match=r"^image 1: .*photo.jpg: no such image file"):
        examples_of([str(tmp_path / "photo.jpg")], "image-classification")
    with pytest.raises(InputError, match=r"^photos.txt line 1: .*: a folder; an image file is expected"):
        examples_of([str(tmp_path)], "image-classification", "photos.txt line")
