"""Beam search gives what Hugging Face `generate` gives, token for token, on six kinds of models."""

from itertools import pairwise

import numpy as np
import pytest

from smelt.generation.backend import Batch
from smelt.generation.config import GenerationSettings
from smelt.generation.search import _top_k, generate
from smelt.runtimes.registry import open_runner
from tests.support.models import generation_models, tiny
from tests.support.pairs import matrix

KINDS = (*generation_models.SEQ2SEQ, *generation_models.CAUSAL)


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    runners_by_kind = {
        kind: generation_models.CausalRunner(generation_models.make_model(kind))
        for kind in generation_models.CAUSAL
    }
    for kind in generation_models.SEQ2SEQ:
        path = generation_models.write_model(kind, tmp_path_factory.mktemp(kind))
        runners_by_kind[kind] = open_runner(tiny.as_artifact(path))
    return runners_by_kind


@pytest.mark.parametrize("kind", KINDS if matrix.is_full_matrix() else ["marian", "t5", "llama"])
def test_beam_search_equals_generate(runners, kind):
    ended = differ = 0
    for number, (wishes, config) in enumerate(generation_models.BEAM_CASES):
        for batch_size in (1, 4):
            batch = generation_models.random_batch(
                batch_size, seed=10 * number + batch_size, left=kind in generation_models.CAUSAL
            )
            actual, expected = generation_models.compare_tokens(
                runners[kind], runners[kind].backend.model, batch, wishes, config
            )
            assert actual == expected, (wishes, config, batch_size)
            ended += sum(len(row) < 12 for row in actual)
            differ += len({tuple(row) for row in actual}) > 1
    assert ended >= 10, "hardly any text ended before the limit: the test shows nothing"
    assert differ >= 8, "every text gave the same tokens: the test shows nothing"


@pytest.mark.parametrize("early", [False, True])
def test_finished_sentences_leave_the_batch_and_are_kept_in_the_result(runners, early, monkeypatch):
    runner, batch_sizes = runners["bart"], []
    real = runner.decode_step
    monkeypatch.setattr(
        runner, "decode_step", lambda state, tokens: batch_sizes.append(len(tokens)) or real(state, tokens)
    )
    wishes, config = {"num_beams": 3, "early_stopping": early}, {"eos_token_id": [1, 5, 9, 11]}
    batch = generation_models.random_batch(17, seed=2)
    actual, expected = generation_models.compare_tokens(runner, runner.backend.model, batch, wishes, config)
    assert actual == expected
    assert batch_sizes[0] == 17  # all beams are the same at first
    assert batch_sizes[1:] == sorted(batch_sizes[1:], reverse=True)
    assert len(set(batch_sizes[1:])) >= 3, batch_sizes
    # two of 17 are an eighth: one that is settled waits for a second
    assert all(
        before - after >= 3 * max(1, before // 24)
        for before, after in pairwise(batch_sizes[1:])
        if after < before
    )


def test_sentence_has_the_same_output_alone_and_in_a_padded_batch(runners):
    for kind in KINDS:
        left_padded = kind in generation_models.CAUSAL
        full_batch = generation_models.random_batch(4, seed=5, left=left_padded)
        wishes = GenerationSettings(num_beams=3, max_new_tokens=8)
        together = generate(runners[kind], full_batch, wishes)
        for row in range(4):
            used_columns = full_batch.attention_mask[row].astype(bool)
            alone = Batch(
                full_batch.input_ids[row : row + 1, used_columns],
                full_batch.attention_mask[row : row + 1, used_columns],
            )
            assert generate(runners[kind], alone, wishes) == [together[row]]


def test_prompt_of_one_token_equals_a_start_token(runners):
    batch = Batch(np.array([[4], [9]]), np.ones((2, 1), dtype=np.int64))
    wishes = {"num_beams": 3, "forced_bos_token_id": 6, "max_new_tokens": 6}
    model = runners["llama"].backend.model
    actual, expected = generation_models.compare_tokens(runners["llama"], model, batch, wishes, {})
    assert actual == expected
    assert {row[0] for row in actual} == {6}


def test_best_orders_by_score_and_breaks_ties_by_position():
    scores = np.array([[1, 5, 5, 2, 5], [0, -1, -np.inf, 3, 2]], dtype=np.float32)
    assert _top_k(scores, 4).tolist() == [[1, 2, 4, 3], [3, 4, 0, 1]]
    assert _top_k(scores, 9).tolist() == [[1, 2, 4, 3, 0], [3, 4, 0, 1, 2]]


@pytest.mark.parametrize("width", [1290, 5000, 24])
def test_best_equals_a_full_sort(width):
    scores = np.random.default_rng(0).normal(size=(9, width)).astype(np.float32)
    scores[2, 700:] = -np.inf
    assert _top_k(scores, 8).tolist() == np.argsort(-scores, axis=1)[:, :8].tolist()
