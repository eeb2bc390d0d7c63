import pytest

from smelt.export import autotune
from smelt.export.autotune import fewest_threads, measure_threads, thread_counts
from tests.support.graphs import graph_exports


@pytest.mark.quick
@pytest.mark.parametrize(("times", "count"), [
    ({1: 10.0}, 1), ({1: 10.0, 2: 24.0}, 1), ({1: 10.0, 2: 9.6}, 1),  # within the margin: the fewest
    ({1: 10.0, 2: 9.0, 3: 8.8, 4: 12.0}, 2), ({1: 10.0, 2: 6.0, 3: 4.0}, 3),
])  # fmt: skip
def test_fewest_equally_fast_threads_are_chosen(times, count):
    fewest, reported = fewest_threads(times)
    assert fewest == count
    assert reported["1 thread"] == times[1]
    assert list(reported)[1:] == [f"{n} threads" for n in times if n > 1]


def test_thread_counts_are_powers_of_two():
    assert [thread_counts(n) for n in (1, 2, 3, 6, 64)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16, 32, 64],
    ]


@pytest.mark.parametrize(("family", "size"), [("marian", 3), ("bert", 1)])
def test_every_thread_count_runs_the_requested_batch_size(monkeypatch, family, size):
    """The times themselves are made up: two threads take half of one's."""
    monkeypatch.setattr(autotune, "available_cores", lambda: 2)
    exported, thread_counts, batch_sizes = graph_exports.exported_graphs(family, "fp32"), [], []

    def timed(calls):
        for call in calls.values():
            runner, batch, _ = call.args
            thread_counts.append(runner.backend._threads)
            batch_sizes.append(len(batch.input_ids))
            call()
        return {1: 2.0, 2: 1.0}

    monkeypatch.setattr(autotune, "_time_calls", timed)
    generates = exported.reference.tokens is not None
    measured = measure_threads(exported.folder, "ort-cpu", "fp32", exported.reference.batch, size, generates)
    assert measured == (2, {"1 thread": 2.0, "2 threads": 1.0})
    assert (thread_counts, batch_sizes) == ([1, 2], [size, size])


def test_rounds_alternate_thread_counts_and_use_median(monkeypatch):
    monkeypatch.setattr(autotune, "_SETTLE_SECONDS", 0)
    monkeypatch.setattr(autotune, "_THREAD_ROUND_SECONDS", 0)
    calls = []
    times = autotune._time_calls({1: lambda: calls.append(1), 2: lambda: calls.append(2)})
    assert calls == [1, 2] * (autotune._THREAD_ROUNDS + 1)
    assert set(times) == {1, 2}
    assert all(ms > 0 for ms in times.values())
