import time

import pytest

from smelt.core.errors import RunError
from smelt.evaluate.latency.process import WorkerProcess


def test_worker_ends_when_its_pipe_closes() -> None:
    with WorkerProcess(threads=1, time_limit=30) as worker:
        assert worker.ask(op="memory")["peak_bytes"] > 0
        assert worker._process.stdin is not None
        worker._process.stdin.close()
        assert worker._process.wait(timeout=10) == 0


def test_worker_that_dies_is_an_error_that_names_the_signal() -> None:
    with WorkerProcess(threads=1, time_limit=30) as worker:
        worker.ask(op="memory")
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(RunError, match="ended during 'memory' with signal 9"):
            worker.ask(op="memory")
        assert not worker.alive


def test_worker_that_is_silent_beyond_the_limit_is_given_up() -> None:
    with WorkerProcess(threads=1, time_limit=0.001) as worker:
        begin = time.monotonic()
        with pytest.raises(RunError, match=r"no answer to 'memory' within 0\.001 s"):
            worker.ask(op="memory")
        assert time.monotonic() - begin < 5
