"""Sentences in columns: CoNLL files and CoNLL-U."""

import gzip

import pytest

from smelt.core.errors import InputError
from smelt.data.read_rows import read_file_rows
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

# NN B-NP O
. . O O"""


def rows(folder, text, name="a.conll"):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return [(int(location.rpartition(":")[2]), row) for location, row in read_file_rows(path)]


@pytest.mark.parametrize("name", ["a.conll", "a.bio", "a.iob.gz", "b.IOB2"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_sentences_have_first_and_last_column_and_their_first_line(tmp_path, name, end):
    (first_line, first), (second_line, second) = rows(tmp_path, CONLL_2003.replace("\n", end), name)
    assert (first["tokens"], first["tags"]) == (["EU", "rejects"], ["B-ORG", "O"])
    assert first["column_2"] == ["NNP", "VBZ"]
    assert second["tokens"] == ["#", "."]  # a word that is no comment
    assert (first_line, second_line) == (3, 6)


def test_words_may_have_spaces_where_columns_are_separated_by_tabs(tmp_path):
    [(_, row)] = rows(tmp_path, "New York\tB-LOC\n!\tO\n \n\n")
    assert row["tokens"] == ["New York", "!"]


def test_blanks_around_fields_are_removed(tmp_path):
    [(_, row)] = rows(tmp_path, "Ada \tB-PER \nis\tO\u00a0\n")
    assert (row["tokens"], row["tags"]) == (["Ada", "is"], ["B-PER", "O"])


def test_comments_are_skipped(tmp_path):
    text = "# a file\n# id 1 domain=x\nEU X Y O\n# sent = 2 z\nin X Y O\n"
    [(line, row)] = rows(tmp_path, text)
    assert (line, row["tokens"]) == (3, ["EU", "in"])


def test_conllu_has_form_and_upos(tmp_path):
    line = "{}\t{}\tlemma\t{}\tXP\t_\t0\troot\t_\tSpace=No".format
    text = "\n".join(
        [
            "# sent_id = 1",
            line("1-2", "im", "_"),
            line(1, "in", "ADP"),
            line(2, "dem", "DET"),
            line(2.1, "x", "X"),
        ]
    )
    [(first_line, row)] = rows(tmp_path, text, "a.conllu")
    assert (first_line, row["tokens"], row["tags"]) == (3, ["in", "dem"], ["ADP", "DET"])
    assert row["xpos"] == ["XP", "XP"]


@pytest.mark.parametrize(("text", "line"), [("EU B-ORG\nin\n", 2), ("EU B-ORG\n\na b c\n", 3), ("EU\n", 1)])
def test_line_with_other_columns_is_named(tmp_path, text, line):
    with raises_code("conll-column-count", InputError) as error:
        rows(tmp_path, text)
    assert error.value.line == line


def test_file_of_comments_has_no_rows(tmp_path):
    assert rows(tmp_path, "# nothing\n\n") == []
