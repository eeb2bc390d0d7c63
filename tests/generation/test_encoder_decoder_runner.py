"""What an encoder and a decoder are fed and what beams share, seen by a backend that notes every call."""

from pathlib import Path

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.generation.backend import Batch
from smelt.generation.config import make_shortlist, write_shortlist
from smelt.generation.generating_runners import EncoderDecoderRunner
from smelt.generation.runner import ModelFiles
from smelt.generation.search import generate_resolved
from tests.support.expected_errors import raises_code

BATCH = Batch(np.array([[7, 8, 9], [3, 4, 0]]), np.array([[1, 1, 1], [1, 1, 0]]))


class Noting:
    """A backend that notes what it is asked for."""

    name, version, device = "noting", "1", "cpu"
    max_tokens_per_call, max_total_tokens = 16, 9

    def __init__(self):
        self.asked = []

    def call(self, graph, feeds):
        self.asked.append((graph, sorted(feeds)))
        return {"last_hidden_state": feeds["input_ids"]}

    def start(self, rows, feeds, shared):
        self.asked.append((rows, {n: v.tolist() for n, v in (feeds | shared).items()}))
        return "held"

    def step(self, held, feeds):
        assert held == "held"
        self.asked.append({name: values.tolist() for name, values in feeds.items()})
        return np.zeros((len(feeds["input_ids"]), 5), np.float32)

    def reorder_cache(self, held, rows, shared):
        assert held == "held"
        self.asked.append((rows.tolist(), shared))


@pytest.fixture
def model():
    config = {"max_position_embeddings": 40}
    return EncoderDecoderRunner(ModelFiles(Path("m"), config, {}), Noting(), generate_resolved)


def test_source_is_encoded_once_and_every_step_feeds_one_token(model):
    state = model.encode(BATCH)
    source, mask = [[7, 8, 9], [3, 4, 0]], [[1, 1, 1], [1, 1, 0]]
    feeds = {"input_ids": source, "attention_mask": mask, "encoder_attention_mask": mask}
    assert model.backend.asked == [(2, feeds)]
    assert model.decode_step(state, np.array([5, 6])).shape == (2, 5)
    assert model.backend.asked[1] == {"input_ids": [[5], [6]]}


def test_state_shared_by_beams_is_reordered_only_if_sentences_move(model):
    state = model.encode(BATCH)
    for rows in ([0, 0, 1, 1], [1, 0, 3, 3], [0, 1, 2, 3], [2, 3], [1, 1], [0, 1]):
        state = model.reorder_cache(state, np.array(rows))
    assert model.backend.asked[1:] == [
        ([0, 0, 1, 1], True),  # two beams of each sentence
        ([1, 0, 3, 3], False),  # beams of a sentence change places
        ([2, 3], True),  # the first sentence leaves
        ([1, 1], False),  # both rows are of the other one
    ]
    assert state.batch_rows.tolist() == [1, 1]


def test_encoder_outputs_equal_graph_outputs(model):
    assert model.encoder_outputs(BATCH)["last_hidden_state"] is BATCH.input_ids
    assert model.backend.asked == [("encoder_model", ["attention_mask", "input_ids"])]


def test_source_is_truncated_at_the_call_limit_and_output_at_the_model_limit(model):
    assert model.text._most == 16
    assert model.config["max_position_embeddings"] == 40


def test_generating_model_is_not_a_classifier(model):
    with raises_code("does-not-classify", InputError):
        model.forward(BATCH)


def test_tokens_outside_the_shortlist_are_never_generated_after_reordering(tmp_path):
    config = {"vocab_size": 10, "decoder_vocab_size": 5}
    table = np.zeros((10, 1), dtype=np.int64)
    table[[7, 8, 9, 3, 4], 0] = [1, 1, 2, 3, 3]
    write_shortlist(make_shortlist(table, np.array([0, 4]), 5), tmp_path)
    model = EncoderDecoderRunner(ModelFiles(tmp_path, config, {}), Noting(), generate_resolved)
    state = model.encode(BATCH)
    first = [0, 0, 0, -np.inf, 0]
    second = [0, -np.inf, -np.inf, 0, 0]
    assert model.decode_step(state, np.array([5, 6])).tolist() == [first, second]
    state = model.reorder_cache(state, np.array([0, 0, 1, 1]))
    assert model.decode_step(state, np.array([1, 2, 3, 4])).tolist() == [first, first, second, second]
    state = model.reorder_cache(state, np.array([3]))
    assert model.decode_step(state, np.array([1])).tolist() == [second]
