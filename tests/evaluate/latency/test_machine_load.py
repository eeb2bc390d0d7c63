import time

import pytest

from smelt.evaluate.latency import summary
from smelt.evaluate.latency.summary import CounterSnapshot, load_between, read_counters


def test_load_between_returns_shares_of_elapsed_time():
    start_counters = CounterSnapshot(
        wall=10.0, processor=1.0, waited=0.5, busy=100.0, stolen=2.0, pressure=3.0
    )
    end_counters = CounterSnapshot(wall=12.0, processor=2.5, waited=0.9, busy=104.5, stolen=2.2, pressure=4.0)
    load = load_between(start_counters, end_counters)
    assert load.wall_ms == pytest.approx(2000)
    assert load.processor_ms == pytest.approx(1500)
    assert load.waited_ms == pytest.approx(400)
    assert load.others == pytest.approx(1.5)  # 4.5 s of all processors, 1.5 of them ours, in 2 s
    assert load.stolen == pytest.approx(0.1)
    assert load.pressure == pytest.approx(0.5)


def test_load_between_returns_none_without_system_counters():
    load = load_between(CounterSnapshot(0, 0, None, 0, 0, None), CounterSnapshot(1, 0.5, None, 0.2, 0, None))
    assert (load.waited_ms, load.pressure) == (None, None)
    assert load.others == 0  # coarser clocks may say less than was used


def test_read_counters_includes_cpu_time_of_this_process():
    start_counters = read_counters()
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    load = load_between(start_counters, read_counters())
    assert load.processor_ms == pytest.approx(100, rel=0.3)
    assert load.wall_ms >= 0.99 * load.processor_ms


def test_run_queue_seconds_sums_threads_and_skips_ended_ones(tmp_path):
    for name, text in (("1", "100 2000000000 3\n"), ("2", "5 500000000 1\n"), ("3", None)):
        (tmp_path / name).mkdir()
        if text:
            (tmp_path / name / "schedstat").write_text(text)
    assert summary._run_queue_seconds(tmp_path) == pytest.approx(2.5)
    assert summary._run_queue_seconds(tmp_path / "none") is None


def test_cpu_pressure_is_read_from_some_line(tmp_path):
    file = tmp_path / "cpu"
    file.write_text("some avg10=0.18 avg60=0.07 avg300=0.11 total=4837445\nfull avg10=0.00 total=0\n")
    assert summary._cpu_pressure_seconds(file) == pytest.approx(4.837445)
    assert summary._cpu_pressure_seconds(tmp_path / "none") is None
