"""Languages and prefixes next to a model: what its tokenizer does, what is refused."""

import json

import pytest

from smelt.core.errors import InputError
from smelt.models.checkpoint import copy_tokenizer, load_tokenizer, write_text_rules
from smelt.models.text_rules import TextRules, read_text_rules
from smelt.models.tokenizer import encode_texts
from tests.support.expected_errors import raises_code
from tests.support.models import seq2seq, tiny

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return seq2seq.write_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def mbart(tmp_path_factory):
    return seq2seq.write_bart(tmp_path_factory.mktemp("mbart"), kind="mbart")


def test_text_rules_are_copied_with_tokenizer_and_can_be_removed(t5, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    copy_tokenizer(t5, tmp_path / "first")
    rules = TextRules(prefix="a: ")
    write_text_rules(tmp_path / "first", rules)
    copy_tokenizer(tmp_path / "first", tmp_path / "second")
    assert read_text_rules(tmp_path / "second") == rules
    write_text_rules(tmp_path / "second", TextRules())
    assert read_text_rules(tmp_path / "second") == TextRules()
    assert not (tmp_path / "second" / "text.json").exists()


def test_languages_set_tokenizer_and_forced_token_as_transformers(mbart):
    write_text_rules(mbart, TextRules(source_language="de_DE", target_language="ro_RO"))
    tokenizer = load_tokenizer(mbart)
    reference = tokenizer._build_translation_inputs(
        tiny.SENTENCES[:1], return_tensors=None, src_lang="de_DE", tgt_lang="ro_RO"
    )
    assert encode_texts(tiny.SENTENCES[:1], tokenizer, 40).ids == reference["input_ids"]
    content = json.loads((mbart / "generation_config.json").read_text())
    assert (
        content["forced_bos_token_id"]
        == reference["forced_bos_token_id"]
        == tokenizer.lang_code_to_id["ro_RO"]
    )
    target = tokenizer(text_target=tiny.SENTENCES[0])["input_ids"]
    assert (target[0], target[-1]) == (tokenizer.lang_code_to_id["ro_RO"], tokenizer.eos_token_id)


def test_unknown_language_is_rejected_with_suggestion(mbart):
    with raises_code("unknown-language", InputError) as caught:
        write_text_rules(mbart, TextRules(source_language="en_XX", target_language="de_D"))
    assert all(part in str(caught.value) for part in ("'de_D'", "'de_DE'"))
    (mbart / "text.json").unlink()


def test_prefix_is_added_to_every_text_and_truncated_with_it(t5, tmp_path):
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


def test_language_for_monolingual_tokenizer_is_rejected(t5, tmp_path):
    copy_tokenizer(t5, tmp_path)
    (tmp_path / "text.json").write_text('{"source_language": "en"}')
    with raises_code("unknown-language", InputError) as caught:
        load_tokenizer(tmp_path)
    assert "'en'" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"prefix": 3}', '{"suffix": "x"}'])
def test_damaged_file_is_rejected(tmp_path, text):
    (tmp_path / "text.json").write_text(text)
    with raises_code("damaged-file", InputError) as caught:
        read_text_rules(tmp_path)
    assert "text.json" in str(caught.value)
