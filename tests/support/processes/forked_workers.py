"""Processes that begin at once: forks of one whose imports are done, where a new Python needs 1 to 3 s.

    forked_workers.install(monkeypatch)

forks timing processes. They run `smelt.evaluate.latency.worker`, are asked through pipes and can be killed
and stopped, as those that smelt starts. That smelt starts them rightly, tests/evaluate/latency/ checks.

`fork_isolated_processes` does so for those in which other people's graphs are opened, in all tests but those
of their limits.
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
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

_WORKER_IMPORTS = [
    *("smelt.runtimes.single_call_runners", "smelt.runtimes.predict_texts", "smelt.runtimes.registry"),
    *("smelt.runtimes.torch_backend", "smelt.runtimes.onnx_backend"),
    *("smelt.evaluate.latency.worker", "transformers.modeling_utils", "transformers.tokenization_utils_base"),
]
_ISOLATED_IMPORTS = [
    *("smelt.runtimes.onnx_import.validate_graph", "smelt.runtimes.onnx_import.trial_run"),
    *("smelt.export.onnx_models.output_comparison", "smelt.export.onnx_models.simplify"),
    *("onnx", "onnx.shape_inference", "onnxruntime"),
]
_NOT_FORKED = (
    "tests/core/test_isolated_process.py", "tests/runtimes/onnx_import/", "tests/pipeline/faults/",
    "tests/export/tensorrt/test_check_file.py",
)  # fmt: skip
"""Tests of the limits that an isolated process has, and of its own beginning."""
_MAX_MESSAGE_BYTES = 1 << 20


def install(monkeypatch: Any) -> None:
    """Fork timing processes until the test ends."""
    from smelt.evaluate.latency import measurement

    monkeypatch.setattr(measurement, "subprocess", SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE))


def fork_isolated_processes(test: str) -> None:
    """Fork the processes of `run_isolated`, except for the tests of `_NOT_FORKED`."""
    module: Any = sys.modules.get("smelt.core.system")
    if module is not None:
        forked = SimpleNamespace(**vars(subprocess) | {"run": _run_isolated})
        module.subprocess = subprocess if test.startswith(_NOT_FORKED) else forked


def _run_isolated(command: Sequence[str], env: Mapping[str, str], timeout: float, **_: Any) -> Any:
    """Stand in for the subprocess.run of an isolated process."""
    server = _server("isolated")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        files = [os.open(os.devnull, os.O_RDONLY), out.fileno(), errors.fileno()]
        request = {"start": dict(env), "arguments": [*command[4:]], "folder": str(Path.cwd())}
        pid = server.ask(request, files)
        os.close(files[0])
        end = time.monotonic() + timeout
        while (code := server.ask({"wait": pid, "how": os.WNOHANG})) is None:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                server.ask({"wait": pid, "how": 0})
                raise subprocess.TimeoutExpired(command, timeout)
            time.sleep(0.002)
        out.seek(0)
        errors.seek(0)
        texts = (file.read().decode(errors="replace") for file in (out, errors))
        return subprocess.CompletedProcess(command, code, *texts)


class ForkedWorker:
    """Stands in for the subprocess.Popen of a worker."""

    def __init__(
        self, arguments: Sequence[str], stdin: int, stdout: int, stderr: IO[bytes], env: Mapping[str, str]
    ) -> None:
        assert list(arguments[1:]) == ["-P", "-m", "smelt.evaluate.latency.worker"]
        (request_read, asks), (answers, write) = os.pipe(), os.pipe()
        self.pid = int(_server("timing").ask({"start": dict(env)}, [request_read, write, stderr.fileno()]))
        os.close(request_read)
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
            self.returncode = _server("timing").ask({"wait": self.pid, "how": how})
        return self.returncode


class _Server:
    """The process that forks those of a kind, "timing" or "isolated"; one request at a time."""

    def __init__(self, kind: str) -> None:
        self._ours, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(server_end.fileno()), kind],
                pass_fds=[server_end.fileno()],
                env={**os.environ, **single, "TOKENIZERS_PARALLELISM": "false"},
            )

    def ask(self, request: Any, descriptors: Sequence[int] = ()) -> Any:
        socket.send_fds(self._ours, [json.dumps(request).encode()], descriptors)
        response = self._ours.recv(_MAX_MESSAGE_BYTES)
        assert response, "the process that forks has ended"
        return json.loads(response)

    def end(self) -> None:
        self._ours.close()
        self._process.wait()


@functools.cache
def _server(kind: str) -> _Server:
    server = _Server(kind)
    atexit.register(server.end)
    return server


def _serve(requests: socket.socket, kind: str) -> None:
    for name in _WORKER_IMPORTS if kind == "timing" else _ISOLATED_IMPORTS:
        import_module(name)
    if kind == "timing":
        import torch

        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    while (message := socket.recv_fds(requests, _MAX_MESSAGE_BYTES, 3))[0]:
        request, descriptors = json.loads(message[0]), message[1]
        if "start" in request:
            child: Any = os.fork()
            if not child:
                requests.close()
                _run_child(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            ended_pid, status = os.waitpid(request["wait"], request["how"])
            child = os.waitstatus_to_exitcode(status) if ended_pid else None
        requests.send(json.dumps(child).encode())


def _run_child(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Be the child: answer until the pipe closes, or run one isolated request."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.update(request["start"])
    code = 0
    try:
        if "arguments" in request:
            from smelt.core.system import isolated_main

            os.chdir(request["folder"])
            isolated_main(request["arguments"])
        else:
            from smelt.evaluate.latency.worker import main

            main()
    except Exception:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
