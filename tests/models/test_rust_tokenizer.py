"""A tokenizer.json without transformers; test_export_tokenizer.py compares whole tokenizers."""

import json
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from smelt.core.errors import InputError
from smelt.models.tokenizer import (
    RustTokenizer,
    TokenizerInfo,
    clean_up_tokenization,
    indices_after_truncation,
)
from tests.support.expected_errors import raises_code
from tests.support.models import classifiers

PATTERNS = {
    "bert": processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 1)],
    ),
    "roberta": processors.RobertaProcessing(("[SEP]", 1), ("[CLS]", 0)),
    "none": None,
}


def words(processor):
    vocabulary = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2} | {f"w{i}": 3 + i for i in range(60)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        made.post_processor = processor
    return made


def text(count, first=0):
    return " ".join(f"w{first + i}" for i in range(count))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_cut_rows_are_those_that_the_library_cuts(tmp_path, pattern, side):
    words(PATTERNS[pattern]).save(str(tmp_path / "tokenizer.json"))
    ours = RustTokenizer(tmp_path, TokenizerInfo(reader="tokenizers", types=True, truncation_side=side))
    draw = random.Random(0)
    for _ in range(120):
        first, second = text(draw.randrange(20)), text(draw.randrange(20), 30)
        pair = draw.choice([None, second])
        theirs, limit = words(PATTERNS[pattern]), draw.randrange(4, 24)
        whole = theirs.encode(first, pair)
        theirs.enable_truncation(limit, direction=side)
        cut = theirs.encode(first, pair)
        found = ours.encode_batch([first], limit, None if pair is None else [pair])
        assert (found.ids, found.types) == ([cut.ids], [cut.type_ids]), (first, pair, limit)
        assert found.truncated == (len(whole.ids) > limit)


def test_an_unknown_token_that_is_no_word_is_an_explained_error(tmp_path):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    ours = RustTokenizer(tmp_path, TokenizerInfo(reader="tokenizers"))
    assert ours.encode_batch(["a"], 9).ids == [[0]]
    with raises_code("tokenizer-failed", InputError):
        ours.encode_batch(["b"], 9)


@pytest.mark.parametrize("section", ["truncation", "padding"])
def test_what_a_file_says_of_cutting_and_padding_does_not_act(tmp_path, section):
    """Published files hold what their last caller had set; how long rows may be is the model's to say."""
    made = words(PATTERNS["bert"])
    if section == "truncation":
        made.enable_truncation(5)
    else:
        made.enable_padding(length=16)
    made.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())[section]
    ours = RustTokenizer(tmp_path, TokenizerInfo(reader="tokenizers", types=True))
    found = ours.encode_batch([text(8), text(2)], 64)
    assert found.ids == [[0, *range(3, 11), 1], [0, 3, 4, 1]]
    assert (found.types, found.truncated) == ([[0] * 10, [0] * 4], 0)
    assert ours.encode_batch([text(8), text(2)], 6).truncated == 1


def test_special_tokens_stay_where_no_text_has_room():
    assert indices_after_truncation([None, 0, 0, None], 2, False) == [0, 3]
    assert indices_after_truncation([None, 0, None], 1, False) == [0, 2]


def test_blanks_before_punctuation_go_as_transformers_lets_them(tmp_path):
    from smelt.models.checkpoint import load_tokenizer

    theirs = load_tokenizer(classifiers.write_bert(tmp_path / "m"))
    text = "i do n't , you 've . he 's ? we 're ! i 'm ' so ' ."
    assert clean_up_tokenization(text) == theirs.clean_up_tokenization(text) != text


@pytest.mark.parametrize("damage", ["{", "{}", ""])
def test_a_damaged_file_is_named(tmp_path, damage):
    (tmp_path / "tokenizer.json").write_text(damage)
    with raises_code("damaged-tokenizer", InputError) as caught:
        RustTokenizer(tmp_path, TokenizerInfo(reader="tokenizers"))
    assert "tokenizer.json" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with raises_code("damaged-tokenizer", InputError) as caught:
        RustTokenizer(tmp_path, TokenizerInfo(reader="tokenizers"))
    assert "tokenizer.json" in str(caught.value)
