"""Prefix and languages: what is next to a model is what its tokenizer does."""

import pytest
import seq2seq
import tiny
from expected_errors import raises_code

from smelt.core.errors import InputError
from smelt.models.checkpoint import copy_tokenizer, load_tokenizer, write_text_rules
from smelt.models.text_rules import TextRules, read_text_rules
from smelt.runtimes.predict_texts import encode_texts

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return seq2seq.write_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def mbart(tmp_path_factory):
    return seq2seq.write_bart(tmp_path_factory.mktemp("mbart"), kind="mbart")


def test_every_text_is_read_behind_the_prefix_and_cut_with_it(t5, tmp_path):
    copy_tokenizer(t5, tmp_path)
    write_text_rules(tmp_path, TextRules(prefix=seq2seq.PREFIX))
    plain, ruled = load_tokenizer(t5), load_tokenizer(tmp_path)
    texts = tiny.SENTENCES[:3]
    expected = plain([seq2seq.PREFIX + text for text in texts])["input_ids"]
    assert encode_texts(texts, ruled, 40).ids == expected
    cut = encode_texts(texts, ruled, 6)
    assert [ids[:5] for ids in cut.ids] == [ids[:5] for ids in expected]
    assert cut.truncated == 3
    assert ruled(text_target=texts)["input_ids"] == plain(text_target=texts)["input_ids"]


def test_a_language_for_a_tokenizer_without_any_is_refused(t5, tmp_path):
    copy_tokenizer(t5, tmp_path)
    (tmp_path / "text.json").write_text('{"source_language": "en"}')
    with raises_code("unknown-language", InputError) as caught:
        load_tokenizer(tmp_path)
    assert "'en'" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"prefix": 3}', '{"suffix": "x"}'])
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "text.json").write_text(text)
    with raises_code("damaged-file", InputError) as caught:
        read_text_rules(tmp_path)
    assert "text.json" in str(caught.value)
