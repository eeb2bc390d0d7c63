"""A worker answers many requests in one process; a request that fails does so alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smelt.core.isolated_worker import IsolatedWorker
from smelt.core.system import IsolatedProcessError

MODULE = """
import os, signal
def answer(request):
    if request == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if request == "memory":
        return len(bytearray(3_000_000_000))
    while request == "time":
        pass
    if request == "error":
        raise KeyError("a")
    print("noise")
    return [request, os.getpid()]
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "answering_module.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = IsolatedWorker("answering_module:answer", 1_000_000_000)
    yield worker
    worker.close()


def test_worker_answers_requests_in_one_process(worker: IsolatedWorker) -> None:
    first, pid = worker.ask({"a": "ü\ud800\n"}, 5)
    assert (first, pid != os.getpid()) == ({"a": "ü\ud800\n"}, True)
    assert worker.ask("b", 5) == ["b", pid]
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert worker.ask("c", 5)[1] != pid


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
@pytest.mark.parametrize(("request_", "code"), [
    ("crash", "process-crashed"), ("memory", "memory-limit"), ("time", "time-limit"),
    ("error", "process-failed"),
])  # fmt: skip
def test_failed_request_has_code_and_next_request_works(
    worker: IsolatedWorker, request_: str, code: str
) -> None:
    with pytest.raises(IsolatedProcessError, check=lambda error: error.code == code):
        worker.ask(request_, 0.3)
    assert worker.ask("next", 5)[0] == "next"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
def test_exit_does_not_wait_for_daemon_thread_request(tmp_path: Path) -> None:
    (tmp_path / "answering_module.py").write_text(MODULE)
    code = (
        "import threading, time\n"
        "from smelt.core.isolated_worker import IsolatedWorker\n"
        "worker = IsolatedWorker('answering_module:answer', 1_000_000_000)\n"
        "worker.ask('ready', 60)\n"
        "threading.Thread(target=worker.ask, args=('time', 10_000), daemon=True).start()\n"
        "while worker._lock.acquire(blocking=False):\n"
        "    worker._lock.release()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=False)
    assert done.returncode == 0
