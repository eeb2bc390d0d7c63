import time

import pytest

from smelt.evaluate.latency import summary
from smelt.evaluate.latency.summary import CounterSnapshot, load_between, read_counters


def test_between_gives_shares_of_the_time_that_went_by():
    before = CounterSnapshot(wall=10.0, processor=1.0, waited=0.5, busy=100.0, stolen=2.0, pressure=3.0)
    after = CounterSnapshot(wall=12.0, processor=2.5, waited=0.9, busy=104.5, stolen=2.2, pressure=4.0)
    found = load_between(before, after)
    assert found.wall_ms == pytest.approx(2000)
    assert found.processor_ms == pytest.approx(1500)
    assert found.waited_ms == pytest.approx(400)
    assert found.others == pytest.approx(1.5)  # 4.5 s of all processors, 1.5 of them ours, in 2 s
    assert found.stolen == pytest.approx(0.1)
    assert found.pressure == pytest.approx(0.5)


def test_between_knows_nothing_where_the_system_does_not_count():
    found = load_between(CounterSnapshot(0, 0, None, 0, 0, None), CounterSnapshot(1, 0.5, None, 0.2, 0, None))
    assert (found.waited_ms, found.pressure) == (None, None)
    assert found.others == 0  # coarser clocks may say less than was used


def test_look_sees_the_work_of_this_process():
    before = read_counters()
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    found = load_between(before, read_counters())
    assert found.processor_ms == pytest.approx(100, rel=0.3)
    assert found.wall_ms >= 0.99 * found.processor_ms


def test_waited_sums_the_threads_and_passes_over_what_has_ended(tmp_path):
    for name, text in (("1", "100 2000000000 3\n"), ("2", "5 500000000 1\n"), ("3", None)):
        (tmp_path / name).mkdir()
        if text:
            (tmp_path / name / "schedstat").write_text(text)
    assert summary._run_queue_seconds(tmp_path) == pytest.approx(2.5)
    assert summary._run_queue_seconds(tmp_path / "none") is None


def test_pressure_is_what_some_task_waited(tmp_path):
    file = tmp_path / "cpu"
    file.write_text("some avg10=0.18 avg60=0.07 avg300=0.11 total=4837445\nfull avg10=0.00 total=0\n")
    assert summary._cpu_pressure_seconds(file) == pytest.approx(4.837445)
    assert summary._cpu_pressure_seconds(tmp_path / "none") is None
