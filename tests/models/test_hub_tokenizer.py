"""A tokenizer of transformers behind the surface that all tokenizers have."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from smelt.models.checkpoint import load_tokenizer
from smelt.models.tokenizer import HubTokenizer, as_text_tokenizer
from tests.support.models import seq2seq, tiny

TEXTS = [" ".join(tiny.SENTENCES[:n]) for n in range(1, 9)]


@pytest.fixture(scope="module")
def inner(tmp_path_factory):
    return load_tokenizer(seq2seq.write_t5(tmp_path_factory.mktemp("t5")))


def test_encoded_ids_equal_transformers_and_truncations_are_counted(inner):
    encoded = HubTokenizer(inner).encode_batch(TEXTS, 30)
    assert encoded.ids == inner(TEXTS, truncation=True, max_length=30)["input_ids"]
    assert encoded.truncated == sum(len(ids) > 30 for ids in inner(TEXTS)["input_ids"]) > 0
    pairs = HubTokenizer(inner).encode_batch(TEXTS, 20, TEXTS[::-1])
    assert pairs.ids == inner(TEXTS, TEXTS[::-1], truncation=True, max_length=20)["input_ids"]


def test_decoded_texts_equal_transformers_for_any_batch(inner):
    words = HubTokenizer(inner)
    ids = inner(TEXTS)["input_ids"]
    assert words.decode_batch(ids) == inner.batch_decode(ids, skip_special_tokens=True)
    assert words.decode_batch([[], ids[0], []])[1] == tiny.SENTENCES[0]
    assert words.decode_batch([]) == []
    assert words.encode_batch([], 8).ids == []


def test_tokenizer_attributes_are_read_from_files(inner):
    words = as_text_tokenizer(inner)
    assert words.reader == "transformers"
    assert (words.pad_token_id, words.bos_token_id, words.eos_token_id) == (0, None, 1)
    assert (words.model_max_length, words.prefix) == (40, "")
    assert as_text_tokenizer(words) is words


def test_concurrent_encoding_with_different_limits_is_correct(inner):
    """transformers sets how to cut in the tokenizer itself, which fails while it is used elsewhere."""
    words = HubTokenizer(inner)
    long = [" ".join(tiny.SENTENCES * 20)] * 8
    limits = [8, 10**9, 16] * 40
    expected = {limit: words.encode_batch(long, limit) for limit in set(limits)}
    with ThreadPoolExecutor(6) as pool:
        encodings = list(pool.map(lambda limit: words.encode_batch(long, limit), limits))
    assert encodings == [expected[limit] for limit in limits]
