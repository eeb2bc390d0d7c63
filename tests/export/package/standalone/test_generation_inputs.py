"""The rules that infer.py tells a graph are those that smelt tells it."""

import numpy as np
import pytest

from smelt.export.package import standalone_format
from smelt.export.package.standalone.generation_inputs import generation_inputs, new_tokens
from smelt.export.package.standalone.language_modeling import Writer
from smelt.generation.config import GenerationConfig
from smelt.generation.search import generation_feeds, trim_at_eos

pytestmark = pytest.mark.quick

VOCABULARY = 11
CASES = {
    "plain": {"max_new_tokens": 5}, "no limit": {}, "max_length": {"max_length": 9},
    "positions": {"max_new_tokens": 50, "positions": 8},
    "bad words, of which one ends a text": {"max_new_tokens": 3, "bad_words_ids": [[4], [2]]},
    "min_length": {"max_new_tokens": 6, "min_length": 5},
    "min_new_tokens": {"max_new_tokens": 6, "min_new_tokens": 2, "min_length": 1},
    "forced first": {"max_new_tokens": 4, "forced_bos_token_id": 7, "begin_suppress_tokens": [3]},
    "begin": {"max_new_tokens": 4, "begin_suppress_tokens": [3, 5]},
    "forced last": {"max_new_tokens": 4, "forced_eos_token_id": [6, 2], "min_length": 9},
    "forced and suppressed": {"max_new_tokens": 4, "forced_eos_token_id": [6, 2], "suppress_tokens": [2]},
    "one token, first and last": {"max_new_tokens": 1, "forced_bos_token_id": 7, "forced_eos_token_id": [2]},
    "texts": {"max_new_tokens": 4, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "beams": {"max_new_tokens": 4, "num_beams": 3, "length_penalty": 0.6, "early_stopping": True},
    "beams, never": {"max_new_tokens": 4, "num_beams": 3, "early_stopping": "never",
        "renormalize_logits": True},
    "beams, several forced": {"max_new_tokens": 3, "num_beams": 3, "forced_eos_token_id": [6, 2],
        "renormalize_logits": True},
    "no end": {"max_new_tokens": 3, "eos": [], "min_length": 5},
}  # fmt: skip


@pytest.mark.parametrize("prompt", [1, 4, 20])
@pytest.mark.parametrize("case", CASES)
def test_generation_inputs_equal_smelt_inputs(case, prompt):
    decoding = GenerationConfig(**({"eos": [2], "pad": 1, "start": 0 if prompt == 1 else None} | CASES[case]))
    expected = generation_feeds(decoding, prompt, VOCABULARY)
    settings = standalone_format.search_settings(decoding, VOCABULARY)
    inputs = generation_inputs(settings, prompt, decoding.max_total_length(prompt) - prompt)
    assert {name for name in inputs if name in expected} == set(expected)
    for name in set(expected) - {"step_rules", "rule_biases", "forced_tokens"}:
        assert inputs[name].dtype == expected[name].dtype, name
        np.testing.assert_array_equal(inputs[name], expected[name], err_msg=name)
    for name in ("rule_biases", "forced_tokens"):
        assert inputs[name].dtype == expected[name].dtype, name
        np.testing.assert_array_equal(
            inputs[name][inputs["step_rules"]], expected[name][expected["step_rules"]], err_msg=name
        )


def test_encoder_decoder_inputs_have_output_limit():
    settings = standalone_format.search_settings(
        GenerationConfig(max_new_tokens=50, positions=8, start=0, eos=[2]), VOCABULARY
    )
    assert settings["max_new_tokens"] == 8
    assert standalone_format.search_settings(GenerationConfig(start=0), VOCABULARY)["max_new_tokens"] == 128
    assert (
        standalone_format.search_settings(GenerationConfig(max_length=9), VOCABULARY)["max_new_tokens"]
        is None
    )


def test_sequence_ends_at_first_eos_token():
    row = np.array([0, 5, 2, 2, 6])
    for eos in ([2], [6, 2], [], [9]):
        assert new_tokens(row, 1, eos) == trim_at_eos(row, 1, eos)


@pytest.mark.parametrize("prompt", [1, 4, 20])
@pytest.mark.parametrize("case", CASES)
def test_packaged_writer_limits_equal_smelt(case, prompt):
    decoding = GenerationConfig(**({"eos": [2], "pad": 1} | CASES[case]))
    writer = object.__new__(Writer)
    writer.generation = standalone_format.search_settings(decoding, VOCABULARY)
    max_new, min_new, is_forced = decoding.prompt_limits(prompt)
    if writer.generation["min_new_tokens"] is not None:  # the same for all prompts
        min_new = writer.limits(prompt)[1]
    assert writer.limits(prompt) == (max_new, min_new, is_forced)
