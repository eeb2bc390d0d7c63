"""Caches that grow in place say what caches that are copied say, bit for bit."""

from itertools import pairwise

import numpy as np
import pytest

from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.backend import Batch
from smelt.runtimes.onnx_backend import grow_cache
from smelt.runtimes.registry import open_folder
from tests.support import harness
from tests.support.graphs import counting_graphs as graphs
from tests.support.graphs import exported_artifacts
from tests.support.models import causal, every_family
from tests.support.shared_folders import make_once

IDS = np.random.default_rng(0).integers(5, 60, (3, 9))
MASK = np.ones_like(IDS)
MASK[1, :4] = MASK[2, :8] = 0


def mistral(home):
    """Attention that sees six tokens."""
    folder = every_family.write_model(home / "m", "mistral")
    harness.run_stage(Onnx(), OnnxSettings(generation_graph=False), folder, home / "out", "language-modeling")


def folder_of(kind):
    if kind == "mistral":
        return make_once("in-place-mistral", lambda home: (home.mkdir(), mistral(home))) / "out"
    return exported_artifacts.exported_artifact(kind)


def opened(folder, in_place):
    runner = open_folder(folder, "onnx", "ort-cpu", 1)
    runner.backend._session("model")
    assert runner.backend._in_place
    runner.backend._in_place = in_place
    return runner


def places(state):
    return [cache.data_ptr() for cache in state.backend_state.caches]


@pytest.fixture(params=["writer", "gpt2", "int8-caches", "mistral"])
def both(request):
    folder = folder_of(request.param)
    with opened(folder, True) as ours, opened(folder, False) as theirs:
        yield ours, theirs


def test_steps_behind_a_padded_prompt_give_the_same_bits_and_stay_where_they_are(both):
    states = [runner.encode(Batch(IDS, MASK)) for runner in both]
    lain, rng = [], np.random.default_rng(1)
    for count in range(45):  # more than there is room for at once
        if count in (5, 30):  # rows change places, become more and fewer, as in a beam search
            rows = np.array([2, 0, 0, 1]) if count == 5 else np.array([3, 1])
            states = [one.reorder_cache(state, rows) for one, state in zip(both, states, strict=True)]
        tokens = rng.integers(5, 60, len(states[0].mask))
        ours, theirs = (one.decode_step(state, tokens) for one, state in zip(both, states, strict=True))
        assert np.array_equal(ours, theirs)
        lain.append(places(states[0]))
    for ours, theirs in zip(*(state.backend_state.caches for state in states), strict=True):
        used = states[0].backend_state.cache_length
        assert theirs.shape()[2] == used < ours.shape()[2]
        assert np.array_equal(ours.numpy()[:, :, :used], theirs.numpy())
    moved = sum(a != b for a, b in pairwise(lain))
    assert moved <= 6  # two changes of rows, and buffers that were full


def test_a_long_text_in_stretches_gives_the_same_bits(both):
    states = [runner.start(1) for runner in both]
    for length, last in ((1, 0), (7, 1), (1, 1), (20, 0), (5, 2), (1, 1)):
        ids = np.random.default_rng(length).integers(5, 60, (1, length))
        ours, theirs = (
            one.extend(state, ids, np.ones_like(ids), last) for one, state in zip(both, states, strict=True)
        )
        assert np.array_equal(ours, theirs)


def test_attention_that_is_not_fused_is_found_out_and_nothing_is_printed(tmp_path, capfd):
    shape = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = causal.write_model(tmp_path / "m", "llama", **shape)
    harness.run_stage(Onnx(), OnnxSettings(), folder, tmp_path / "out", "language-modeling")
    capfd.readouterr()
    with open_folder(tmp_path / "out", "onnx", "ort-cpu", 1) as runner:
        assert not runner.backend.prefers_stepwise
        runner.decode_step(runner.encode(Batch(IDS, MASK)), IDS[:, 0])
        assert not runner.backend._in_place
    assert capfd.readouterr() == ("", "")


def test_a_graph_that_carries_its_caches_on_as_they_are_is_found_out(tmp_path):
    folder = graphs.language_model(tmp_path, [("past_key_values.0.key", "present.0.key")])
    with open_folder(folder, "onnx", "ort-cpu", 1) as runner:
        assert not runner.backend._in_place


def test_long_prompts_of_fused_attention_are_continued_in_steps():
    for kind, faster in (("writer", True), ("int8-caches", True), ("translator", False)):
        with open_folder(exported_artifacts.exported_artifact(kind), "onnx", "ort-cpu", 1) as runner:
            assert runner.backend.prefers_stepwise is faster


def test_logits_of_a_step_are_not_those_of_the_next():
    with opened(exported_artifacts.exported_artifact("writer"), True) as runner:
        state = runner.encode(Batch(IDS, MASK))
        first = runner.decode_step(state, IDS[:, 0])
        kept = first.copy()
        runner.decode_step(state, IDS[:, 1])
    assert np.array_equal(first, kept)


def test_room_is_for_more_than_is_needed_and_holds_what_was_there():
    cache = np.arange(24, dtype=np.float32).reshape(1, 2, 4, 3)
    made = grow_cache(cache, 3, 400)
    assert made.shape == (1, 2, 450, 3)
    assert np.array_equal(made[:, :, :3], cache[:, :, :3])
    assert not made[:, :, 3:].any()
