"""Vocabularies that lost tokens cut texts as the whole ones do, compared with the libraries that cut them."""

import json
import random

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from smelt.compress.trim_vocabulary.select_tokens import select_tokens
from smelt.compress.trim_vocabulary.tokenizers import (
    apply_bpe,
    merge_ancestors,
    open_json_vocabulary,
    rank_by_merges,
    rank_by_scores,
    required_wordpieces,
    trim_tokenizer_json,
)
from smelt.core.errors import InputError
from tests.support.expected_errors import raises_code
from tests.support.models import tiny

TEXTS = [*tiny.SENTENCES, "unbelievable bells label the able table", "abcdefghijklmnopqrstuvwxyz .,!?"]
OTHERS = ["a tab tells us", "lab", "unable", "the belt", "ta ble", "xyz!"]


def _trained(kind):
    made = {
        "BPE": (models.BPE(unk_token="<unk>"), trainers.BpeTrainer),
        "WordPiece": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
        "Unigram": (models.Unigram(), trainers.UnigramTrainer),
    }
    model, trainer = made[kind]
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Metaspace() if kind == "Unigram" else pre_tokenizers.WhitespaceSplit()
    )
    more = {"unk_token": "<unk>"} if kind == "Unigram" else {}
    tokenizer.train_from_iterator(
        TEXTS * 3, trainer(vocab_size=160, special_tokens=["<unk>", "</s>"], show_progress=False, **more)
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["BPE", "WordPiece", "Unigram"])
@pytest.mark.parametrize("seed", range(3))
def test_texts_of_tokens_that_stay_are_cut_as_before_and_none_becomes_unknown(kind, seed):
    whole = _trained(kind)
    data = json.loads(whole.to_str())
    words = open_json_vocabulary(data, "here")
    size = whole.get_vocab_size()
    draw = random.Random(seed)
    wanted = draw.sample(range(size), size // 4)
    kept = set(words.required) | set(wanted)
    for at in list(kept):
        kept |= words.dependencies(at)
    assert len(kept) < size - 10
    new = {old: at for at, old in enumerate(sorted(kept))}
    after = Tokenizer.from_str(json.dumps(trim_tokenizer_json(data, new)))
    unknown = whole.token_to_id("<unk>")
    same = 0
    for text in [*TEXTS, *OTHERS, *(word for t in TEXTS for word in t.split())]:
        before, now = whole.encode(text).ids, after.encode(text).ids
        if all(at in new for at in before):
            same += 1
            assert [new[at] for at in before] == now, text
        assert now.count(new[unknown]) <= before.count(unknown)
        assert all(at < len(new) for at in now)
    assert same > 2  # which merges the library learns differs from process to process


@pytest.mark.parametrize("kind", ["BPE"])
def test_steps_are_those_that_the_library_takes(kind):
    """Each token, alone, is cut into itself, and each step of it is a token."""
    whole = _trained(kind)
    model = json.loads(whole.to_str())["model"]
    rank = rank_by_merges(tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"])
    for token in model["vocab"]:
        pieces, _ = apply_bpe(token, rank)
        if token not in ("<unk>", "</s>"):
            assert pieces == [token]
            assert merge_ancestors(token, rank) <= model["vocab"].keys()
    assert merge_ancestors("the", rank) >= set("the")


def test_steps_by_hand():
    rank = rank_by_merges([("b", "c"), ("a", "bc"), ("a", "b"), ("ab", "d")])
    assert apply_bpe("abcd", rank)[0] == ["abc", "d"]
    assert merge_ancestors("abc", rank) == {"a", "b", "c", "bc"}
    assert merge_ancestors("abd", rank) == {"a", "b", "d", "ab"}
    assert merge_ancestors("cd", rank) == frozenset()  # it is never joined


def test_a_merge_goes_with_either_of_its_sides():
    """Llama's list holds every way to join a token, also those that no text goes."""
    vocab = {token: at for at, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    merges = [["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"]]
    data = {"model": {"type": "BPE", "vocab": vocab, "merges": merges}}
    words = open_json_vocabulary(data, "here")
    assert words.dependencies(5) == {0, 1, 2, 3}
    left = trim_tokenizer_json(data, {at: new for new, at in enumerate([0, 1, 2, 3, 5])})["model"]
    assert left["merges"] == [["a", "b"], ["ab", "c"]]
    assert Tokenizer(models.BPE(left["vocab"], [tuple(m) for m in left["merges"]])).encode("abc").ids == [4]


def test_scores_rank_by_what_comes_out():
    rank = rank_by_scores({"ab": -1.0, "bc": -2.0, "abc": -3.0})
    assert apply_bpe("abc", rank) == (["abc"], {"a", "b", "c", "ab", "abc"})
    assert rank("b", "a") is None


def test_token_with_a_character_that_is_no_token_stays():
    tokens = ["a", "##a", "b", "ab", "aa", "##zb", "zoo"]
    assert required_wordpieces(tokens, "##") == {"a", "##a", "b", "ab", "##zb", "zoo"}


def test_a_tokenizer_of_whole_words_is_refused():
    with raises_code("unsupported-tokenizer", InputError) as caught:
        open_json_vocabulary({"model": {"type": "WordLevel", "vocab": {"a": 0}}}, "here")
    assert "WordLevel" in str(caught.value)
    suffix = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "end_of_word_suffix": "</w>"}}
    with raises_code("unsupported-tokenizer", InputError) as caught:
        open_json_vocabulary(suffix, "here")
    assert "end_of_word_suffix" in str(caught.value)


def _words(ids, stay=(), parts=None):
    from smelt.compress.trim_vocabulary.select_tokens import TrimmableVocabulary

    return TrimmableVocabulary(
        "X", ids, frozenset(stay), lambda at: frozenset((parts or {}).get(at, ())), lambda *_: None
    )


def test_what_is_counted_stays_with_what_it_needs():
    import numpy as np

    words = _words({c: at for at, c in enumerate("abcdefgh")}, stay=[0], parts={3: [1, 2], 7: [6]})
    counts = np.array([0, 0, 0, 5, 1, 3, 0, 1])
    assert select_tokens(counts, words, ()) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert select_tokens(counts, words, (), min_count=2) == [0, 1, 2, 3, 5]
    assert select_tokens(counts, words, [4], min_count=4) == [0, 1, 2, 3, 4]
    assert select_tokens(counts, words, (), coverage=0.5) == [0, 1, 2, 3]  # 5 of 10
    assert select_tokens(counts, words, (), coverage=0.51) == [0, 1, 2, 3, 5]
    assert select_tokens(counts, words, (), size=4) == [0, 1, 2, 3]
    assert select_tokens(counts, words, (), size=3) == [0, 4, 5]  # 3 would need 1 and 2
    assert select_tokens(counts, words, (), min_count=4, multiple_of=6) == [0, 1, 2, 3, 4, 5]
    with raises_code("size-too-small", InputError):
        select_tokens(counts, words, [4], size=1)


def test_a_number_without_a_token_does_not_stay():
    import numpy as np

    assert select_tokens(np.array([1, 0, 0]), _words({"a": 0, "b": 1}), [9, -1], size=3) == [0, 1]
