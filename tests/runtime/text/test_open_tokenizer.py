"""Who reads an artifact's texts: the light reader where it was compared, else transformers."""

import published
import pytest
import tiny

from smelt.export.tokenizer.tokenizer_export import facts_of
from smelt.runtime.models.checkpoint import load_tokenizer
from smelt.runtime.text.open_tokenizer import open_tokenizer
from smelt.runtime.text.tokenizing_file import FILE, Tokenizing, read_tokenizing, write_tokenizing


@pytest.fixture
def folder(tmp_path):
    return published.marian(tmp_path, tiny.SENTENCES * 4, 60)


def test_transformers_reads_what_nobody_has_compared(folder):
    assert open_tokenizer(folder).reader == "transformers"
    assert read_tokenizing(folder).reason == f"there is no {FILE} in this folder"


def test_the_light_reader_serves_once_it_is_written_down(folder):
    details = facts_of(load_tokenizer(folder))
    write_tokenizing(folder, details)
    assert read_tokenizing(folder) == details
    (folder / "text.json").write_text('{"prefix": ">>deu<< "}')
    found = open_tokenizer(folder)
    assert (found.reader, found.prefix) == ("sentencepiece", ">>deu<< ")


def test_transformers_reads_where_the_light_reader_was_found_to_differ(folder):
    write_tokenizing(folder, Tokenizing(reader="transformers", reason="ids of 'a'"))
    assert open_tokenizer(folder).reader == "transformers"
    assert read_tokenizing(folder).reason == "ids of 'a'"
