"""A .json file in every form that is rows, and what is none."""

import gzip
import json
import tracemalloc

import pytest

from smelt.core.errors import InputError
from smelt.data.json_rows import read_json_rows
from smelt.data.read_rows import read_file_rows
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

ROWS = [{"text": 'a ] } " \\ ü', "label": 1}, {"text": "b", "label": -2.5, "more": {"x": [1, [2]]}}]


def _file(folder, text, name="a.json"):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize("text", [
    json.dumps(ROWS), json.dumps(ROWS, indent=2), json.dumps(ROWS, ensure_ascii=False),
    "\ufeff \n" + json.dumps(ROWS), json.dumps({"data": ROWS}),
    json.dumps({"version": "1", "n": 2, "empty": [], "names": ["a"], "data": ROWS}, indent=1),
    "\n".join(map(json.dumps, ROWS)) + "\n", "".join(json.dumps(row, indent=3) for row in ROWS),
])  # fmt: skip
def test_rows_are_read_from_every_json_layout(tmp_path, name, text):
    assert [row for _, row in read_json_rows(_file(tmp_path, text, name))] == ROWS


@pytest.mark.parametrize("window", [1, 2, 3, 7, 64])
def test_chunk_may_end_anywhere(tmp_path, monkeypatch, window):
    monkeypatch.setattr("smelt.data.json_rows._CHUNK_CHARACTERS", window)
    rows = [*ROWS, {"t": "\u2028\U0001f600" * 9, "n": 123456789012345, "f": 1.5e-9, "b": None, "c": True}] * 3
    document = {"n": 1234567890, "t": True, "d": rows}
    for text in (json.dumps(rows), json.dumps(rows, indent=1, ensure_ascii=False), json.dumps(document)):
        assert [row for _, row in read_json_rows(_file(tmp_path, text))] == rows


def test_row_over_several_lines_has_its_first_line(tmp_path):
    path = _file(tmp_path, '[\n {"a": 1},\n\n {"a":\n 2}, {"a": 3}\n]')
    assert [where for where, _ in read_json_rows(path)] == [f"{path}:{line}" for line in (2, 4, 5)]
    pandas = _file(tmp_path, '[{"a": 1},{"a": 2},\n{"a": 3},{"a": 4}]', "pandas.json")
    locations = [f"{pandas}:1", f"{pandas} row 2", f"{pandas}:2", f"{pandas} row 4"]
    assert [where for where, _ in read_json_rows(pandas)] == locations
    one = _file(tmp_path, '{"text": "a", "targets": ["b", "c"]}', "one.json")
    assert list(read_json_rows(one)) == [(f"{one}:1", {"text": "a", "targets": ["b", "c"]})]


@pytest.mark.parametrize(
    ("text", "code", "line", "read"),
    [
        ('[{"a": 1},\n {"a" 2}]', "invalid-json", 2, "'2}]'"),
        ('[{"a": 1},\n {"a": 2}', "invalid-json", 2, "']'"),
        ('[{"a": 1} {"a": 2}]', "invalid-json", 1, """']', got '{"a": 2}]'"""),
        ('[{"a": 1}]\n[2]', "text-after-end", 2, "'[2]'"),
        ('[{"a": 1},\n 7]', "not-an-object", 2, "'7'"),
        ("7", "not-an-object", 1, "'7'"),
        ("[" * 100_000, "nested-too-deep", 1, ""),
        ('{"a": ' * 100_000, "nested-too-deep", 1, ""),
        ('{"train": [{"a": 1}], "test": [{"a": 2}]}', "several-row-lists", None, "(train, test)"),
        ('{"text": ["a", "b"], "label": [0, 1]}', "columns-not-rows", None, ""),
        ('{"text": {"0": "a"}, "label": {"0": 1}}', "columns-not-rows", None, ""),
        ('{"a": "' + "x" * 99_999, "invalid-json", 1, "'\"xx"),
        ("{7: 1}", "invalid-json", 1, "'7'"),
        ("nonsense", "invalid-json", 1, "'nonsense'"),
    ],
)
def test_json_without_rows_is_rejected(tmp_path, text, code, line, read):
    path = _file(tmp_path, text)
    with raises_code(code, InputError) as excinfo:
        list(read_json_rows(path))
    assert (excinfo.value.file, excinfo.value.line) == (str(path), line)
    assert read in str(excinfo.value)


def test_rows_with_nested_object_lists_are_rows(tmp_path):
    rows = [{"text": "a", "spans": [{"from": 1}]}, {"text": "b", "spans": [{"from": 2}]}]
    assert [row for _, row in read_json_rows(_file(tmp_path, "\n".join(map(json.dumps, rows))))] == rows


def test_empty_file_or_list_has_no_rows(tmp_path):
    for text in ("", " \n", "[]", '{"data": []}'):
        rows = list(read_json_rows(_file(tmp_path, text)))
        assert rows == ([] if "data" not in text else [(f"{tmp_path}/a.json:1", {"data": []})])


def test_large_file_is_read_with_bounded_memory(tmp_path):
    row = json.dumps({"text": "word " * 200, "label": 1})
    path = _file(tmp_path, '{"data": [' + ",\n".join([row] * 20_000) + "]}")
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_json_rows(path)) == 20_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 20_000_000
    assert peak < 2_000_000


@pytest.mark.parametrize(("name", "text"), [
    ("a.jsonl", '{"text": "short"}\n{"text": "LONG"}\n'),
    ("a.json", '[{"text": "short"},\n{"text": "LONG"}]'), ("a.json", '{"text": "short"}\n{"text": "LONG"}'),
    ("a.csv", 'text\n"short\nLONG\n'),  # longer than a field in a line, as of an unclosed quote
    ("a.tsv", "text\tlabel\nLONG\n"),
])  # fmt: skip
def test_too_long_line_is_rejected_with_bounded_memory(tmp_path, monkeypatch, name, text):
    """A packed line of some megabytes may exceed the memory."""
    monkeypatch.setattr("smelt.data.json_rows.MAX_LINE_CHARACTERS", 1000)
    path = _file(tmp_path, text.replace("LONG", "x" * 20_000_000), f"{name}.gz")
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as raised:
            list(read_file_rows(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (raised.value.code, raised.value.file) == ("line-too-long", str(path))
    assert peak < 2_000_000
