"""Tokenizers that are trained on the spot, for every family, read back by transformers."""

import json

import pytest

from smelt.core.errors import InputError
from smelt.models.checkpoint import load_tokenizer
from smelt.models.families.registry import FAMILIES
from smelt.models.new_model import train_tokenizer, unsupported_tokenizer
from tests.support.expected_errors import raises_code
from tests.support.models import tiny
from tests.support.pairs import matrix

KINDS = {"bpe": 300, "unigram": 90, "wordpiece": 110}
CASES = [
    (family, kind)
    for family, kind in matrix.matrix_cells(
        list(FAMILIES), list(KINDS), full=lambda name: name in ("bert", "t5")
    )
    if not unsupported_tokenizer(family, kind, KINDS[kind])
]


def _trained(folder, family, kind, size=None, texts=tiny.SENTENCES):
    folder.mkdir(exist_ok=True)
    train_tokenizer(texts, folder, family=family, kind=kind, vocab_size=size or KINDS[kind], max_length=40)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))  # as it is next to a model
    return load_tokenizer(folder)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_trained_tokenizer_loads_in_transformers_and_round_trips(tmp_path, family, kind):
    tokenizer = _trained(tmp_path / "t", family, kind)
    assert 20 < len(tokenizer) <= KINDS[kind]
    assert tokenizer.model_max_length == 40
    ids = tokenizer(tiny.SENTENCES)["input_ids"]
    assert max(max(row) for row in ids) < len(tokenizer)
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == tiny.SENTENCES
    assert tokenizer.pad_token_id is not None
    assert len(set(map(len, tokenizer(tiny.SENTENCES, padding=True)["input_ids"]))) == 1


# How the families' own tokenizers put their special tokens around one text and around two.
AROUND = {
    "bert": ("[CLS] a [SEP]", "[CLS] a [SEP] b [SEP]"),
    "distilbert": ("[CLS] a [SEP]", "[CLS] a [SEP] b [SEP]"),
    "roberta": ("<s> a </s>", "<s> a </s> </s> b </s>"), "bart": ("<s> a </s>", "<s> a </s> </s> b </s>"),
    "t5": ("a </s>", "a </s> b </s>"), "gpt2": ("a", "a b"), "opt": ("</s> a", "</s> a </s> b"),
    "qwen2": ("a", "a b"), "llama": ("<s> a", "<s> a b"),
}  # fmt: skip


@pytest.mark.parametrize("family", AROUND)
def test_special_tokens_are_placed_as_in_family(tmp_path, family):
    kind, size = ("bpe", 280) if family == "qwen2" else ("unigram", 60)
    tokenizer = _trained(tmp_path / "t", family, kind, size, texts=["a b a b", "b a"] * 5)

    def shown(*texts):
        tokens = " ".join(tokenizer.convert_ids_to_tokens(tokenizer(*texts)["input_ids"]))
        return " ".join(tokens.replace("▁", " ").replace("Ġ", " ").split())

    assert (shown("a"), shown("a", "b")) == AROUND[family]
    assert ("token_type_ids" in tokenizer("a", "b")) == (family == "bert")
    if family == "bert":
        first, types = len(tokenizer("a")["input_ids"]), tokenizer("a", "b")["token_type_ids"]
        assert types == [0] * first + [1] * (len(types) - first)
        assert types[-1] == 1


def test_special_token_ids_equal_published_checkpoints(tmp_path):
    roberta = _trained(tmp_path / "r", "roberta", "bpe")
    ids = (roberta.bos_token_id, roberta.pad_token_id, roberta.eos_token_id, roberta.unk_token_id)
    assert ids == (0, 1, 2, 3)  # roberta-base's and bart-base's
    opt = _trained(tmp_path / "o", "opt", "bpe")
    assert (opt.bos_token_id, opt.pad_token_id, opt.eos_token_id, opt.unk_token_id) == (2, 1, 2, 2)
    t5 = _trained(tmp_path / "t", "t5", "unigram")
    assert (t5.pad_token_id, t5.eos_token_id, t5.unk_token_id) == (0, 1, 2)  # t5-small's
    marian = _trained(tmp_path / "m", "marian", "unigram", 61)
    assert (marian.eos_token_id, marian.unk_token_id, marian.pad_token_id) == (0, 1, len(marian) - 1)


def test_byte_level_tokenizer_encodes_unseen_text(tmp_path):
    tokenizer = _trained(tmp_path / "t", "gpt2", "bpe")
    text = "Grüße, Welt! \u4f60\u597d"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_unsupported_tokenizers_are_rejected(tmp_path):
    for family, kind, size, code, value in (
        ("mbart", "bpe", 300, "unsupported-family", "'mbart'"),
        ("marian", "wordpiece", 300, "unsupported-tokenizer", "SentencePiece"),
        ("qwen2", "unigram", 300, "unsupported-tokenizer", "byte-level"),
        ("gpt2", "bpe", 256, "vocabulary-too-small", " 257"),
    ):
        with raises_code(code, InputError) as caught:
            train_tokenizer([], tmp_path, family=family, kind=kind, vocab_size=size, max_length=None)
        assert caught.value.setting == "model.tokenizer"
        assert value in str(caught.value)
        assert unsupported_tokenizer(family, kind, size) in str(caught.value)
    assert not unsupported_tokenizer("gpt2", "bpe", 257)


def test_empty_texts_are_rejected(tmp_path):
    with raises_code("empty-data", InputError):
        _trained(tmp_path / "t", "bert", "wordpiece", texts=["", " \n"])
