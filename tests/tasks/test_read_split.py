"""Every kind of file is read, and every error in one is named with its place."""

import gzip
import json

import pytest

from smelt.core.errors import InputError
from smelt.data.read_rows import read_file_rows
from smelt.data.splits import Columns, Example
from smelt.tasks.read_split import read_split
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

ROW = {"source": "a cat", "target": "eine Katze"}


def _read(path, task="translation", columns=None):
    return read_split(path.name, task, columns or Columns(), path.parent)


def _write(path, text):
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.tsv", "a.parquet"])
def test_all_file_kinds_give_equal_rows(tmp_path, name):
    path = tmp_path / name
    if "jsonl" in name:
        _write(path, json.dumps(ROW) + "\n\n" + json.dumps(ROW) + "\n")
    elif name == "a.parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW, ROW]), path)
    else:
        comma = "\t" if "tsv" in name else ","
        _write(path, f"source{comma}target\na cat{comma}eine Katze\na cat{comma}eine Katze\n")
    split = _read(path)
    assert [(e.text, e.references) for e in split.examples] == [("a cat", ("eine Katze",))] * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_nested_translation_columns_are_read(tmp_path, name):
    rows = [{"id": i, "translation": {"en": "a cat", "de": "eine Katze"}} for i in range(2)]
    path = tmp_path / name
    if name == "a.parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if name == "a.json" else "\n".join(map(json.dumps, rows)))
    split = _read(path, columns=Columns(source="en", target="de"))
    assert [(e.text, e.references) for e in split.examples] == [("a cat", ("eine Katze",))] * 2


def test_all_missing_columns_are_named_at_once(tmp_path):
    path = _write(tmp_path / "a.csv", "src,tgt\na,b\n")
    with raises_code("missing-column", InputError) as raised:
        _read(path)
    assert "{source: src, target: tgt}" in str(raised.value)
    path = _write(tmp_path / "b.csv", "sentence,stars\na,b\n")
    with raises_code("missing-column", InputError) as raised:
        _read(path, "text-classification", Columns(text_pair="second"))
    assert all(f"'{name}'" in str(raised.value) for name in ("text", "label", "second"))


def test_all_references_are_read(tmp_path):
    path = _write(tmp_path / "a.jsonl", json.dumps({**ROW, "targets": ["eine Katze", "ein Kater"]}))
    assert _read(path).examples[0].references == ("eine Katze", "ein Kater")


def test_equal_rows_have_equal_fingerprints_in_any_file(tmp_path):
    first = _write(tmp_path / "a.jsonl", json.dumps(ROW))
    two = _write(tmp_path / "b.csv", "source,target\na cat,eine Katze\n")
    assert _read(first).fingerprint == _read(two).fingerprint
    assert (
        _read(_write(tmp_path / "c.jsonl", json.dumps({**ROW, "source": "x"}))).fingerprint
        != _read(two).fingerprint
    )


def test_labels_may_be_lists_or_decimal_numbers(tmp_path):
    lines = ['{"text": "a", "label": ["x", 2]}', '{"text": "b", "label": []}', '{"text": "c", "label": 0.5}']
    split = _read(_write(tmp_path / "a.jsonl", "\n".join(lines)), "text-classification")
    assert [e.label for e in split.examples] == [("x", 2), (), 0.5]
    assert len(split.fingerprint) == 64


def test_second_text_is_optional_unless_its_column_is_named(tmp_path):
    path = _write(tmp_path / "a.csv", "text,text_pair,label\na,b,0\na,,1\n")
    assert [e.text_pair for e in _read(path, "text-classification").examples] == ["b", None]
    with raises_code("missing-column", InputError) as excinfo:
        _read(path, "text-classification", Columns(text_pair="text_pare"))
    assert all(part in str(excinfo.value) for part in ("a.csv:2:", "'text_pare'", "'text_pair'"))


@pytest.mark.parametrize("label", [
    "null", "true", "[true]", "NaN", "1e999", '{"a": 1}', "[NaN]", '["a", 0.5]',
])  # fmt: skip
def test_invalid_label_is_rejected(tmp_path, label):
    path = _write(tmp_path / "a.jsonl", f'{{"text": "a", "label": {label}}}')
    with raises_code("wrong-column-type", InputError) as excinfo:
        _read(path, "text-classification")
    assert all(part in str(excinfo.value) for part in ("a.jsonl:1:", "'label'"))


@pytest.mark.parametrize(("name", "text", "code", "line", "values"), [
    ("a.jsonl", '{"source": "a", "target": "b"}\n{"source": ', "invalid-json", 2, (" 12.",)),
    ("a.jsonl", "[1, 2]", "not-an-object", 1, ()), ("a.jsonl", "\n\n", "empty-data", None, ()),
    ("a.csv", "source,target\n", "empty-data", None, ()),
    ("a.csv", "source,target\na\n", "csv-field-count", 2, ()),
    ("a.jsonl", '{"sorce": "a", "target": "b"}', "missing-column", 1,
     ("'source'", "sorce, target", "'sorce'")),
    ("a.jsonl", '{"source": 3, "target": "b"}', "wrong-column-type", 1, ("'source'", "3")),
    ("a.jsonl", '{"source": "a", "targets": "b"}', "wrong-column-type", 1, ("'targets'",)),
    ("a.xlsx", "x", "unknown-file-type", None, ("'.xlsx'",)), ("a.parquet", "x", "damaged-file", None, ()),
])  # fmt: skip
def test_errors_have_file_and_line(tmp_path, name, text, code, line, values):
    path = _write(tmp_path / name, text)
    with raises_code(code, InputError) as excinfo:
        _read(path)
    assert (excinfo.value.file, excinfo.value.line) == (str(path), line)
    assert all(value in str(excinfo.value) for value in values)


def test_missing_file_suggests_similar_name(tmp_path):
    (tmp_path / "train.jsonl").write_text("x")
    with raises_code("missing-file", InputError) as excinfo:
        read_split("trian.jsonl", "translation", Columns(), tmp_path)
    assert "'train.jsonl'" in str(excinfo.value)


def test_broken_gzip_and_wrong_encoding_are_explained(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    with raises_code("unreadable-file", InputError):
        _read(tmp_path / "a.jsonl.gz")
    (tmp_path / "b.jsonl").write_bytes(b'{"source": "\xff"}')
    with raises_code("not-utf8", InputError) as excinfo:
        _read(tmp_path / "b.jsonl")
    assert " 12" in str(excinfo.value)


def _label_files(folder, labels):
    """Write the same labels as every kind of file; return the files."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": f"t{i}", "label": label} for i, label in enumerate(labels)]
    _write(folder / "a.jsonl", "\n".join(map(json.dumps, rows)))
    _write(folder / "a.json", json.dumps(rows))
    for name, mark in (("a.csv", ","), ("b.csv", ";"), ("a.tsv", "\t")):
        _write(
            folder / name, "\n".join([f"text{mark}label", *(f"{r['text']}{mark}{r['label']}" for r in rows)])
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    return [folder / name for name in ("a.jsonl", "a.json", "a.csv", "b.csv", "a.tsv", "a.parquet")]


@pytest.mark.parametrize("labels", [[1, 3, 2], [1.0, 3.0, 2.0]])
@pytest.mark.parametrize(
    ("config", "places"), [(["1", "2", "3"], [0, 2, 1]), (["a", "b", "c", "d"], [1, 3, 2]), (None, [0, 2, 1])]
)
def test_numeric_labels_are_equal_in_every_file_kind(tmp_path, labels, config, places):
    from smelt.data.labels import SINGLE_LABEL, class_targets, infer_label_names, infer_problem_type

    for path in _label_files(tmp_path, labels):
        examples = _read(path, "text-classification").examples
        label_values = [e.label for e in examples]
        assert infer_problem_type(None, label_values) == SINGLE_LABEL
        assert class_targets(examples, config or infer_label_names(label_values, SINGLE_LABEL)) == places, (
            path.name
        )


def test_single_empty_label_is_reported_with_line(tmp_path):
    from smelt.data.labels import SINGLE_LABEL, class_targets, infer_label_names, infer_problem_type

    for name, text in (
        ("a.csv", "text,label\na,0\nb,\nc,1\n"),
        ("a.jsonl", '\n{"text": "a", "label": 0}\n{"text": "b", "label": " "}\n{"text": "c", "label": 1}'),
    ):
        split = _read(_write(tmp_path / name, text), "text-classification")
        label_values = [e.label for e in split.examples]
        assert infer_problem_type(None, label_values) == SINGLE_LABEL
        assert infer_label_names(label_values, SINGLE_LABEL) == ["0", "1"]
        with raises_code("empty-label", InputError) as excinfo:
            class_targets(split.examples, ["0", "1"], split.origin)
        assert (excinfo.value.file, excinfo.value.line) == (name, 3)


def test_invalid_rows_of_file_are_reported_together(tmp_path):
    lines = ['{"source": "a", "target": "b"}', *['{"source": 1, "target": "b"}'] * 8, '{"source": ']
    with raises_code("several-errors", InputError) as raised:
        _read(_write(tmp_path / "a.jsonl", "\n".join(lines)))
    kinds = [(error_entry.code, error_entry.line) for error_entry in raised.value.messages]
    assert kinds == [*(("wrong-column-type", line) for line in range(2, 10)), ("invalid-json", 10)]
    message = str(raised.value).splitlines()
    assert [line.split(": ")[0].rpartition(":")[2] for line in message[:5]] == ["2", "3", "4", "5", "6"]
    assert message[5].startswith("4 ")
    assert len(message) == 6


def test_rows_have_lines_that_do_not_affect_equality(tmp_path):
    first = _read(_write(tmp_path / "a.jsonl", "\n" + json.dumps(ROW)))
    two = _read(_write(tmp_path / "b.csv", "source,target\na cat,eine Katze\n"))
    assert [e.line for e in (*first.examples, *two.examples)] == [2, 2]
    assert first.examples == (Example("a cat", ("eine Katze",)),)
    lines = read_split(
        "b.csv.txt", "language-modeling", Columns(), _write(tmp_path / "b.csv.txt", "a\n\nb").parent
    )
    assert [e.line for e in lines.examples] == [1, 2, 3]


def test_rows_without_lines_have_row_numbers(tmp_path):
    import pyarrow.parquet

    rows = [{"source": f"cat {n}", "target": "Katze"} for n in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name, lines in (("a.parquet", [None] * 4), ("a.json", [1, None, None, None])):
        split = _read(tmp_path / name)
        assert [e.line for e in split.examples] == lines
        assert [e.row for e in split.select([3, 1]).examples] == [4, 2]


def test_integral_floats_equal_integers_with_equal_fingerprint(tmp_path):
    floats = _write(tmp_path / "a.jsonl", '{"text": "a", "label": 1.0}\n{"text": "b", "label": [2.0, "x"]}')
    integers = _write(tmp_path / "b.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": [2, "x"]}')
    splits = [_read(path, "text-classification") for path in (floats, integers)]
    assert [repr(e.label) for e in splits[0].examples] == ["1", "(2, 'x')"]
    assert splits[0].fingerprint == splits[1].fingerprint


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_duplicate_columns_are_rejected(tmp_path, name):
    row = '{"source": "a", "source": "b", "target": "c"}'
    path = tmp_path / name
    if name == "a.parquet":
        import pyarrow
        import pyarrow.parquet

        columns = [pyarrow.array(["a"])] * 3
        pyarrow.parquet.write_table(pyarrow.table(columns, names=["source", "source", "target"]), path)
    else:
        _write(path, f"[{row}]" if name == "a.json" else row)
    with raises_code("duplicate-column", InputError):
        _read(path)
    with raises_code("duplicate-column", InputError):
        list(read_file_rows(path))


@pytest.mark.parametrize(("task", "row"), [
    ("translation", {"source": " ", "target": "x"}), ("summarization", {"source": "", "target": "x"}),
    ("text-classification", {"text": "\t", "label": 1}), ("sentence-similarity", {"text": ""}),
])  # fmt: skip
def test_empty_text_is_rejected(tmp_path, task, row):
    path = _write(tmp_path / "a.jsonl", json.dumps(row))
    with raises_code("empty-text", InputError):
        _read(path, task)


def test_empty_language_modeling_text_is_accepted(tmp_path):
    path = _write(tmp_path / "a.jsonl", '{"text": ""}\n{"text": "a"}\n')
    assert [e.text for e in _read(path, "language-modeling").examples] == ["", "a"]
