"""CSV files as people have them."""

import csv
import gzip
import threading

import pytest

from smelt.core.errors import InputError
from smelt.core.rows.csv_rows import MOST_CHARACTERS, csv_rows, delimiter_of


def _file(folder, text, name="a.csv"):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("text,label\na; b; c,1\n", ","),
        ("text;label\nHello, world;1\n", ";"),
        ("text\tlabel\na, b; c\t1\n", "\t"),
        ('"text; raw",label\na,1\n', ","),
        ("text; raw,label\na;b,1\n", ","),
        ('text;label;weight\n"a;b";1;0,5\n', ";"),
        ("a,b;c;d\n1;2;3\n", ";"),
        ("id,text;label\n1,x;2\n", ","),  # nothing tells: the comma
        ("id,text;raw;x\n1,a\n2,b;c\n", ","),
        ("text;n,m;label\n" + ("a," + "x" * 3000 + ";1;2\n") * 100, ";"),
        ("text\na; b\n", ","),
        ("", ","),
        ("text;label\n" + "x, y;1\n" * 20_000, ";"),
        ('text;label\n"' + "a\n" * 40_000 + '";1\n', ";"),
        ("\ufefftext;label\na;1\n", ";"),
    ],
)
def test_delimiter_is_what_parts_the_header(tmp_path, text, delimiter):
    assert delimiter_of(_file(tmp_path, text)) == delimiter
    assert delimiter_of(_file(tmp_path, text, "a.csv.gz")) == delimiter


def test_tsv_may_hold_commas_when_its_header_does(tmp_path):
    assert delimiter_of(_file(tmp_path, "text,label\na,1\n", "a.tsv")) == ","
    assert delimiter_of(_file(tmp_path, "text\tlabel, raw\na\t1\n", "a.tsv")) == "\t"


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_rows_come_with_their_lines(tmp_path, mark):
    text = f'text{mark}label\r\n"a{mark}\nb"{mark}1\r\n\r\nc{mark}2'
    path = _file(tmp_path, text)
    assert list(csv_rows(path)) == [
        (f"{path}:3", {"text": f"a{mark}\nb", "label": "1"}),
        (f"{path}:5", {"text": "c", "label": "2"}),
    ]


def test_field_of_many_characters_is_read_and_the_limit_of_others_restored(tmp_path):
    before = csv.field_size_limit()
    long = "word " * 60_000
    path = _file(tmp_path, f"text,label\n{long},1\n")
    [(_, row)] = csv_rows(path)
    assert row["text"] == long
    assert csv.field_size_limit() == before


def test_threads_that_read_together_do_not_disturb_each_other(tmp_path):
    before = csv.field_size_limit()
    long = "x" * 200_000
    path = _file(tmp_path, "text,label\n" + f"{long},1\n" * 5)
    short = _file(tmp_path, "text,label\na,1\n", "short.csv")
    failures = []

    def read(file, rows):
        try:
            for _ in range(20):
                assert len(list(csv_rows(file))) == rows
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=args) for args in [(path, 5), (short, 1)] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert csv.field_size_limit() == before


def test_limit_is_restored_when_a_reader_stops_early(tmp_path):
    before = csv.field_size_limit()
    rows = csv_rows(_file(tmp_path, "text,label\na,1\nb,2\n"))
    next(rows)
    assert csv.field_size_limit() == MOST_CHARACTERS
    rows.close()
    assert csv.field_size_limit() == before


def test_quote_that_is_never_closed_is_suspected_when_a_field_is_endless(tmp_path, monkeypatch):
    monkeypatch.setattr("smelt.core.rows.csv_rows.MOST_CHARACTERS", 140_000)
    path = _file(tmp_path, 'text,label\na,1\n"b,2\n' + "c,3\n" * 60_000)
    with pytest.raises(
        InputError, match=r"a\.csv:\d+: broken CSV: a field of more than 140,000 characters; is"
    ):
        list(csv_rows(path))


def test_row_of_another_length_is_told_with_the_delimiter(tmp_path):
    with pytest.raises(InputError, match=r"a\.csv:3: .* the header, which has 2, separated by semicolons\."):
        list(csv_rows(_file(tmp_path, "text;label\na;1\nb;2;3\n")))
