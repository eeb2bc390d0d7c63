"""Marian's pieces without transformers; test_export_tokenizer.py compares it on texts of many kinds."""

import json
import shutil

import pytest

from smelt.core.errors import InputError
from smelt.export.tokenizer import read_tokenizer_facts
from smelt.models.checkpoint import load_tokenizer
from smelt.models.tokenizer import MarianTokenizer
from tests.support.expected_errors import raises_code
from tests.support.models import published_tokenizers, tiny

SMILE, FROWN = "\U0001f642", "\u2639"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return published_tokenizers.marian(tmp_path_factory.mktemp("marian"), tiny.SENTENCES * 4, 60)


@pytest.fixture(scope="module")
def theirs(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def ours(folder, theirs):
    return MarianTokenizer(folder, read_tokenizer_facts(theirs))


@pytest.mark.parametrize("text", [
    "a man in a red hat", ">>deu<< a man", ">>xyz<< a man",  # a language that the vocabulary does not have
    f"a {SMILE} man",  # a word of the vocabulary that is no piece of the source's model
    f"a {FROWN} man",  # neither
    "a </s> man <unk><pad>", "</s>>>deu<< a", "", " ",
])  # fmt: skip
def test_ids_equal_transformers(ours, theirs, text):
    assert ours.encode_batch([text], 64).ids == [theirs(text)["input_ids"]]


def test_vocabulary_tokens_without_pieces_are_known(ours, theirs):
    token_id = theirs.encoder[SMILE]
    assert token_id in ours.encode_batch([f"a {SMILE}"], 64).ids[0]


def test_word_missing_in_model_and_vocabulary_is_unknown(ours, theirs):
    (ids,) = ours.encode_batch([f"a {FROWN} man"], 64).ids
    assert ids.count(theirs.unk_token_id) == 1
    assert theirs.unk_token_id not in ours.encode_batch(["a man"], 64).ids[0]


def test_piece_missing_in_vocabulary_is_unknown_and_decodes_to_piece(folder, tmp_path):
    """Ids without a word are SentencePiece's own on the way back, whatever piece stands there."""
    src = shutil.copytree(folder, tmp_path / "m")
    vocabulary = json.loads((src / "vocab.json").read_text())
    full_tokenizer = MarianTokenizer(folder, read_tokenizer_facts(load_tokenizer(folder)))
    (known_ids,) = full_tokenizer.encode_batch(["a man"], 64).ids
    piece = next(piece for piece, token_id in vocabulary.items() if token_id == known_ids[0])
    missing = vocabulary.pop(piece)
    (src / "vocab.json").write_text(json.dumps(vocabulary))
    reference = load_tokenizer(src)
    tokenizer = MarianTokenizer(src, read_tokenizer_facts(reference))
    (ids,) = tokenizer.encode_batch(["a man"], 64).ids
    assert [ids] == [reference("a man")["input_ids"]]
    assert ids[0] == reference.unk_token_id != known_ids[0]
    assert ids[1:] == known_ids[1:]
    rows = [[missing], [*known_ids[:-1]], [missing, missing]]
    assert tokenizer.decode_batch(rows) == reference.batch_decode(rows, skip_special_tokens=True)
    assert tokenizer.decode_batch([[missing]]) != [""]


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_text_keeps_end_token_and_is_counted(folder, theirs, side):
    theirs.truncation_side = side
    try:
        tokenizer = MarianTokenizer(folder, read_tokenizer_facts(theirs))
        texts = [*tiny.SENTENCES, "a"]
        encoded = tokenizer.encode_batch(texts, 6)
        assert encoded.ids == theirs(texts, truncation=True, max_length=6)["input_ids"]
        assert encoded.truncated == sum(len(ids) > 6 for ids in theirs(texts)["input_ids"])
    finally:
        theirs.truncation_side = "right"


def test_decoded_texts_equal_transformers_for_all_ids(ours, theirs):
    rows = [list(range(start, start + 7)) for start in range(len(theirs) - 7)]
    assert ours.decode_batch(rows) == theirs.batch_decode(rows, skip_special_tokens=True)


def test_prefix_is_stored(folder, theirs):
    assert MarianTokenizer(folder, read_tokenizer_facts(theirs), ">>deu<< ").prefix == ">>deu<< "


def test_text_pairs_are_rejected(ours):
    with raises_code("unsupported-text-pairs", InputError):
        ours.encode_batch(["a"], 8, ["b"])


@pytest.mark.parametrize("missing", ["eos", "unknown"])
def test_missing_special_tokens_are_rejected(folder, theirs, missing):
    details = read_tokenizer_facts(theirs).model_copy(update={missing: None})
    with raises_code("missing-special-token", InputError) as caught:
        MarianTokenizer(folder, details)
    assert "tokenizing.json" in str(caught.value)


@pytest.mark.parametrize("damage", [None, b"no model"])
def test_missing_or_damaged_model_file_is_rejected(folder, theirs, tmp_path, damage):
    (tmp_path / "vocab.json").write_bytes((folder / "vocab.json").read_bytes())
    if damage is not None:
        (tmp_path / "source.spm").write_bytes(damage)
    with raises_code("damaged-tokenizer", InputError) as caught:
        MarianTokenizer(tmp_path, read_tokenizer_facts(theirs))
    assert "source.spm" in str(caught.value)
