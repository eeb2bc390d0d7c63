"""Each rule changes scores as the logits processor of transformers with the same name does."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as reference

from smelt.generation.config import GenerationConfig
from smelt.generation.logits_processors import LogitsProcessors

pytestmark = pytest.mark.quick

EOS = [1, 5]
RULES = [
    ({"repetition_penalty": 1.7}, [reference.RepetitionPenaltyLogitsProcessor(1.7)]),
    ({"repetition_penalty": 0.6}, [reference.RepetitionPenaltyLogitsProcessor(0.6)]),
    ({"no_repeat_ngram_size": 1}, [reference.NoRepeatNGramLogitsProcessor(1)]),
    ({"no_repeat_ngram_size": 2}, [reference.NoRepeatNGramLogitsProcessor(2)]),
    ({"no_repeat_ngram_size": 3}, [reference.NoRepeatNGramLogitsProcessor(3)]),
    ({"bad_words_ids": [[1], [2], [3, 4], [0, 1, 2], [4, 4]]},
     [reference.NoBadWordsLogitsProcessor([[1], [2], [3, 4], [0, 1, 2], [4, 4]], EOS)]),
    ({"min_length": 7}, [reference.MinLengthLogitsProcessor(7, EOS)]),
    ({"min_new_tokens": 4}, [reference.MinNewTokensLengthLogitsProcessor(3, 4, EOS)]),
    ({"forced_bos_token_id": 4}, [reference.ForcedBOSTokenLogitsProcessor(4)]),
    ({"forced_eos_token_id": EOS}, [reference.ForcedEOSTokenLogitsProcessor(10, EOS)]),
    ({"remove_invalid_values": True}, [reference.InfNanRemoveLogitsProcessor()]),
    ({"suppress_tokens": [2, 3]}, [reference.SuppressTokensLogitsProcessor([2, 3])]),
    ({"begin_suppress_tokens": [0, 4]}, [reference.SuppressTokensAtBeginLogitsProcessor([0, 4], 3)]),
    ({"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "suppress_tokens": [1], "min_new_tokens": 5},
     [reference.RepetitionPenaltyLogitsProcessor(1.4), reference.NoRepeatNGramLogitsProcessor(2),
     reference.MinNewTokensLengthLogitsProcessor(3, 5, EOS), reference.SuppressTokensLogitsProcessor([1])]),
]  # fmt: skip


@pytest.mark.parametrize(("wishes", "processors"), RULES, ids=[", ".join(w) for w, _ in RULES])
def test_rule_equals_its_processor_at_every_length(wishes, processors):
    random = np.random.default_rng(0)
    rules = LogitsProcessors(
        GenerationConfig(max_new_tokens=7, eos=EOS, **wishes), np.zeros((6, 3), dtype=np.int64), None
    )
    changed = 0
    for length in range(1, 10):
        texts = random.integers(0, 6, (6, length))
        scores = random.normal(0, 2, (6, 7)).astype(np.float32)
        expected = torch.from_numpy(scores.copy())
        for processor in processors:
            expected = processor(torch.from_numpy(texts), expected)
        before = scores.copy()
        rules.apply(scores, texts)
        np.testing.assert_array_equal(scores, expected.numpy())
        changed += not np.array_equal(scores, before)
    assert changed or wishes == {"remove_invalid_values": True}


def test_invalid_values_are_removed_as_transformers_does():
    scores = np.array([[np.nan, np.inf, -np.inf, 2.0]], dtype=np.float32)
    expected = reference.InfNanRemoveLogitsProcessor()(None, torch.from_numpy(scores.copy()))
    LogitsProcessors(
        GenerationConfig(remove_invalid_values=True), np.zeros((1, 1), dtype=np.int64), None
    ).apply(scores, np.zeros((1, 1), dtype=np.int64))
    np.testing.assert_array_equal(scores, expected.numpy())


def test_left_padding_is_not_a_repetition():
    prompt = np.array([[0, 0, 3], [0, 4, 2]])
    mask = np.array([[0, 0, 1], [1, 1, 1]])
    texts = np.repeat(prompt, 2, axis=0)
    scores = np.linspace(-2, 3, 4 * 6, dtype=np.float32).reshape(4, 6)
    processor = reference.RepetitionPenaltyLogitsProcessor(2.0, torch.tensor([2, 2, 0, 0]))
    expected = processor(torch.from_numpy(texts), torch.from_numpy(scores.copy()))
    LogitsProcessors(GenerationConfig(repetition_penalty=2.0), prompt, mask).apply(scores, texts)
    np.testing.assert_array_equal(scores, expected.numpy())


def test_first_token_is_suppressed_after_a_forced_one():
    # as transformers: with a forced first token, "begin" is one token later
    wishes = {"forced_bos_token_id": 2, "begin_suppress_tokens": [3]}
    rules = LogitsProcessors(GenerationConfig(**wishes), np.zeros((1, 1), dtype=np.int64), None)
    first, second = np.ones((1, 5), dtype=np.float32), np.ones((1, 5), dtype=np.float32)
    rules.apply(first, np.array([[0]]))
    rules.apply(second, np.array([[0, 2]]))
    assert first[0].argmax() == 2
    assert np.isneginf(second[0]).tolist() == [False, False, False, True, False]


def test_new_tokens_end_with_the_first_end_token():
    rules = LogitsProcessors(GenerationConfig(eos=EOS), np.array([[1, 5]]), None)
    assert rules.new_tokens(np.array([1, 5, 2, 3, 5, 0, 1])) == [2, 3, 5]
    assert rules.new_tokens(np.array([1, 5, 2, 3])) == [2, 3]
    assert rules.is_eos(np.array([[0, 1], [5, 4]])).tolist() == [[False, True], [True, False]]
