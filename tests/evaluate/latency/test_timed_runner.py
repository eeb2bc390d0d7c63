import time

import numpy as np
import pytest

from smelt.evaluate.latency.worker import TimedRunner
from smelt.generation.backend import Batch

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


def test_generation_parts_sum_to_call_time():
    timed_runner = TimedRunner(Sleepy())
    begin = timed_runner.start_call()
    time.sleep(0.003)
    state = timed_runner.encode(BATCH)
    for _ in range(4):
        timed_runner.decode_step(state, np.zeros(1, np.int64))
    time.sleep(0.001)
    end = time.perf_counter_ns()
    tokenizing, encoding, first, num_further, tokens, detokenizing = timed_runner.call_parts(begin, end)
    assert tokens == 3
    assert min(tokenizing, 3) == 3
    assert min(encoding, 4) == 4
    assert min(first, 2) == 2
    assert min(num_further, 6) == 6
    assert min(detokenizing, 1) == 1
    call_ms = (end - begin) / 1e6
    assert tokenizing + encoding + first + num_further + detokenizing == pytest.approx(call_ms, rel=1e-6)
    assert timed_runner.batch is BATCH


def test_classification_parts_sum_to_call_time():
    timed_runner = TimedRunner(Sleepy())
    begin = timed_runner.start_call()
    time.sleep(0.002)
    timed_runner.forward(BATCH)
    end = time.perf_counter_ns()
    parts = timed_runner.call_parts(begin, end)
    assert sum(parts) == pytest.approx((end - begin) / 1e6, rel=1e-6)
    assert min(parts[0], 2) == 2
    assert min(parts[1], 4) == 4


def test_each_call_records_separate_parts():
    timed_runner = TimedRunner(Sleepy())
    for steps in (3, 1):
        begin = timed_runner.start_call()
        state = timed_runner.encode(BATCH)
        for _ in range(steps):
            timed_runner.decode_step(state, np.zeros(1, np.int64))
        assert timed_runner.call_parts(begin, time.perf_counter_ns())[4] == steps - 1


def test_runner_with_internal_loop_has_no_parts():
    timed_runner = TimedRunner(Sleepy())
    assert timed_runner.call_parts(timed_runner.start_call(), time.perf_counter_ns()) is None
    assert timed_runner.name == "sleepy"  # whatever else is asked goes on to it


class Whole:
    """A runner whose graph holds the loop: two ms for the first token and for each further one."""

    chunked_prefill = False

    def generate_sequences(self, graph, batch, feeds):
        count = min(3, int(feeds["max_new_tokens"]))
        time.sleep(0.002 * count)
        return np.zeros((1, 1 + count), np.int64)


def test_generation_graph_parts_sum_and_first_token_is_timed_separately():
    timed_runner = TimedRunner(Whole())
    begin = timed_runner.start_call()
    time.sleep(0.003)
    feeds = {"max_new_tokens": np.array(9)}
    timed_runner.generate_sequences("generate", BATCH, feeds)
    time.sleep(0.001)
    end = time.perf_counter_ns()
    tokenizing, generating, num_further, detokenizing = timed_runner.call_parts(begin, end)
    assert num_further == 2
    assert tokenizing + generating + detokenizing == pytest.approx((end - begin) / 1e6, rel=1e-6)
    assert (min(tokenizing, 3), min(generating, 6), min(detokenizing, 1)) == (3, 6, 1)
    graph_call = timed_runner.last_graph_call
    assert graph_call == ("generate", BATCH, feeds)
    assert 2 <= timed_runner.first_token_ms(graph_call) < generating
    assert feeds["max_new_tokens"] == 9
    timed_runner.start_call()
    assert timed_runner.last_graph_call is None
