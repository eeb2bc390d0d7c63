import pytest

from smelt.export import autotune
from smelt.export.autotune import fewest_threads, measure_threads, thread_counts
from tests.support.graphs import graph_exports


@pytest.mark.quick
@pytest.mark.parametrize(
    ("times", "count"),
    [
        ({1: 10.0}, 1),
        ({1: 10.0, 2: 24.0}, 1),
        ({1: 10.0, 2: 9.6}, 1),  # within the margin: the fewest
        ({1: 10.0, 2: 9.0, 3: 8.8, 4: 12.0}, 2),
        ({1: 10.0, 2: 6.0, 3: 4.0}, 3),
    ],
)
def test_the_fewest_threads_that_are_as_fast_as_any_are_taken(times, count):
    found, reported = fewest_threads(times)
    assert found == count
    assert reported["1 thread"] == times[1]
    assert list(reported)[1:] == [f"{n} threads" for n in times if n > 1]


def test_numbers_double_so_that_few_runners_are_open_at_once():
    assert [thread_counts(n) for n in (1, 2, 3, 6, 64)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16, 32, 64],
    ]


@pytest.mark.parametrize(("family", "size"), [("marian", 3), ("bert", 1)])
def test_every_number_of_threads_runs_the_graphs_on_so_many_texts(monkeypatch, family, size):
    """The times themselves are made up: two threads take half of one's."""
    monkeypatch.setattr(autotune, "available_cores", lambda: 2)
    made, opened, rows = graph_exports.exported_graphs(family, "fp32"), [], []

    def timed(calls):
        for call in calls.values():
            runner, batch, _ = call.args
            opened.append(runner.backend._threads)
            rows.append(len(batch.input_ids))
            call()
        return {1: 2.0, 2: 1.0}

    monkeypatch.setattr(autotune, "_time_calls", timed)
    generates = made.reference.tokens is not None
    found = measure_threads(made.folder, "ort-cpu", "fp32", made.reference.batch, size, generates)
    assert found == (2, {"1 thread": 2.0, "2 threads": 1.0})
    assert (opened, rows) == ([1, 2], [size, size])


def test_rounds_go_through_all_numbers_and_the_median_counts(monkeypatch):
    monkeypatch.setattr(autotune, "_SETTLE_SECONDS", 0)
    monkeypatch.setattr(autotune, "_THREAD_ROUND_SECONDS", 0)
    seen = []
    found = autotune._time_calls({1: lambda: seen.append(1), 2: lambda: seen.append(2)})
    assert seen == [1, 2] * (autotune._THREAD_ROUNDS + 1)
    assert set(found) == {1, 2}
    assert all(ms > 0 for ms in found.values())
