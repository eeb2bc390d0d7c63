"""Work of native libraries in a process of its own, with limits of memory and time.

What a hostile file does to a parser or a runtime (a crash, memory without end, work without end) then happens
to that process alone, and the caller hears of it. A module that is asked so has `answer(arguments)`, which
returns what can be written as JSON.

The memory that counts is what a process may write to (RLIMIT_DATA): addresses that are only kept free are
none of it, of which runtimes take many gigabytes. Where the system knows no such limit (Windows) only the
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

from smelt.core.child_process import child_environment, python_command
from smelt.core.memory import available_bytes

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_WAITS = 6  # times the processor time, by the clock: the machine may have other work
_KEPT = 300  # letters of what a process said


class Limits(NamedTuple):
    """memory_bytes: of data, beyond which an allocation fails. seconds: of the processor."""

    memory_bytes: int
    seconds: float


class FailedError(Exception):
    """The process gave no answer; the message says why, as the end of a sentence.

    code: time-limit, memory-limit, process-crashed, process-failed.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def ask(module: str, arguments: Sequence[str], limits: Limits) -> Any:
    """Return what `answer(arguments)` of `module` returns, asked in a process of its own.

    Raises:
        FailedError: it ran into a limit, or crashed.
    """
    limited = (str(limits.memory_bytes), str(limits.seconds))
    command = python_command("-m", __name__, *limited, module, *arguments)
    environment = child_environment(**dict.fromkeys(_ONE_THREAD, "1"))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env=environment,
            stdin=subprocess.DEVNULL, timeout=max(1.0, limits.seconds) * _WAITS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"it took more than {_WAITS * limits.seconds:.0f} s", "time-limit") from error
    except OSError as error:
        raise FailedError(f"no process could be started: {error}", "process-failed") from error
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        found = json.loads(lines[-1])
        if "failed" in found:
            raise FailedError(found["failed"], found["code"])
        return found["answer"]
    raise FailedError(*_why(done.returncode, done.stderr, limits))


def _why(code: int, said: str, limits: Limits) -> tuple[str, str]:
    """Return why a process ended so, and its code."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL) if os.name != "nt" else False:
        return f"it took more than {limits.seconds:.0f} s of processor time", "time-limit"
    if any(word in said for word in ("bad_alloc", "MemoryError", "Cannot allocate memory")):
        return _no_memory(limits.memory_bytes), "memory-limit"
    name = signal.Signals(-code).name if code < 0 else f"code {code}"
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing")
    return f"its process crashed ({name}); it said: {last[:_KEPT]}", "process-crashed"


def _no_memory(limit: int) -> str:
    return f"it asked for more than {limit / 1e9:.1f} GB of memory"


def _limit(limits: Limits) -> None:
    """Take the limits on; what the system does not know is left out."""
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


def allow_more(size_bytes: int) -> None:
    """Let this process have so much more memory, as far as the half of what is free."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, most = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + min(size_bytes, available_bytes() // 2)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted if most < 0 else min(wanted, most), most))


def main(arguments: Sequence[str]) -> None:
    """Answer one question; libraries print to standard output, so the answer gets a descriptor of its own."""
    memory, seconds, module, *rest = arguments
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    limits = Limits(int(memory), float(seconds))
    _limit(limits)
    try:
        found: dict[str, Any] = {"answer": importlib.import_module(module).answer(rest)}
    except MemoryError:
        found = {"failed": _no_memory(limits.memory_bytes), "code": "memory-limit"}
    print(json.dumps(found), file=answers, flush=True)
    os._exit(0)  # a native library may fail once more while it is taken down


if __name__ == "__main__":
    main(sys.argv[1:])
