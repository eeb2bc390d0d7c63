"""Sampling: the filters are those of transformers, the draws have the probabilities that are left."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from smelt.core.errors import RunError
from smelt.generation.config import GenerationSettings
from smelt.generation.logits_processors import filter_logits, sample_tokens
from smelt.generation.search import generate
from tests.support.expected_errors import raises_code
from tests.support.models import generation_models

pytestmark = pytest.mark.quick


def warped(scores, temperature, top_k, top_p):
    warpers = LogitsProcessorList()
    if temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers(None, torch.from_numpy(scores.copy())).numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_filtered_scores_equal_the_transformers_warpers(temperature, top_k, top_p):
    scores = np.random.default_rng(0).normal(0, 3, (16, 200)).astype(np.float32)
    scores[3, ::2] = -np.inf
    scores[4, :7] = scores[4, 7]  # ties
    expected = warped(scores, temperature, top_k, top_p)
    filter_logits(scores, temperature, top_k, top_p)
    np.testing.assert_allclose(scores, expected, rtol=1e-6)


def test_samples_have_the_probabilities_of_the_scores():
    probabilities = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    with np.errstate(divide="ignore"):
        scores = np.repeat(np.log(probabilities, dtype=np.float32)[None], 40_000, axis=0)
    tokens = sample_tokens(scores, np.random.default_rng(1))
    frequencies = np.bincount(tokens, minlength=5) / len(tokens)
    assert frequencies[1] == 0
    np.testing.assert_allclose(frequencies, probabilities, atol=4 * np.sqrt(0.25 / len(tokens)))


def test_sample_of_a_row_is_independent_of_other_rows():
    scores = np.random.default_rng(0).normal(0, 2, (5, 30)).astype(np.float32)
    other = scores.copy()
    other[1:] = np.roll(other[1:], 3, axis=1)
    first = sample_tokens(scores, np.random.default_rng(7))
    assert sample_tokens(other, np.random.default_rng(7))[0] == first[0]


def test_empty_distribution_is_an_error():
    with raises_code("no-allowed-token", RunError):
        sample_tokens(np.full((2, 3), -np.inf, dtype=np.float32), np.random.default_rng(0))


@pytest.fixture(scope="module")
def runner():
    return generation_models.CausalRunner(generation_models.make_model("llama"))


def test_seed_determines_the_text_and_batches_use_different_random_numbers(runner):
    batch = generation_models.random_batch(4, seed=0, left=True)
    wishes = GenerationSettings(do_sample=True, temperature=1.5, max_new_tokens=10, seed=3)
    first = generate(runner, batch, wishes)
    assert generate(runner, batch, wishes) == first
    other, later = wishes.model_copy(update={"seed": 4}), generate(runner, batch, wishes, part=1)
    assert generate(runner, batch, other) != first
    assert generate(runner, batch, wishes, part=1) == later != first
    assert generate(runner, batch, other) != later  # streams of their own, not one that goes on


def test_top_1_sampling_equals_greedy_search(runner):
    batch = generation_models.random_batch(4, seed=1, left=True)
    greedy = generate(runner, batch, GenerationSettings(max_new_tokens=10))
    for wishes in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        sampled = GenerationSettings(do_sample=True, max_new_tokens=10, **wishes)
        assert generate(runner, batch, sampled) == greedy


def test_first_token_frequencies_equal_model_probabilities(runner):
    prompt = generation_models.random_batch(1, seed=2, left=True)
    many = type(prompt)(
        np.repeat(prompt.input_ids, 4000, axis=0), np.repeat(prompt.attention_mask, 4000, axis=0)
    )
    with torch.inference_mode():
        logits = runner.backend.model(torch.from_numpy(prompt.input_ids)).logits[:, -1].numpy()
    probabilities = torch.softmax(torch.from_numpy(warped(logits, 2.0, 6, 0.95)), dim=-1)[0].numpy()
    assert (probabilities > 0.02).sum() >= 3, "the model is too sure: the test shows nothing"
    wishes = GenerationSettings(do_sample=True, temperature=2.0, top_k=6, top_p=0.95, max_new_tokens=1)
    first_tokens = [row[0] for row in generate(runner, many, wishes)]
    frequencies = np.bincount(first_tokens, minlength=len(probabilities)) / len(first_tokens)
    np.testing.assert_allclose(frequencies, probabilities, atol=4 * np.sqrt(0.25 / len(first_tokens)))


def test_unset_settings_come_from_the_generation_config(runner):
    batch = generation_models.random_batch(3, seed=1, left=True)
    settings = GenerationSettings(do_sample=True, max_new_tokens=6, temperature=0.7, top_k=4, top_p=0.8)
    expected = generate(runner, batch, settings)
    runner.generation_config.update({"temperature": 0.7, "top_k": 4, "top_p": 0.8})
    assert generate(runner, batch, GenerationSettings(do_sample=True, max_new_tokens=6)) == expected
    for name in ("temperature", "top_k", "top_p"):
        del runner.generation_config[name]
