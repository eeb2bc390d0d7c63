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
    trainable = {
        "BPE": (models.BPE(unk_token="<unk>"), trainers.BpeTrainer),
        "WordPiece": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
        "Unigram": (models.Unigram(), trainers.UnigramTrainer),
    }
    model, trainer = trainable[kind]
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
def test_texts_of_kept_tokens_are_tokenized_same_without_unknown(kind, seed):
    full_tokenizer = _trained(kind)
    data = json.loads(full_tokenizer.to_str())
    words = open_json_vocabulary(data, "here")
    size = full_tokenizer.get_vocab_size()
    draw = random.Random(seed)
    sampled = draw.sample(range(size), size // 4)
    kept_ids = set(words.required) | set(sampled)
    for token_id in list(kept_ids):
        kept_ids |= words.dependencies(token_id)
    assert len(kept_ids) < size - 10
    new = {old: token_id for token_id, old in enumerate(sorted(kept_ids))}
    after = Tokenizer.from_str(json.dumps(trim_tokenizer_json(data, new)))
    unknown = full_tokenizer.token_to_id("<unk>")
    same = 0
    for text in [*TEXTS, *OTHERS, *(piece for t in TEXTS for piece in t.split())]:
        before, now = full_tokenizer.encode(text).ids, after.encode(text).ids
        if all(token_id in new for token_id in before):
            same += 1
            assert [new[token_id] for token_id in before] == now, text
        assert now.count(new[unknown]) <= before.count(unknown)
        assert all(token_id < len(new) for token_id in now)
    assert same > 2  # which merges the library learns differs from process to process


@pytest.mark.parametrize("kind", ["BPE"])
def test_merge_steps_equal_tokenizers_library(kind):
    """Each token, alone, is cut into itself, and each step of it is a token."""
    full_tokenizer = _trained(kind)
    model = json.loads(full_tokenizer.to_str())["model"]
    rank = rank_by_merges(tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"])
    for token in model["vocab"]:
        pieces, _ = apply_bpe(token, rank)
        if token not in ("<unk>", "</s>"):
            assert pieces == [token]
            assert merge_ancestors(token, rank) <= model["vocab"].keys()
    assert merge_ancestors("the", rank) >= set("the")


def test_merge_steps_equal_manual_result():
    rank = rank_by_merges([("b", "c"), ("a", "bc"), ("a", "b"), ("ab", "d")])
    assert apply_bpe("abcd", rank)[0] == ["abc", "d"]
    assert merge_ancestors("abc", rank) == {"a", "b", "c", "bc"}
    assert merge_ancestors("abd", rank) == {"a", "b", "d", "ab"}
    assert merge_ancestors("cd", rank) == frozenset()  # it is never joined


def test_merge_is_removed_with_either_of_its_parts():
    """Llama's list holds every way to join a token, also those that no text goes."""
    vocab = {token: index for index, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    merges = [["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"]]
    data = {"model": {"type": "BPE", "vocab": vocab, "merges": merges}}
    words = open_json_vocabulary(data, "here")
    assert words.dependencies(5) == {0, 1, 2, 3}
    trimmed = trim_tokenizer_json(data, {index: new for new, index in enumerate([0, 1, 2, 3, 5])})["model"]
    assert trimmed["merges"] == [["a", "b"], ["ab", "c"]]
    assert Tokenizer(models.BPE(trimmed["vocab"], [tuple(m) for m in trimmed["merges"]])).encode(
        "abc"
    ).ids == [4]


def test_rank_by_scores_uses_score_of_merged_token():
    rank = rank_by_scores({"ab": -1.0, "bc": -2.0, "abc": -3.0})
    assert apply_bpe("abc", rank) == (["abc"], {"a", "b", "c", "ab", "abc"})
    assert rank("b", "a") is None


def test_token_with_uncovered_character_is_required():
    tokens = ["a", "##a", "b", "ab", "aa", "##zb", "zoo"]
    assert required_wordpieces(tokens, "##") == {"a", "##a", "b", "ab", "##zb", "zoo"}


def test_word_level_tokenizer_is_rejected():
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
        "X", ids, frozenset(stay), lambda index: frozenset((parts or {}).get(index, ())), lambda *_: None
    )


def test_selected_tokens_include_their_dependencies():
    import numpy as np

    words = _words({c: index for index, c in enumerate("abcdefgh")}, stay=[0], parts={3: [1, 2], 7: [6]})
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


def test_ids_without_token_are_not_selected():
    import numpy as np

    assert select_tokens(np.array([1, 0, 0]), _words({"a": 0, "b": 1}), [9, -1], size=3) == [0, 1]
