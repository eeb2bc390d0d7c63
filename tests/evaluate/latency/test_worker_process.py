import os
import signal
from pathlib import Path

import pytest

from smelt.core.errors import RunError
from smelt.evaluate.latency.measurement import WorkerProcess
from tests.support.expected_errors import raises_code
from tests.support.processes import forked_workers


def test_worker_ends_when_its_pipe_closes() -> None:
    with WorkerProcess(threads=1, time_limit=30) as worker:
        assert worker.ask(op="memory")["peak_bytes"] > 0
        assert worker._process.stdin is not None
        worker._process.stdin.close()
        assert worker._process.wait(timeout=10) == 0


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    forked_workers.install(monkeypatch)


@pytest.mark.usefixtures("forked")
def test_killed_worker_raises_error_with_signal() -> None:
    with WorkerProcess(threads=1, time_limit=30) as worker:
        worker.ask(op="memory")
        worker._process.kill()
        worker._process.wait()
        with raises_code("timing-process-died", RunError) as excinfo:
            worker.ask(op="memory")
        assert all(value in str(excinfo.value) for value in ("'memory'", "signal 9"))
        assert not worker.alive
        with raises_code("timing-process-died", RunError):  # as long as somebody asks
            worker.ask(op="memory")


@pytest.mark.usefixtures("forked")
def test_unresponsive_worker_times_out() -> None:
    with WorkerProcess(threads=1, time_limit=0.001) as worker:
        os.kill(worker._process.pid, signal.SIGSTOP)
        with raises_code("timing-timed-out", RunError) as excinfo:
            worker.ask(op="memory")
        assert all(value in str(excinfo.value) for value in ("'memory'", "0.001 s"))


@pytest.mark.usefixtures("forked")
def test_worker_error_keeps_its_code(tmp_path: Path) -> None:
    with WorkerProcess(threads=1, time_limit=30) as worker:
        with raises_code("not-an-artifact", RunError):
            worker.ask(op="load", artifact=str(tmp_path), threads=1, task="translation")
        with raises_code("unforeseen", RunError):
            worker.ask(op="prepare")
        assert worker.alive
