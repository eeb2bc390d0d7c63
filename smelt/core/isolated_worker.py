"""A separate process that answers many requests, each within limits of memory and processor time.

`smelt.core.system.run_isolated` starts a process for one request. Where a request takes less time than the
start of a process, a worker stays and answers one after the other. A request that exceeds a limit or crashes
the worker fails alone: the next one starts a new worker.

A request and its answer are a line of JSON each. The processor time of a request is limited by a timer of
the worker (ITIMER_PROF), whose signal ends it even within native code; its wall time by the caller. The
worker ends with its caller, when its standard input does.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from smelt.core.system import (
    MAX_OUTPUT_CHARS,
    WALL_TIME_FACTOR,
    IsolatedProcessError,
    ProcessLimits,
    apply_limits,
    child_environment,
    failure_reason,
    out_of_memory_message,
    python_command,
)

_MAX_ANSWER_BYTES = 512_000_000
_END_SECONDS = 0.5  # a worker that waits for requests ends at once
_KILLED = -getattr(signal, "SIGKILL", 0)  # from outside: the system, for example, where memory is short
_UNLIMITED_SECONDS = 1e9  # of all requests together; each one has its own limit


class IsolatedWorker:
    """Answers requests in a separate process, which starts with the first one. Thread-safe, one at a time.

    Args:
        function: `module:function`, called in the process with each request; both are JSON-able.
        memory_bytes: of data, beyond which an allocation in the process fails.
    """

    def __init__(self, function: str, memory_bytes: int) -> None:
        self._function, self._memory_bytes = function, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._of_parents: list[Any] = []
        atexit.register(self._kill)
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._after_fork)

    def ask(self, request: Any, seconds: float) -> Any:
        """Return the function's answer to `request`, which may take `seconds` of processor time.

        Raises:
            IsolatedProcessError: it exceeded a limit, crashed, or raised an error.
        """
        line = json.dumps([seconds, request]).encode() + b"\n"
        with self._lock:
            while True:
                is_new = self._process is None
                try:
                    reply_line, timed_out = self._exchange(line, seconds)
                except BaseException:  # interrupted: the next request must not get this one's answer
                    self._stop()
                    raise
                if reply_line.endswith(b"\n"):
                    break
                code, limits = self._stop(), ProcessLimits(self._memory_bytes, seconds)
                if timed_out:  # also where a killed process has no signal as its exit status
                    raise IsolatedProcessError(f"it took more than {seconds:.0f} s", "time-limit")
                if is_new or code != _KILLED:  # else it may have been killed before it had the request
                    raise IsolatedProcessError(*failure_reason(code, "", limits))
        reply = json.loads(reply_line)
        if "failed" in reply:
            raise IsolatedProcessError(reply["failed"], reply["code"])
        return reply["answer"]

    def _exchange(self, line: bytes, seconds: float) -> tuple[bytes, bool]:
        """Return the worker's line, incomplete if it ended before; and whether it took too long."""
        if self._process is not None and self._process.poll() is not None:  # killed between requests
            self._stop()
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            process.kill()

        timer = threading.Timer(max(1.0, seconds) * WALL_TIME_FACTOR, stop)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return process.stdout.readline(_MAX_ANSWER_BYTES), timed_out.is_set()
        except BrokenPipeError:
            return b"", timed_out.is_set()
        finally:
            timer.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        command = python_command("-m", __name__, str(self._memory_bytes), self._function)
        try:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=child_environment(),
            )  # fmt: skip
        except OSError as error:
            raise IsolatedProcessError(f"no process could be started: {error}", "process-failed") from error

    def _stop(self) -> int:
        """End the process and return its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # a request that was not read
            process.stdin.close()
        try:
            code = process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        process.stdout.close()
        return code

    def close(self) -> None:
        """End the process; a later request starts a new one."""
        with self._lock:
            self._stop()

    def _kill(self) -> None:
        """End the process at the exit of this one, which does not wait for a request of a daemon thread."""
        if (process := self._process) is not None:
            process.kill()

    def _after_fork(self) -> None:
        """Leave the process to the parent; this one starts its own."""
        self._of_parents.append(self._process)  # its destructor would expect to be the parent
        self._process, self._lock = None, threading.Lock()


def main(arguments: Sequence[str]) -> None:
    """Answer requests until standard input ends; prints of libraries do not reach the answers."""
    memory, name = arguments
    module, _, function = name.partition(":")
    reply_stream = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when the worker ends
    limits = ProcessLimits(int(memory), _UNLIMITED_SECONDS)
    handler = getattr(importlib.import_module(module), function)
    apply_limits(limits)
    for line in sys.stdin.buffer:
        seconds, request = json.loads(line)
        _limit_processor_time(seconds)
        try:
            reply = {"answer": handler(request)}
        except MemoryError:
            reply = {"failed": out_of_memory_message(limits.memory_bytes), "code": "memory-limit"}
        except Exception as error:
            reply = {
                "failed": f"{type(error).__name__}: {error}"[:MAX_OUTPUT_CHARS],
                "code": "process-failed",
            }
        _limit_processor_time(0)
        print(json.dumps(reply), file=reply_stream, flush=True)


def _limit_processor_time(seconds: float) -> None:
    """End this process after `seconds` of processor time; 0: never."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
