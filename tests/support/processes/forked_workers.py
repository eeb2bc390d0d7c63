"""Timing processes that begin at once: forks of one whose imports are done, where a new Python needs 3 s.

    forked_workers.install(monkeypatch)

They run `smelt.evaluate.latency.worker`, are asked through pipes and can be killed and stopped, as those that
smelt starts. That smelt starts them rightly, tests/evaluate/latency/ checks.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

_WORKER_IMPORTS = [
    *("smelt.runtimes.runner", "smelt.runtimes.predict_texts", "smelt.runtimes.registry"),
    *("smelt.runtimes.torch_backend", "smelt.runtimes.onnx_backend"),
    *("smelt.evaluate.latency.worker", "transformers.modeling_utils", "transformers.tokenization_utils_base"),
]
_MAX_MESSAGE_BYTES = 1 << 20


def install(monkeypatch: Any) -> None:
    """Fork timing processes until the test ends."""
    from smelt.evaluate.latency import measurement

    monkeypatch.setattr(measurement, "subprocess", SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE))


class ForkedWorker:
    """Stands in for the subprocess.Popen of a worker."""

    def __init__(
        self, arguments: Sequence[str], stdin: int, stdout: int, stderr: IO[bytes], env: Mapping[str, str]
    ) -> None:
        assert list(arguments[1:]) == ["-P", "-m", "smelt.evaluate.latency.worker"]
        (read, asks), (answers, write) = os.pipe(), os.pipe()
        self.pid = int(_server().ask({"start": dict(env)}, [read, write, stderr.fileno()]))
        os.close(read)
        os.close(write)
        self.stdin, self.stdout = os.fdopen(asks, "wb"), os.fdopen(answers, "rb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ended(self, how: int) -> int | None:
        if self.returncode is None:
            self.returncode = _server().ask({"wait": self.pid, "how": how})
        return self.returncode


class _Server:
    """The process that forks; one request at a time."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **single, "TOKENIZERS_PARALLELISM": "false"},
            )

    def ask(self, request: Any, descriptors: Sequence[int] = ()) -> Any:
        socket.send_fds(self._ours, [json.dumps(request).encode()], descriptors)
        answer = self._ours.recv(_MAX_MESSAGE_BYTES)
        assert answer, "the process that forks timing processes has ended"
        return json.loads(answer)

    def end(self) -> None:
        self._ours.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.end)
    return server


def _serve(requests: socket.socket) -> None:
    import torch

    for name in _WORKER_IMPORTS:
        import_module(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    while (found := socket.recv_fds(requests, _MAX_MESSAGE_BYTES, 3))[0]:
        request, descriptors = json.loads(found[0]), found[1]
        if "start" in request:
            answer: Any = os.fork()
            if not answer:
                requests.close()
                _run_worker(request["start"], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            ended, status = os.waitpid(request["wait"], request["how"])
            answer = os.waitstatus_to_exitcode(status) if ended else None
        requests.send(json.dumps(answer).encode())


def _run_worker(environment: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """Be the child: answer until the pipe closes."""
    from smelt.evaluate.latency.worker import main

    for at, descriptor in enumerate(descriptors):
        os.dup2(descriptor, at)
        os.close(descriptor)
    os.environ.update(environment)
    try:
        main()
    finally:
        os._exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
