"""Rules inside a graph, against transformers' own processors of logits."""

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from smelt.export.generation_graph.graph_builder import (
    GENERATION_INPUTS,
    GraphBuilder,
    apply_history_rules,
    biases_with_forced_tokens,
    is_eos,
    prepare_rules,
    step_rule,
    value_info,
)

pytestmark = pytest.mark.quick

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
VOCABULARY = 7
NOTHING = np.zeros((1, VOCABULARY), np.float32)
PLAIN = {
    "max_new_tokens": 5, "eos_token_ids": [2], "pad_token_id": 0, "step_rules": [0], "rule_biases": NOTHING,
    "forced_tokens": [-1], "text_rules": True, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
}  # fmt: skip


def ran(make, outputs, **feeds):
    """Run what `make` puts into a graph with the inputs of the rules and those in `feeds`."""
    b = GraphBuilder()
    names = make(b)
    inputs = [value_info(n, dtype, [None] * len(shape)) for n, (dtype, shape) in GENERATION_INPUTS.items()]
    inputs += [
        value_info(n, v.dtype, [None] * v.ndim) for n, v in feeds.items() if n not in GENERATION_INPUTS
    ]
    found = [helper.make_tensor_value_info(n, kind, None) for n, kind in zip(names, outputs, strict=True)]
    graph = b.graph("rules", inputs, found)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    used = {n: np.asarray(v, GENERATION_INPUTS[n][0]) for n, v in PLAIN.items()}
    given = {
        n: np.asarray(v, GENERATION_INPUTS[n][0] if n in GENERATION_INPUTS else None)
        for n, v in feeds.items()
    }
    return session.run(None, used | given)


def changed(scores, texts, mask=None, **rules):
    def make(b):
        return [apply_history_rules(b, "scores", "texts", None if mask is None else "mask")]

    masks = {} if mask is None else {"mask": mask}
    return ran(make, [FLOAT], scores=scores, texts=texts, **masks, **rules)[0]


@pytest.fixture
def scores():
    return np.random.default_rng(0).normal(size=(3, VOCABULARY)).astype(np.float32)


TEXTS = np.array([[1, 3, 4, 1, 3], [5, 5, 5, 5, 5], [6, 2, 1, 6, 3]])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_ngrams_are_forbidden_as_transformers_forbids_them(scores, size):
    expected = NoRepeatNGramLogitsProcessor(size)(torch.tensor(TEXTS), torch.tensor(scores)).numpy()
    assert np.isinf(expected).any() == (size < 6)
    np.testing.assert_array_equal(changed(scores, TEXTS, no_repeat_ngram_size=size), expected)


def test_no_ngram_is_forbidden_when_its_size_is_zero(scores):
    np.testing.assert_array_equal(changed(scores, TEXTS), scores)


def test_repetition_costs_what_it_costs_in_transformers(scores):
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(TEXTS), torch.tensor(scores)).numpy()
    assert (expected != scores).any()
    np.testing.assert_array_equal(changed(scores, TEXTS, repetition_penalty=1.7), expected)


def test_repetition_does_not_count_padding(scores):
    padded = np.array([[0, 0, 4, 1, 3], [5, 5, 5, 5, 5], [0, 2, 1, 6, 3]])
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    got = changed(scores, padded, mask, repetition_penalty=1.7)
    assert (got[[0, 2], 0] == scores[[0, 2], 0]).all()
    assert got[0, 4] != scores[0, 4]


def of_step(b, step):
    rule = step_rule(b, prepare_rules(b, VOCABULARY), b.const(step))
    return [rule.biases, rule.forced_token(b)]


def test_each_step_has_its_own_row_and_the_last_one_goes_on():
    rows = np.arange(3 * VOCABULARY, dtype=np.float32).reshape(3, VOCABULARY)
    for step, row in ((0, 2), (1, 0), (2, 1), (3, 1), (9, 1)):
        rules = {"step_rules": [2, 0, 1], "rule_biases": rows, "forced_tokens": [-1, 4, 5]}
        got, forced = ran(lambda b, s=step: of_step(b, s), [FLOAT, INT64], **rules)
        np.testing.assert_array_equal(got, rows[row])
        assert forced == [-1, 4, 5][row]


def test_a_row_that_forces_a_token_hides_all_others():
    rows = np.arange(3 * VOCABULARY, dtype=np.float32).reshape(3, VOCABULARY)
    rules = {"step_rules": [0], "rule_biases": rows, "forced_tokens": [-1, 4, 0]}
    (got,) = ran(lambda b: [biases_with_forced_tokens(b, VOCABULARY)], [FLOAT], **rules)
    hidden = np.full(VOCABULARY, -np.inf)
    np.testing.assert_array_equal(got[0], rows[0])
    for row, token in ((1, 4), (2, 0)):
        np.testing.assert_array_equal(got[row], np.where(np.arange(VOCABULARY) == token, 0, hidden))


@pytest.mark.parametrize(("eos", "known"), [([4, 2], [4, 2]), ([-1], []), ([4, 4, 99], [4])])
def test_a_token_ends_a_text_when_it_is_among_those_that_do(eos, known):
    tokens = np.array([[1, 2], [4, VOCABULARY - 1]])
    (got,) = ran(
        lambda b: [is_eos(b, prepare_rules(b, VOCABULARY), "tokens")],
        [BOOL],
        tokens=tokens,
        eos_token_ids=eos,
    )
    np.testing.assert_array_equal(got, np.isin(tokens, known))
