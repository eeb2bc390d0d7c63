"""A tokenizer.json without transformers; test_export_tokenizer.py compares whole tokenizers."""

import json
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from smelt.core.errors import InputError
from smelt.models.split_words import indices_after_truncation
from smelt.models.tokenizer import RustTokenizer, TokenizerInfo, clean_up_tokenization
from tests.support.expected_errors import raises_code
from tests.support.models import classifiers

PATTERNS = {
    "bert": processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 1)]),
    "roberta": processors.RobertaProcessing(("[SEP]", 1), ("[CLS]", 0)), "none": None,
}  # fmt: skip


def words(processor):
    vocabulary = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2} | {f"w{i}": 3 + i for i in range(60)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer


def text(count, first=0):
    return " ".join(f"w{first + i}" for i in range(count))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_truncated_ids_equal_tokenizers_library(tmp_path, pattern, side):
    words(PATTERNS[pattern]).save(str(tmp_path / "tokenizer.json"))
    tokenizer = RustTokenizer(tmp_path, TokenizerInfo(reader="tokenizers", types=True, truncation_side=side))
    draw = random.Random(0)
    for _ in range(120):
        first, second = text(draw.randrange(20)), text(draw.randrange(20), 30)
        pair = draw.choice([None, second])
        reference, limit = words(PATTERNS[pattern]), draw.randrange(4, 24)
        full_encoding = reference.encode(first, pair)
        reference.enable_truncation(limit, direction=side)
        cut = reference.encode(first, pair)
        encoded = tokenizer.encode_batch([first], limit, None if pair is None else [pair])
        assert (encoded.ids, encoded.types) == ([cut.ids], [cut.type_ids]), (first, pair, limit)
        assert encoded.truncated == (len(full_encoding.ids) > limit)


def test_missing_unknown_token_is_an_explained_error(tmp_path):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = RustTokenizer(tmp_path, TokenizerInfo(reader="tokenizers"))
    assert tokenizer.encode_batch(["a"], 9).ids == [[0]]
    with raises_code("tokenizer-failed", InputError):
        tokenizer.encode_batch(["b"], 9)


@pytest.mark.parametrize("section", ["truncation", "padding"])
def test_stored_truncation_and_padding_are_ignored(tmp_path, section):
    """Published files hold what their last caller had set; how long rows may be is the model's to say."""
    reference = words(PATTERNS["bert"])
    if section == "truncation":
        reference.enable_truncation(5)
    else:
        reference.enable_padding(length=16)
    reference.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())[section]
    tokenizer = RustTokenizer(tmp_path, TokenizerInfo(reader="tokenizers", types=True))
    encoded = tokenizer.encode_batch([text(8), text(2)], 64)
    assert encoded.ids == [[0, *range(3, 11), 1], [0, 3, 4, 1]]
    assert (encoded.types, encoded.truncated) == ([[0] * 10, [0] * 4], 0)
    assert tokenizer.encode_batch([text(8), text(2)], 6).truncated == 1


def test_special_tokens_are_kept_without_room_for_text():
    assert indices_after_truncation([None, 0, 0, None], 2, False) == [0, 3]
    assert indices_after_truncation([None, 0, None], 1, False) == [0, 2]


def test_spaces_before_punctuation_are_removed_as_transformers(tmp_path):
    from smelt.models.checkpoint import load_tokenizer

    reference = load_tokenizer(classifiers.write_bert(tmp_path / "m"))
    text = "i do n't , you 've . he 's ? we 're ! i 'm ' so ' ."
    assert clean_up_tokenization(text) == reference.clean_up_tokenization(text) != text


@pytest.mark.parametrize("damage", ["{", "{}", ""])
def test_damaged_file_is_rejected(tmp_path, damage):
    (tmp_path / "tokenizer.json").write_text(damage)
    with raises_code("damaged-tokenizer", InputError) as caught:
        RustTokenizer(tmp_path, TokenizerInfo(reader="tokenizers"))
    assert "tokenizer.json" in str(caught.value)


def test_missing_file_is_rejected(tmp_path):
    with raises_code("damaged-tokenizer", InputError) as caught:
        RustTokenizer(tmp_path, TokenizerInfo(reader="tokenizers"))
    assert "tokenizer.json" in str(caught.value)
