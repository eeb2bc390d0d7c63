"""Who is in a call of a model, and how many texts were cut in it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import smelt
from smelt.api.load import ActiveCalls, TruncationCounter
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def test_closing_waits_for_active_calls():
    calls, inside, out, closed = ActiveCalls("closed"), threading.Event(), threading.Event(), []

    def work():
        with calls:
            inside.set()
            out.wait(5)
            closed.append("worked")

    def close():
        closed.append(calls.close())

    worker, closer = threading.Thread(target=work), threading.Thread(target=close)
    worker.start()
    inside.wait(5)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    with raises_code("model-closed", smelt.InputError), calls:
        pass
    out.set()
    worker.join(5)
    closer.join(5)
    assert closed == ["worked", True]
    assert calls.close() is False


def test_calls_to_single_threaded_runtime_are_sequential():
    calls, inside, active_counts = ActiveCalls("closed", most=1), [], []

    def work(number):
        with calls:
            inside.append(number)
            time.sleep(0.002)
            active_counts.append(len(inside))
            inside.remove(number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(30)))
    assert active_counts == [1] * 30


def test_waiting_call_raises_when_model_is_closed():
    calls, inside, out = ActiveCalls("closed", most=1), threading.Event(), threading.Event()

    def work():
        with calls:
            inside.set()
            out.wait(20)

    def late():
        with calls:
            pass

    with ThreadPoolExecutor(3) as pool:
        pool.submit(work)
        inside.wait(5)
        waiting = pool.submit(late)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        closing = pool.submit(calls.close)
        try:
            with raises_code("model-closed", smelt.InputError):
                waiting.result(5)  # at once: the first call has not ended
            assert not closing.done()
        finally:
            out.set()
        assert closing.result(5) is True


def test_truncation_counts_are_summed():
    cuts = TruncationCounter()
    cuts(2, 64)
    cuts(1, 64)
    assert (cuts.count, cuts.limit) == (3, 64)
