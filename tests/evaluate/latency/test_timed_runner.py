import time

import numpy as np
import pytest

from smelt.evaluate.latency.worker import TimedRunner
from smelt.runtimes.backend import Batch

pytestmark = pytest.mark.quick

BATCH = Batch(np.ones((1, 3), np.int64), np.ones((1, 3), np.int64))


class Sleepy:
    """A runner that takes known times."""

    name = "sleepy"

    def encode(self, batch):
        time.sleep(0.004)
        return "state"

    def decode_step(self, state, tokens):
        assert state == "state"
        time.sleep(0.002)
        return tokens

    def forward(self, batch):
        time.sleep(0.004)
        return np.zeros((1, 2), np.float32)


def test_parts_of_a_generated_text_add_up_to_the_call():
    watch = TimedRunner(Sleepy())
    begin = watch.start_call()
    time.sleep(0.003)
    state = watch.encode(BATCH)
    for _ in range(4):
        watch.decode_step(state, np.zeros(1, np.int64))
    time.sleep(0.001)
    end = time.perf_counter_ns()
    tokenizing, encoding, first, further, tokens, detokenizing = watch.call_parts(begin, end)
    assert tokens == 3
    assert min(tokenizing, 3) == 3
    assert min(encoding, 4) == 4
    assert min(first, 2) == 2
    assert min(further, 6) == 6
    assert min(detokenizing, 1) == 1
    whole = (end - begin) / 1e6
    assert tokenizing + encoding + first + further + detokenizing == pytest.approx(whole, rel=1e-6)
    assert watch.batch is BATCH


def test_parts_of_a_classification_add_up_to_the_call():
    watch = TimedRunner(Sleepy())
    begin = watch.start_call()
    time.sleep(0.002)
    watch.forward(BATCH)
    end = time.perf_counter_ns()
    parts = watch.call_parts(begin, end)
    assert sum(parts) == pytest.approx((end - begin) / 1e6, rel=1e-6)
    assert min(parts[0], 2) == 2
    assert min(parts[1], 4) == 4


def test_each_call_has_parts_of_its_own():
    watch = TimedRunner(Sleepy())
    for steps in (3, 1):
        begin = watch.start_call()
        state = watch.encode(BATCH)
        for _ in range(steps):
            watch.decode_step(state, np.zeros(1, np.int64))
        assert watch.call_parts(begin, time.perf_counter_ns())[4] == steps - 1


def test_a_runner_that_keeps_the_loop_to_itself_shows_no_parts():
    watch = TimedRunner(Sleepy())
    assert watch.call_parts(watch.start_call(), time.perf_counter_ns()) is None
    assert watch.name == "sleepy"  # whatever else is asked goes on to it


class Whole:
    """A runner whose graph holds the loop: two ms for the first token and for each further one."""

    chunked_prefill = False

    def generate_sequences(self, graph, batch, feeds):
        count = min(3, int(feeds["max_new_tokens"]))
        time.sleep(0.002 * count)
        return np.zeros((1, 1 + count), np.int64)


def test_parts_of_a_graph_with_the_loop_add_up_and_its_first_token_is_asked_for_alone():
    watch = TimedRunner(Whole())
    begin = watch.start_call()
    time.sleep(0.003)
    feeds = {"max_new_tokens": np.array(9)}
    watch.generate_sequences("generate", BATCH, feeds)
    time.sleep(0.001)
    end = time.perf_counter_ns()
    before, whole, further, after = watch.call_parts(begin, end)
    assert further == 2
    assert before + whole + after == pytest.approx((end - begin) / 1e6, rel=1e-6)
    assert (min(before, 3), min(whole, 6), min(after, 1)) == (3, 6, 1)
    asked = watch.last_graph_call
    assert asked == ("generate", BATCH, feeds)
    assert 2 <= watch.first_token_ms(asked) < whole
    assert feeds["max_new_tokens"] == 9
    watch.start_call()
    assert watch.last_graph_call is None
