import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationSettings, resolve_generation
from smelt.generation.search import run_generation_graph
from smelt.runtimes import onnx_backend
from smelt.runtimes.registry import open_folder
from tests.support.expected_errors import raises_code
from tests.support.graphs import counting_graphs as graphs
from tests.support.graphs import exported_artifacts
from tests.support.graphs.counting_graphs import (
    BATCH,
    assert_explains_broken_graph,
    assert_rejects_other_encoder,
    assert_reorders_rows,
    language_model,
)


def opened(folder):
    return open_folder(folder, "onnx", "ort-cpu", 1)


@pytest.fixture
def counting(tmp_path):
    return graphs.token_sum_decoder(tmp_path)


def test_caches_are_passed_between_steps_and_two_states_do_not_mix(counting):
    with opened(counting) as runner:
        first, second = runner.encode(BATCH), runner.encode(BATCH)
        sums = [runner.decode_step(first, np.array(t)) for t in ([1, 10], [2, 20], [3, 30])]
        other = runner.decode_step(second, np.array([7, 70]))
    assert [s.tolist() for s in sums] == [[[1, 6], [10, 9]], [[3, 6], [30, 9]], [[6, 6], [60, 9]]]
    assert other.tolist() == [[7, 6], [70, 9]]
    assert sums[0].dtype == np.float32
    assert sums[0].flags.writeable


def test_reorder_moves_rows_but_not_shared_values(counting):
    assert_reorders_rows(counting, opened)


def test_reorder_without_change_copies_nothing(counting):
    with opened(counting) as runner:
        state = runner.encode(BATCH)
        runner.decode_step(state, np.array([1, 10]))
        before = list(state.backend_state.caches)
        state = runner.reorder_cache(state, np.arange(2))
        assert before
        assert all(after is value for after, value in zip(state.backend_state.caches, before, strict=True))


def test_text_generator_does_not_classify(counting):
    with opened(counting) as runner, raises_code("does-not-classify", InputError):
        runner.forward(BATCH)


def test_corrupt_missing_and_mismatched_graphs_are_explained(counting):
    assert_explains_broken_graph(counting, opened, "ONNX Runtime")


def test_encoder_of_another_model_is_refused(counting):
    assert_rejects_other_encoder(counting, opened)


def test_closed_model_raises_an_error(counting):
    with opened(counting) as runner:
        state = runner.encode(BATCH)
    with raises_code("closed-model", InputError):
        runner.decode_step(state, np.array([0] * len(BATCH.input_ids)))
    with raises_code("closed-model", InputError):
        runner.encode(BATCH)
    with raises_code("closed-model", InputError):
        runner.encoder_outputs(BATCH)


def test_language_model_without_cache_outputs_is_refused(tmp_path):
    with raises_code("missing-cache", InputError) as caught:
        opened(language_model(tmp_path, []))
    assert "model.onnx" in str(caught.value)
    key, other = ("past_key_values.0.key", "present.0.key"), ("past_key_values.1.key", "present.2.key")
    with raises_code("mismatched-graphs", InputError) as caught:
        opened(language_model(tmp_path, [key, other]))
    assert "past_key_values.1.key, past_key_values.2.key" in str(caught.value)
    with opened(language_model(tmp_path, [key])) as runner:
        assert runner.decode_step(runner.start(2), np.array([5, 6])).tolist() == [[5], [6]]


def test_several_tokens_with_a_cache_are_refused_for_several_rows(tmp_path):
    folder, ids = language_model(tmp_path, [("past_key_values.0.key", "present.0.key")]), np.ones((2, 2), int)
    with opened(folder) as runner:
        state = runner.start(2)
        assert runner.extend(state, ids, ids).shape == (2, 2, 1)
        with raises_code("unsupported-batch", InputError):
            runner.extend(state, ids, ids)
        alone = runner.start(1)
        for _ in range(2):
            assert runner.extend(alone, ids[:1], ids[:1]).shape == (1, 2, 1)
    with open_folder(folder, "onnx", "tensorrt", 1) as runner:  # whose attention is not fused
        state = runner.start(2)
        for _ in range(2):
            assert runner.extend(state, ids, ids).shape == (2, 2, 1)


SEARCHES = {"greedy": {}, "num_beams": {"num_beams": 3}, "sampling": {"do_sample": True, "seed": 3}}
PROMPT = Batch(np.array([[5, 17, 92, 33]]), np.ones((1, 4), np.int64))


def search(runner, kind):
    return runner.generator(
        runner, PROMPT, resolve_generation(GenerationSettings(max_new_tokens=6, **SEARCHES[kind]), runner)
    )


@pytest.fixture
def writer():
    with opened(exported_artifacts.exported_artifact("writer")) as runner:
        yield runner


def test_small_models_keep_one_graph_open_per_search(writer):
    for kind in SEARCHES:
        search(writer, kind)
    assert set(writer.backend._sessions) == {"generate", "generate_beams", "model"}


@pytest.mark.parametrize("first", SEARCHES)
def test_large_weights_are_packed_once_for_one_search_and_per_step_for_several(first, monkeypatch):
    with opened(exported_artifacts.exported_artifact("writer")) as runner:
        expected = {kind: search(runner, kind) for kind in SEARCHES}
    monkeypatch.setattr(onnx_backend, "_LARGE_GRAPH_BYTES", 1)
    with opened(exported_artifacts.exported_artifact("writer")) as runner:
        assert search(runner, first) == expected[first]
        expected_graph = {"greedy": "generate", "num_beams": "generate_beams", "sampling": "model"}[first]
        assert list(runner.backend._sessions) == [expected_graph]
        for graph in ("generate", "generate_beams"):
            with runner.backend.acquire_graph(graph) as promised:
                assert promised == (graph == expected_graph)
        for kind in (*SEARCHES, first):
            assert search(runner, kind) == expected[kind]
        assert list(runner.backend._sessions) == ["model"]


def test_large_graph_called_by_name_is_open_only_for_that_call(monkeypatch):
    monkeypatch.setattr(onnx_backend, "_LARGE_GRAPH_BYTES", 1)
    with opened(exported_artifacts.exported_artifact("writer")) as runner:
        greedy, ids = search(runner, "greedy"), {"input_ids": PROMPT.input_ids}
        feeds = {**ids, "attention_mask": PROMPT.attention_mask, "max_new_tokens": np.array(6)}
        for opens_steps in (False, True):
            if opens_steps:
                search(runner, "sampling")
            before = list(runner.backend._sessions)
            outputs = {name: runner.backend.call(name, feeds) for name in ("generate", "generate_beams")}
            assert outputs["generate"]["sequences"][0, 4:].tolist() == greedy[0]
            assert list(runner.backend._sessions) == before


class Alive:
    """Counts the sessions of a backend: those that are alive, their peak, and all that were opened."""

    def __init__(self, backend, delays):
        self.now, self.peak, self.opened, self.begun = Counter(), Counter(), Counter(), Event()
        self._open, self._delays = backend._open, delays
        backend._open = self._counted

    def _counted(self, graph):
        session = self._open(graph)
        self.now[graph.name] += 1
        self.opened[graph.name] += 1
        self.peak["all"] = max(self.peak["all"], self.now.total())
        weakref.finalize(session, self.now.subtract, [graph.name])
        if delay := self._delays.get(graph.name):
            self.begun.set()
            time.sleep(delay)
        return session


def test_large_graph_is_freed_before_step_graphs_are_opened(monkeypatch):
    monkeypatch.setattr(onnx_backend, "_LARGE_GRAPH_BYTES", 1)
    with opened(exported_artifacts.exported_artifact("writer")) as runner:
        alive = Alive(runner.backend, {})
        for kind in SEARCHES:
            search(runner, kind)
        assert alive.opened == {"generate": 1, "model": 1}
        assert alive.peak["all"] == 1


@pytest.mark.parametrize("warm", [False, True])
def test_threads_with_different_searches_open_no_extra_copy_of_large_weights(warm, monkeypatch):
    with opened(exported_artifacts.exported_artifact("writer")) as runner:
        expected = {kind: search(runner, kind) for kind in SEARCHES}
    monkeypatch.setattr(onnx_backend, "_LARGE_GRAPH_BYTES", 1)
    with opened(exported_artifacts.exported_artifact("writer")) as runner, ThreadPoolExecutor(9) as pool:
        slow = ["model"] if warm else ["generate", "generate_beams", "model"]
        alive = Alive(runner.backend, dict.fromkeys(slow, 0.2))
        kinds = [*SEARCHES] * 3
        if warm:
            search(runner, "greedy")
            kinds, first = ["greedy"] * 8, pool.submit(search, runner, "sampling")
            assert alive.begun.wait(60)
        outputs = [*pool.map(lambda kind: search(runner, kind), kinds)]
        assert outputs == [expected[kind] for kind in kinds]
        assert not warm or first.result() == expected["sampling"]
        assert alive.peak["all"] <= 2  # what was promised ends while the steps are opened
        assert max(alive.opened.values()) == 1
        assert list(runner.backend._sessions) == ["model"]


def test_reserved_graph_is_open_until_its_call_ends(monkeypatch):
    monkeypatch.setattr(onnx_backend, "_LARGE_GRAPH_BYTES", 1)
    with opened(exported_artifacts.exported_artifact("writer")) as runner:
        alive = Alive(runner.backend, {})
        with runner.backend.acquire_graph("generate") as promised:
            sampled = search(runner, "sampling")
            assert list(runner.backend._sessions) == ["model"]
            greedy = run_generation_graph(
                runner, PROMPT, resolve_generation(GenerationSettings(max_new_tokens=6), runner)
            )
        assert promised
        assert alive.opened == {"generate": 1, "model": 1}
        assert +alive.now == {"model": 1}
        assert (search(runner, "greedy"), search(runner, "sampling")) == (greedy, sampled)
        assert alive.opened == {"generate": 1, "model": 1}


@pytest.mark.parametrize(("large_bytes", "is_moved"), [(1, True), (2**40, False)])
def test_only_large_graphs_are_moved_to_huge_pages(monkeypatch, large_bytes, is_moved):
    moved = []
    monkeypatch.setattr(onnx_backend, "_LARGE_GRAPH_BYTES", large_bytes)
    monkeypatch.setattr(onnx_backend, "use_huge_pages", lambda besides: moved.append(1))
    with opened(exported_artifacts.exported_artifact("translator")) as runner:
        runner.backend.input_shapes("encoder_model")
    assert bool(moved) is is_moved
