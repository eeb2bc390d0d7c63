"""What a decoder-only model is fed, seen by a backend that notes every call."""

from pathlib import Path

import numpy as np
import pytest

from smelt.core.errors import InputError, RunError
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationConfig
from smelt.generation.generating_runners import DecoderOnlyRunner, prefill
from smelt.generation.runner import ModelFiles
from smelt.generation.search import generate_resolved
from tests.support.expected_errors import raises_code

VOCABULARY = 5


class Noting:
    """A backend whose logits at a token are the sum of what its row was fed up to there.

    gives_all: logits of all tokens come, however few are wanted.
    """

    name, version, device, reduces_logits = "noting", "1", "cpu", False

    def __init__(self, at_once=None, in_all=None, gives_all=False):
        self.max_tokens_per_call, self.max_total_tokens, self.gives_all = at_once, in_all, gives_all
        self.fed, self.moved, self.fails = [], [], False

    def start(self, rows):
        return {"sums": np.zeros(rows)}

    def step(self, held, feeds, last):
        if self.fails:
            raise RunError("the device failed")
        self.fed.append({name: values.tolist() for name, values in feeds.items()} | {"last": last})
        ids = feeds["input_ids"]
        tokens = ids * feeds["attention_mask"][:, -ids.shape[1] :]
        sums = held["sums"][:, None] + tokens.cumsum(axis=1)
        held["sums"] = sums[:, -1]
        logits = np.repeat(sums[:, :, None], VOCABULARY, axis=2).astype(np.float32)
        return logits if self.gives_all else logits[:, ids.shape[1] - max(1, last) :]

    def reorder_cache(self, held, rows, shared):
        self.moved.append((rows.tolist(), shared))
        held["sums"] = held["sums"][rows]


def runner(**limits):
    config = {"max_position_embeddings": 40, "model_type": "llama"}
    return DecoderOnlyRunner(ModelFiles(Path("m"), config, {}), Noting(**limits), generate_resolved)


LEFT = Batch(np.array([[7, 8, 9], [0, 3, 4]]), np.array([[1, 1, 1], [0, 1, 1]]))


@pytest.mark.parametrize("at_once", [True, False])
def test_prefill_with_or_without_last_token_gives_the_same_output(at_once):
    model = runner()
    state, logits = prefill(model, LEFT, LEFT.input_ids, at_once)
    assert logits[:, 0].tolist() == [24, 7]
    assert [(np.shape(call["input_ids"]), call["last"]) for call in model.backend.fed] == (
        [((2, 3), 1)] if at_once else [((2, 2), 0), ((2, 1), 1)]
    )
    assert state.mask.tolist() == LEFT.attention_mask.tolist()
    assert model.decode_step(state, np.array([1, 2]))[:, 0].tolist() == [25, 9]


@pytest.mark.parametrize("beams", [1, 2])
def test_both_searches_prefill_prompts_as_configured(beams):
    for at_once, first in ((True, (2, 3)), (False, (2, 2))):
        model = runner()
        generate_resolved(model, LEFT, GenerationConfig(num_beams=beams, max_new_tokens=3), 0, at_once)
        assert np.shape(model.backend.fed[0]["input_ids"]) == first


def test_prefill_excludes_last_token_and_positions_follow_the_mask():
    model = runner()
    state = model.encode(LEFT)
    assert model.backend.fed == [
        {
            "input_ids": [[7, 8], [0, 3]],
            "attention_mask": [[1, 1], [0, 1]],
            "position_ids": [[0, 1], [0, 0]],
            "last": 0,  # nobody looks at a prompt's logits
        }
    ]
    logits = model.decode_step(state, np.array([9, 4]))
    assert model.backend.fed[1] == {
        "input_ids": [[9], [4]],
        "attention_mask": [[1, 1, 1], [0, 1, 1]],
        "position_ids": [[2], [1]],
        "last": 1,
    }
    assert logits.tolist() == [[24.0] * VOCABULARY, [7.0] * VOCABULARY]


def test_one_token_prompt_has_no_prefill():
    model = runner()
    state = model.encode(Batch(LEFT.input_ids[:, -1:], LEFT.attention_mask[:, -1:]))
    assert model.backend.fed == []
    assert model.decode_step(state, np.array([9, 4]))[:, 0].tolist() == [9, 4]
    assert model.backend.fed[0]["position_ids"] == [[0], [0]]


@pytest.mark.parametrize("gives_all", [False, True])
@pytest.mark.parametrize(("at_once", "last", "wanted"), [
    (None, 0, [(11, 11)]), (None, 3, [(11, 3)]), (4, 0, [(4, 4), (4, 4), (3, 3)]),
    (4, 2, [(4, 0), (4, 0), (3, 2)]), (4, 5, [(4, 0), (4, 2), (3, 3)]), (4, 3, [(4, 0), (4, 0), (3, 3)]),
])  # fmt: skip
def test_long_text_is_processed_in_chunks(at_once, last, wanted, gives_all):
    model = runner(at_once=at_once, gives_all=gives_all)
    ids = np.arange(1, 12)[None]
    logits = model.extend(model.start(1), ids, np.ones_like(ids), last)
    assert [(len(call["input_ids"][0]), call["last"]) for call in model.backend.fed] == wanted
    assert [len(call["attention_mask"][0]) for call in model.backend.fed][-1] == 11
    assert [position for call in model.backend.fed for position in call["position_ids"][0]] == list(range(11))
    assert logits[0, :, 0].tolist() == np.cumsum(ids[0])[-last:].tolist()


def test_long_prompt_is_prefilled_in_chunks():
    model = runner(at_once=2)
    ids = np.arange(1, 7)[None]
    state = model.encode(Batch(ids, np.ones_like(ids)))
    assert [call["input_ids"] for call in model.backend.fed] == [[[1, 2]], [[3, 4]], [[5]]]
    assert model.decode_step(state, np.array([6]))[0, 0] == 21


def test_forward_returns_logits_of_all_tokens_with_right_padding():
    model = runner()
    batch = Batch(np.array([[7, 8, 9], [3, 4, 0]]), np.array([[1, 1, 1], [1, 1, 0]]))
    assert model.forward(batch)[:, :, 0].tolist() == [[7, 15, 24], [3, 7, 7]]
    assert model.backend.fed[0]["position_ids"] == [[0, 1, 2], [0, 1, 0]]


def test_mask_is_reordered_with_the_rows():
    model = runner()
    state = model.encode(LEFT)
    state = model.reorder_cache(state, np.array([1, 1, 0]))
    logits = model.decode_step(state, np.array([1, 2, 3]))
    assert model.backend.moved == [([1, 1, 0], True)]
    assert model.backend.fed[-1]["attention_mask"] == [[0, 1, 1], [0, 1, 1], [1, 1, 1]]
    assert logits[:, 0].tolist() == [4, 5, 18]


def test_backend_is_not_called_if_no_row_moves():
    model = runner()
    state = model.encode(LEFT)
    assert model.reorder_cache(state, np.arange(2)) is state
    assert model.backend.moved == []
    model.reorder_cache(state, np.arange(1))  # a row that leaves is a move
    assert model.backend.moved == [([0], True)]


def test_state_is_unchanged_if_a_call_fails():
    model = runner()
    state = model.encode(LEFT)
    model.backend.fails = True
    with pytest.raises(RunError):
        model.decode_step(state, np.array([9, 4]))
    model.backend.fails = False
    model.decode_step(state, np.array([9, 4]))
    assert model.backend.fed[-1]["attention_mask"] == [[1, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize(("in_all", "expected"), [(None, 40), (17, 17), (64, 40)])
def test_maximum_text_length_is_the_minimum_of_model_and_backend(in_all, expected):
    model = runner(at_once=4, in_all=in_all)
    assert model.config["max_position_embeddings"] == expected
    assert model.text._most > 40  # what is longer than a call takes is fed in pieces, not cut


def test_language_model_has_no_encoder():
    assert DecoderOnlyRunner.graphs.encoder is None
    assert DecoderOnlyRunner.graphs.uses_cache
    with raises_code("does-not-classify", InputError):
        super(DecoderOnlyRunner, runner()).forward(LEFT)
