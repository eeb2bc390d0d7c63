"""The parent's side of a latency worker: starts it, sends requests, ends it."""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
from types import TracebackType
from typing import Any, Self

from smelt.core.child_process import child_environment, python_command
from smelt.core.errors import RunError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class WorkerProcess:
    """One `smelt.evaluate.latency.worker`; leaving the context ends it.

    time_limit: seconds that an answer may take before the process is stopped.
    """

    def __init__(self, threads: int, time_limit: float) -> None:
        self._time_limit = time_limit
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        # read by the libraries at import, so they must be set before
        environment = child_environment(
            **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
            TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", PYTHONUTF8="1",
        )  # fmt: skip
        self._process = subprocess.Popen(
            python_command("-m", "smelt.evaluate.latency.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
        )
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._failure: RunError | None = None
        # a thread, because Windows cannot wait for a pipe with a time limit
        threading.Thread(target=self._read_answers, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the process can answer requests."""
        return self._failure is None and self._process.poll() is None

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            RunError: the worker answered with an error, died, or exceeded the time limit.
        """
        if self._failure is not None:
            raise RunError(str(self._failure), code=self._failure.code)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=self._time_limit)
        except queue.Empty:
            line = None
        except OSError:
            line = b""
        if line is None:
            self._process.kill()
            raise self._worker_error(
                f"no answer to '{request['op']}' within {self._time_limit:g} s; increase time_limit_seconds",
                "timing-timed-out",
            )
        if not line:
            code = self._process.wait()
            raise self._worker_error(
                f"its process ended during '{request['op']}' with {_exit_reason(code)}.{self._stderr_tail()}",
                "timing-process-died",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunError(answer["error"], code=answer["code"])
        return answer

    def _worker_error(self, message: str, code: str) -> RunError:
        self._failure = RunError(message, code=code)
        return self._failure

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def _stderr_tail(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f" Last output: {lines[-1][:300]}" if lines else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._stderr):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue  # a request that a dead process did not receive


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = " (often: out of memory)" if code == -9 else ""
    return f"signal {-code}{hint}"
