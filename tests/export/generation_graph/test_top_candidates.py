"""The best candidates of a step of beam search, against sorting the scores of all tokens."""

from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from smelt.export.generation_graph.beam_search_graph import (
    BEAM_SEARCH_INPUTS,
    EXCLUDED_SCORE,
    BeamStep,
    BeamValues,
    _batch_values,
    _num_row_candidates,
    _search_values,
)
from smelt.export.generation_graph.graph_builder import GENERATION_INPUTS, GraphBuilder, value_info

VOCABULARY, BEAMS, SENTENCES = 9, 3, 2
CANDIDATES = 2 * BEAMS


def run_step(logits, scores, **changed):
    """Return scores and indices [B, K] of the candidates of a step."""
    b = GraphBuilder()
    search = _search_values(b, SimpleNamespace(shortlist_ids=None), VOCABULARY)
    now = BeamValues("texts", "scores", "", "", "")
    step = BeamStep(b, b.const(0), search, _batch_values(b, search, "texts"))
    by_sentence = b.op("Reshape", "logits", b.const([SENTENCES, -1, VOCABULARY]))
    names = list(step.top_candidates(by_sentence, now, None))
    feeds = {
        "logits": logits,
        "scores": scores,
        "texts": np.full((SENTENCES, BEAMS, 3), 8, np.int64),
        "eos_token_ids": np.array([1]),
        "step_rules": np.array([0]),
        "rule_biases": np.zeros((1, VOCABULARY), np.float32),
        "forced_tokens": np.array([-1]),
        "text_rules": np.array(False),
        "renormalize_logits": np.array(False),
        "num_beams": np.array(BEAMS),
        "max_new_tokens": np.array(5),
        "length_penalty": np.array(1.0),
        "early_stopping": np.array(False),
        "never_stop_early": np.array(False),
        "pad_token_id": np.array(0),
        "repetition_penalty": np.array(1, np.float32),
        "no_repeat_ngram_size": np.array(0),
        **changed,
    }
    inputs = [
        value_info(name, array.dtype, [None] * array.ndim)
        for name, array in feeds.items()
        if name in (GENERATION_INPUTS | BEAM_SEARCH_INPUTS | {"logits": 0, "scores": 0, "texts": 0})
    ]
    types = [np.float32, np.int64]
    outputs = [value_info(name, dtype, [None, None]) for name, dtype in zip(names, types, strict=True)]
    graph = b.graph("step", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(names, feeds)


def expected_candidates(logits, scores, biases):
    """Return scores and indices [B, K] by sorting all."""
    exact = logits.astype(np.float64)
    log_probabilities = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True)) + biases
    totals = log_probabilities.reshape(SENTENCES, -1, VOCABULARY) + scores[:, :, None]
    flat = totals.reshape(SENTENCES, -1)
    order = np.argsort(-flat, axis=1, kind="stable")[:, :CANDIDATES]
    return np.take_along_axis(flat, order, axis=1), order


@pytest.mark.parametrize("num_excluded", [0, 2, 5])
@pytest.mark.parametrize("is_first", [True, False])
def test_candidates_are_the_best_tokens_that_are_not_excluded(num_excluded, is_first):
    """The excluded tokens are the most likely ones; five leave fewer than are kept in the first step."""
    generator = np.random.default_rng(num_excluded)
    rows = SENTENCES * (1 if is_first else BEAMS)
    logits = generator.normal(size=(rows, VOCABULARY)).astype(np.float32)
    logits[:, :num_excluded] += 6
    biases = np.where(np.arange(VOCABULARY) < num_excluded, -np.inf, 0).astype(np.float32)
    scores = generator.normal(size=(SENTENCES, BEAMS)).astype(np.float32)
    if is_first:
        scores = np.tile(np.array([0, EXCLUDED_SCORE, EXCLUDED_SCORE], np.float32), (SENTENCES, 1))
    best, indices = run_step(logits, scores, rule_biases=biases[None])
    expected_best, expected_indices = expected_candidates(logits, scores, biases)
    np.testing.assert_allclose(best, expected_best, rtol=1e-5, atol=1e-5)
    is_unique = expected_best > EXCLUDED_SCORE / 2  # others differ by less than float32 resolves
    np.testing.assert_array_equal(indices[is_unique], expected_indices[is_unique])
    assert np.isin(indices % VOCABULARY, np.flatnonzero(biases == 0)).all()


def test_forced_token_is_the_only_candidate_of_each_text():
    biases = np.where(np.arange(VOCABULARY) == 7, 0, -np.inf).astype(np.float32)
    logits = np.random.default_rng(0).normal(size=(SENTENCES * BEAMS, VOCABULARY)).astype(np.float32)
    scores = np.array([[-1, -3, -2], [-3, -2, -1]], np.float32)
    best, indices = run_step(logits, scores, rule_biases=biases[None], forced_tokens=np.array([7]))
    np.testing.assert_array_equal(best[:, :BEAMS], np.sort(scores)[:, ::-1])
    np.testing.assert_array_equal(indices[:, :BEAMS], 7 + VOCABULARY * np.argsort(-scores, axis=1))


def test_forced_rules_do_not_raise_the_number_of_row_candidates():
    """Their rows exclude the whole vocabulary but one token: sorting so many takes ten times as long."""
    biases = np.zeros((3, VOCABULARY), np.float32)
    biases[0, 1:] = biases[1, :2] = -np.inf
    b = GraphBuilder()
    count = _num_row_candidates(b, b.const([CANDIDATES // 2]), VOCABULARY)
    feeds = {"rule_biases": biases, "forced_tokens": np.array([0, -1, -1])}
    inputs = [value_info(name, array.dtype, array.shape) for name, array in feeds.items()]
    graph = b.graph("count", inputs, [value_info(count, np.int64, [1])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    (result,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    assert result.tolist() == [CANDIDATES // 2 + 2]
