"""CSV files as people have them."""

import csv
import gzip
import threading

import pytest

from smelt.core.errors import InputError
from smelt.data.csv_rows import MAX_FIELD_CHARACTERS, detect_delimiter, read_csv_rows
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def _file(folder, text, name="a.csv"):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(("text", "delimiter"), [
    ("text,label\na; b; c,1\n", ","), ("text;label\nHello, world;1\n", ";"),
    ("text\tlabel\na, b; c\t1\n", "\t"), ('"text; raw",label\na,1\n', ","), ("text; raw,label\na;b,1\n", ","),
    ('text;label;weight\n"a;b";1;0,5\n', ";"), ("a,b;c;d\n1;2;3\n", ";"),
    # nothing tells: the comma
    ("id,text;label\n1,x;2\n", ","),
    ("id,text;raw;x\n1,a\n2,b;c\n", ","), ("text;n,m;label\n" + ("a," + "x" * 3000 + ";1;2\n") * 100, ";"),
    ("text\na; b\n", ","), ("", ","), ("text;label\n" + "x, y;1\n" * 20_000, ";"),
    ('text;label\n"' + "a\n" * 40_000 + '";1\n', ";"), ("\ufefftext;label\na;1\n", ";"),
])  # fmt: skip
def test_delimiter_is_detected_from_header(tmp_path, text, delimiter):
    assert detect_delimiter(_file(tmp_path, text)) == delimiter
    assert detect_delimiter(_file(tmp_path, text, "a.csv.gz")) == delimiter


def test_tsv_with_comma_header_is_comma_separated(tmp_path):
    assert detect_delimiter(_file(tmp_path, "text,label\na,1\n", "a.tsv")) == ","
    assert detect_delimiter(_file(tmp_path, "text\tlabel, raw\na\t1\n", "a.tsv")) == "\t"


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_csv_rows_have_line_numbers(tmp_path, mark):
    inside = "" if mark == "\t" else mark  # a line with all of its tabs is a row
    text = f'text{mark}label\r\n"a{inside}\nb"{mark}1\r\n\r\nc{mark}2'
    path = _file(tmp_path, text)
    assert list(read_csv_rows(path)) == [
        (f"{path}:3", {"text": f"a{inside}\nb", "label": "1"}),
        (f"{path}:5", {"text": "c", "label": "2"}),
    ]


def test_long_field_is_read_and_field_limit_restored(tmp_path):
    before = csv.field_size_limit()
    long_text = "word " * 60_000
    path = _file(tmp_path, f"text,label\n{long_text},1\n")
    [(_, row)] = read_csv_rows(path)
    assert row["text"] == long_text
    assert csv.field_size_limit() == before


def test_concurrent_readers_do_not_change_field_limit(tmp_path):
    before = csv.field_size_limit()
    long_text = "x" * 200_000
    path = _file(tmp_path, "text,label\n" + f"{long_text},1\n" * 5)
    short_path = _file(tmp_path, "text,label\na,1\n", "short.csv")
    failures = []

    def read(file, rows):
        try:
            for _ in range(20):
                assert len(list(read_csv_rows(file))) == rows
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=args) for args in [(path, 5), (short_path, 1)] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert csv.field_size_limit() == before


def test_field_limit_is_restored_if_reader_stops_early(tmp_path):
    before = csv.field_size_limit()
    rows = read_csv_rows(_file(tmp_path, "text,label\na,1\nb,2\n"))
    next(rows)
    assert csv.field_size_limit() == MAX_FIELD_CHARACTERS
    rows.close()
    assert csv.field_size_limit() == before


def test_too_long_field_suggests_unclosed_quote(tmp_path, monkeypatch):
    monkeypatch.setattr("smelt.data.csv_rows.MAX_FIELD_CHARACTERS", 140_000)
    path = _file(tmp_path, 'text,label\na,1\n"b,2\n' + "c,3\n" * 60_000)
    with raises_code("field-too-long", InputError) as excinfo:
        list(read_csv_rows(path))
    assert all(part in str(excinfo.value) for part in ("a.csv:", "140,000"))


def test_wrong_field_count_error_names_delimiter(tmp_path):
    path = _file(tmp_path, "text;label\na;1\nb;2;3\n")
    with raises_code("csv-field-count", InputError) as error:
        list(read_csv_rows(path))
    assert (error.value.file, error.value.line) == (str(path), 3)
    assert "semicolons" in str(error.value)


def test_quotes_in_tsv_are_text(tmp_path):
    lines = [f"hello {n}\thallo {n}" for n in range(120)]
    lines[40] = '"Hello there\thallo'
    lines[43] = 'he shouts bye"\ter ruft'
    lines[50] = '"Yes" he said\t"Ja" sagte er'
    lines[60] = '"He said ""no"""\tnein'  # as csv writes a text with quotes
    path = tmp_path / "rows.tsv"
    path.write_text("source\ttarget\n" + "\n".join(lines) + "\n", encoding="utf-8")
    rows = [row for _, row in read_csv_rows(path)]
    assert len(rows) == 120
    assert rows[40] == {"source": '"Hello there', "target": "hallo"}
    assert rows[43]["source"] == 'he shouts bye"'
    assert rows[50] == {"source": '"Yes" he said', "target": '"Ja" sagte er'}
    assert rows[60]["source"] == 'He said "no"'


@pytest.mark.parametrize("quoting", [csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
def test_tsv_written_by_python_round_trips(tmp_path, quoting):
    rows = [["a", "b"], ['one "two"', "x\ty"], ["first\nsecond", "z"], ["plain", '"'], ["", "last"]]
    path = tmp_path / "rows.tsv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t", quoting=quoting).writerows(rows)
    assert [list(row.values()) for _, row in read_csv_rows(path)] == rows[1:]


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_duplicate_columns_are_rejected(tmp_path, name):
    path = tmp_path / name
    path.write_text("text,label,text\na,b,c\n".replace(",", "\t" if name.endswith("tsv") else ","))
    with raises_code("duplicate-column", InputError):
        list(read_csv_rows(path))
