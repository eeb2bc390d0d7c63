"""Who reads an artifact's texts: the light reader where it was compared, else transformers."""

import pytest

from smelt.export.tokenizer import read_tokenizer_facts
from smelt.models.checkpoint import load_tokenizer
from smelt.models.tokenizer import (
    TOKENIZER_INFO_FILE,
    TokenizerInfo,
    open_tokenizer,
    read_tokenizer_info,
    write_tokenizer_info,
)
from tests.support.models import published_tokenizers, tiny


@pytest.fixture
def folder(tmp_path):
    return published_tokenizers.marian(tmp_path, tiny.SENTENCES * 4, 60)


def test_transformers_is_used_without_tokenizer_info(folder):
    assert open_tokenizer(folder).reader == "transformers"
    assert read_tokenizer_info(folder).reason == f"there is no {TOKENIZER_INFO_FILE} in this folder"


def test_fast_reader_is_used_if_recorded(folder):
    details = read_tokenizer_facts(load_tokenizer(folder))
    write_tokenizer_info(folder, details)
    assert read_tokenizer_info(folder) == details
    (folder / "text.json").write_text('{"prefix": ">>deu<< "}')
    tokenizer = open_tokenizer(folder)
    assert (tokenizer.reader, tokenizer.prefix) == ("sentencepiece", ">>deu<< ")


def test_transformers_is_used_if_fast_reader_differs(folder):
    write_tokenizer_info(folder, TokenizerInfo(reader="transformers", reason="ids of 'a'"))
    assert open_tokenizer(folder).reader == "transformers"
    assert read_tokenizer_info(folder).reason == "ids of 'a'"
