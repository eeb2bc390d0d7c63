"""Runs native libraries in a separate process, with limits of memory and time.

The effects of a hostile file on a parser or a runtime (a crash, unlimited memory or time) are
limited to that process, and the caller gets an error. A module that runs so has `subprocess_main(arguments)`,
which returns a JSON-able value, or another function of that kind, written `module:function`.

The limited memory is what a process may write to (RLIMIT_DATA): reserved addresses do not
count, of which runtimes take many gigabytes. Where the system has no such limit (Windows) only the
time is limited.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from smelt.core.system import available_bytes, child_environment, python_command

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_WALL_TIME_FACTOR = 6  # wall time per processor time: the machine may have other work
_MAX_OUTPUT_CHARS = 300  # letters of a process's output


class ProcessLimits(NamedTuple):
    """memory_bytes: of data, beyond which an allocation fails. seconds: of processor time."""

    memory_bytes: int
    seconds: float


class IsolatedProcessError(Exception):
    """The process failed; the message is why, as the end of a sentence.

    code: time-limit, memory-limit, process-crashed, process-failed.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def run_isolated(module: str, arguments: Sequence[str], limits: ProcessLimits) -> Any:
    """Return the result of `subprocess_main(arguments)` of `module`, run in a separate process.

    Raises:
        IsolatedProcessError: it exceeded a limit, or crashed.
    """
    limited = (str(limits.memory_bytes), str(limits.seconds))
    command = python_command("-m", __name__, *limited, module, *arguments)
    environment = child_environment(**dict.fromkeys(_ONE_THREAD, "1"))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env=environment,
            stdin=subprocess.DEVNULL, timeout=max(1.0, limits.seconds) * _WALL_TIME_FACTOR,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise IsolatedProcessError(
            f"it took more than {_WALL_TIME_FACTOR * limits.seconds:.0f} s", "time-limit"
        ) from error
    except OSError as error:
        raise IsolatedProcessError(f"no process could be started: {error}", "process-failed") from error
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        found = json.loads(lines[-1])
        if "failed" in found:
            raise IsolatedProcessError(found["failed"], found["code"])
        return found["answer"]
    raise IsolatedProcessError(*_failure_reason(done.returncode, done.stderr, limits))


def _failure_reason(code: int, stderr: str, limits: ProcessLimits) -> tuple[str, str]:
    """Return why a process failed, and its code."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL) if os.name != "nt" else False:
        return f"it took more than {limits.seconds:.0f} s of processor time", "time-limit"
    if any(word in stderr for word in ("bad_alloc", "MemoryError", "Cannot allocate memory")):
        return _out_of_memory_message(limits.memory_bytes), "memory-limit"
    name = signal.Signals(-code).name if code < 0 else f"code {code}"
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "nothing")
    return f"its process crashed ({name}); its last output: {last[:_MAX_OUTPUT_CHARS]}", "process-crashed"


def _out_of_memory_message(limit: int) -> str:
    return f"it requested more than {limit / 1e9:.1f} GB of memory"


def _apply_limits(limits: ProcessLimits) -> None:
    """Set the limits; unsupported ones are skipped."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for kind, value in (
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_CPU, max(1, round(limits.seconds))),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(kind)
        soft = value if most == resource.RLIM_INFINITY else min(value, most)
        try:
            resource.setrlimit(kind, (soft, most))
        except (OSError, ValueError):  # macOS refuses some
            continue


def raise_memory_limit(size_bytes: int) -> None:
    """Raise this process's memory limit by that size, up to half of the free memory."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, most = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + min(size_bytes, available_bytes() // 2)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted if most < 0 else min(wanted, most), most))


def isolated_main(arguments: Sequence[str]) -> None:
    """Run one request; libraries print to standard output, so the answer uses a separate descriptor."""
    memory, seconds, name, *rest = arguments
    module, _, function = name.partition(":")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    limits = ProcessLimits(int(memory), float(seconds))
    _apply_limits(limits)
    try:
        found: dict[str, Any] = {
            "answer": getattr(importlib.import_module(module), function or "subprocess_main")(rest)
        }
    except MemoryError:
        found = {"failed": _out_of_memory_message(limits.memory_bytes), "code": "memory-limit"}
    print(json.dumps(found), file=answers, flush=True)
    os._exit(0)  # a native library may fail at exit


if __name__ == "__main__":
    isolated_main(sys.argv[1:])
