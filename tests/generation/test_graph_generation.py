"""What decoding asks for, as numbers; and who is asked: the graph, or the loop in Python."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from smelt.generation import search
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationConfig
from smelt.generation.logits_processors import LogitsProcessors
from smelt.generation.search import generate_in_graph, generation_feeds, graph_supports, trim_at_eos

WISHES = {
    "start": 3, "eos": [1, 2], "pad": 0, "max_new_tokens": 9, "bad_words_ids": [[7], [1]], "min_length": 4,
    "suppress_tokens": [9], "forced_bos_token_id": 6, "forced_eos_token_id": [2, 1],
    "begin_suppress_tokens": [8],
}  # fmt: skip


@pytest.mark.parametrize("prompt", [1, 3])
def test_rule_of_each_step_equals_the_python_rules(prompt):
    decoding = GenerationConfig(**WISHES)
    feeds = generation_feeds(decoding, prompt, 12)
    assert feeds["max_new_tokens"] == 9
    assert len(feeds["step_rules"]) == 9
    rules = LogitsProcessors(decoding, np.full((1, prompt), 3), None)
    scores = np.random.default_rng(0).normal(size=(2, 12)).astype(np.float32)
    kinds = set()
    for step, number in enumerate(feeds["step_rules"]):
        expected = scores.copy()
        rules.apply(expected, np.full((2, prompt + step), 5))
        row, forced = feeds["rule_biases"][number], feeds["forced_tokens"][number]
        actual = row + (np.zeros_like(scores) if forced >= 0 else scores)
        np.testing.assert_array_equal(actual, expected)
        if forced >= 0:  # of several that are equally good the first wins
            assert forced == expected[0].argmax()
        kinds.add(int(number))
    assert len(kinds) == len(feeds["rule_biases"]) >= 3
    assert feeds["forced_tokens"][feeds["step_rules"][-1]] == 1


def test_several_forced_tokens_share_probability_with_renormalized_scores():
    decoding = GenerationConfig(**WISHES, num_beams=2, renormalize_logits=True)
    feeds = generation_feeds(decoding, 1, 12)
    last = feeds["rule_biases"][feeds["step_rules"][-1]]
    scores = np.zeros((1, 12), dtype=np.float32)
    LogitsProcessors(decoding, np.full((1, 1), 3), None).apply(scores, np.full((1, 9), 5))
    np.testing.assert_allclose(last, torch.log_softmax(torch.from_numpy(scores[0]), 0).numpy(), rtol=1e-6)
    assert np.isfinite(last).sum() == 2


def test_settings_unsupported_by_graphs_are_recognized():
    assert graph_supports(
        GenerationConfig(**WISHES, num_beams=3, repetition_penalty=1.5, no_repeat_ngram_size=2)
    )
    for extra in ({"do_sample": True}, {"bad_words_ids": [[4, 5]]}, {"remove_invalid_values": True}):
        assert not graph_supports(GenerationConfig(**WISHES | extra))


def test_model_without_end_token_gets_an_unused_token_id():
    assert generation_feeds(GenerationConfig(start=3, max_new_tokens=2), 1, 5)["eos_token_ids"].tolist() == [
        -1
    ]


@pytest.mark.parametrize(("early", "penalty", "full", "never"), [
    (True, 1.0, True, False), (False, 1.0, False, False), ("never", 1.0, False, True),
    ("never", 0.0, False, False),
])  # fmt: skip
def test_early_stopping_becomes_two_inputs(early, penalty, full, never):
    feeds = generation_feeds(
        GenerationConfig(start=3, num_beams=2, early_stopping=early, length_penalty=penalty), 1, 5
    )
    assert (bool(feeds["early_stopping"]), bool(feeds["never_stop_early"])) == (full, never)


def test_text_is_cut_after_its_end_token():
    assert trim_at_eos(np.array([3, 5, 2, 0, 0]), 1, [1, 2]) == [5, 2]
    assert trim_at_eos(np.array([3, 5, 6]), 1, [1, 2]) == [5, 6]


class Noting:
    """A runner that notes what its graphs are asked."""

    def __init__(self, graphs=("generate", "generate_beams"), promised=True):
        self.backend = SimpleNamespace(
            generation_graphs=graphs, acquire_graph=lambda graph: nullcontext(promised)
        )
        self.config, self.generation_cache = {"vocab_size": 12}, {}
        self.asked = []

    def generate_sequences(self, graph, batch, feeds):
        self.asked.append((graph, feeds))
        return np.array([[3, 4, 1, 0]])


BATCH = Batch(np.ones((1, 2), np.int64), np.ones((1, 2), np.int64))


def test_beam_and_greedy_search_have_separate_graphs():
    runner = Noting()
    assert generate_in_graph(runner, BATCH, GenerationConfig(**WISHES)) == [[4, 1]]
    generate_in_graph(runner, BATCH, GenerationConfig(**WISHES, num_beams=2))
    assert [graph for graph, _ in runner.asked] == ["generate", "generate_beams"]


@pytest.mark.parametrize(("graphs", "promised", "more"), [
    (("generate",), True, {"num_beams": 2}), (("generate",), True, {"do_sample": True}),
    (("generate",), False, {}),
])  # fmt: skip
def test_python_loop_is_used_for_settings_unsupported_by_graphs(monkeypatch, graphs, promised, more):
    monkeypatch.setattr(search, "generate_resolved", lambda *args: ("python", args[-1]))
    runner = Noting(graphs, promised)
    assert generate_in_graph(runner, BATCH, GenerationConfig(**WISHES, **more)) == (
        "python",
        not more.get("do_sample"),
    )
    assert runner.asked == []


@pytest.mark.parametrize(("length", "faster", "more", "graph"), [
    (256, True, {}, False), (255, True, {}, True), (256, False, {}, True),
    (256, True, {"num_beams": 2}, True), (256, True, {"start": 3}, True),
])  # fmt: skip
def test_long_prompts_use_single_steps_if_faster(monkeypatch, length, faster, more, graph):
    monkeypatch.setattr(search, "generate_resolved", lambda *args: "python")
    runner, ones = Noting(), np.ones((1, length), np.int64)
    runner.backend.prefers_stepwise = faster
    decoding = GenerationConfig(
        **WISHES | {"start": None, "bad_words_ids": [], "forced_bos_token_id": None} | more
    )
    outputs = generate_in_graph(runner, Batch(ones, ones), decoding)
    assert (outputs != "python") == graph


def test_equal_settings_are_resolved_once():
    runner = Noting()
    first, second = GenerationConfig(**WISHES), GenerationConfig(**WISHES | {"max_new_tokens": 5})
    for decoding in (first, first, second):
        generate_in_graph(runner, BATCH, decoding)
    feeds = [feeds for _, feeds in runner.asked]
    assert feeds[0] is feeds[1]
    assert feeds[2]["max_new_tokens"] == 5


def test_settings_at_a_reused_address_are_resolved_again():
    runner = Noting()
    generate_in_graph(runner, BATCH, first := GenerationConfig(**WISHES))
    (cached,) = runner.generation_cache.values()
    other = GenerationConfig(**WISHES | {"max_new_tokens": 5})
    runner.generation_cache[id(other), 1] = cached  # as when `first` were gone and `other` had its address
    generate_in_graph(runner, BATCH, other)
    assert runner.asked[-1][1]["max_new_tokens"] == 5
    assert first.max_new_tokens == 9
