"""This machine and its Python: free memory, garbage collection, installed packages, child processes, SIGTERM.

Optional packages are checked for a sufficient version without importing them.

Child processes import nothing from the current folder. `python -m MODULE` and `python -c CODE` put it first
on `sys.path`, and it is often a download: a `json.py` or `torch.py` in it would run.

SIGTERM, which Slurm, Kubernetes and systemd send before they kill a process, ends a command as Ctrl-C does,
with exit code 143; a training first writes a checkpoint.

Native libraries run in a separate process, with limits of memory and time (`run_isolated`).
The effects of a hostile file on a parser or a runtime (a crash, unlimited memory or time) are
limited to that process, and the caller gets an error. A module that runs so has `subprocess_main(arguments)`,
which returns a JSON-able value, or another function of that kind, written `module:function`.

The limited memory is what a process may write to (RLIMIT_DATA): reserved addresses do not
count, of which runtimes take many gigabytes. Where the system has no such limit (Windows) only the
time is limited.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smelt.core.errors import MissingDependencyError, RunError

# (limit, usage, file with the reclaimable cache) of a container: cgroup v2, then v1.
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that a process can still allocate: memory and swap, within its container's limit."""
    import psutil

    system_free = int(psutil.virtual_memory().available) + int(psutil.swap_memory().free)
    container_free = _container_free_bytes(cgroup)
    return system_free if container_free is None else min(system_free, container_free)


def memory_limit_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this machine's processes can ever have: memory and swap, within the container."""
    import psutil

    swap = int(psutil.swap_memory().total)
    physical_limit = int(psutil.virtual_memory().total) + swap
    for name, _ in _CGROUP_FILES:
        try:
            limit = int((cgroup / name).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
        return min(physical_limit, limit + _container_swap_bytes(cgroup, swap))
    return physical_limit


def _container_swap_bytes(cgroup: Path, swap: int) -> int:
    """Return the part of the machine's swap that the container may use in addition to its memory."""
    with contextlib.suppress(OSError, ValueError):
        return min(swap, int((cgroup / "memory.swap.max").read_text(encoding="ascii")))
    return swap  # no limit of its own


def peak_memory_bytes() -> int:
    """Return the peak memory (resident set, bytes) of this process, since the last `reset_peak_memory`."""
    status = Path("/proc/self/status")
    if status.is_file():
        # not ru_maxrss: on Linux it inherits the forking parent's peak through exec
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import psutil

    peak = getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows
    if peak is not None:
        return int(peak)
    import resource

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # macOS counts in bytes


def reset_peak_memory() -> bool:
    """Set the peak of `peak_memory_bytes` to the present memory; return whether the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # see proc(5)
    except OSError:
        return False
    return True


def require_memory(needed_bytes: int, purpose: str, remedy: str, free_bytes: int | None = None) -> None:
    """Require memory for work.

    Args:
        needed_bytes: a lower bound of the needed memory.
        purpose: the work, for the message.
        remedy: what the user can do, a sentence.
        free_bytes: of the device that does the work (default: `available_bytes`).

    Raises:
        RunError: not enough memory.
    """
    free = available_bytes() if free_bytes is None else free_bytes
    if needed_bytes > free:
        raise RunError(
            f"{purpose} needs at least {needed_bytes / 1e9:.1f} GB more memory, but only"
            f" {free / 1e9:.1f} GB are free. {remedy}",
            code="out-of-memory",
        )


def _container_free_bytes(cgroup: Path) -> int | None:
    for limit_name, used_name in _CGROUP_FILES:
        try:
            limit = int((cgroup / limit_name).read_text(encoding="ascii"))
            used_bytes = int((cgroup / used_name).read_text(encoding="ascii"))
            return max(0, limit - used_bytes + _page_cache_bytes(cgroup / limit_name))
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
    return None


def _page_cache_bytes(limit: Path) -> int:
    """Return the bytes of the group's file cache, which the kernel reclaims when needed."""
    for line in (limit.parent / "memory.stat").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable Python's garbage collector inside the context; if it was disabled before, it stays so."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def installed_version(package: str) -> str | None:
    """Return the release of an installed package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def package_problem(package: str, oldest: str) -> str | None:
    """Return the problem if `package` is not installed at release `oldest` or later, else None."""
    installed = installed_version(package)
    if installed is None:
        return f"{package} {oldest} or later is needed, but it is not installed"
    if _release_number(installed) < _release_number(oldest):
        return f"{package} {oldest} or later is needed, but {installed} is installed"
    return None


def install_command(package: str, oldest: str) -> str:
    """Return the command that installs `package`."""
    return f"pip install '{package}>={oldest}'"


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages in `names` that are installed."""
    versions = {name: installed_version(name) for name in names}
    return {name: version for name, version in versions.items() if version is not None}


def require_package(package: str, oldest: str, feature: str) -> None:
    """Require `package` at release `oldest` or a later one.

    Args:
        package: its name in the package index.
        oldest: such as `0.48`; the first two numbers of a release are compared.
        feature: the feature that needs it, for the message.

    Raises:
        MissingDependencyError: it is not installed, or too old.
    """
    problem = package_problem(package, oldest)
    if problem is not None:
        raise MissingDependencyError(
            f"{feature}: {problem}. {install_command(package, oldest)}", code="not-installed"
        )


def _release_number(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"  # also for processes that a child starts (multiprocessing, compilers)


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this Python with `arguments` (`-m ...`, `-c ...`) on a safe path."""
    return [sys.executable, "-P", *arguments]


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's environment variables with `more`, for a child process on a safe path."""
    return {**os.environ, SAFE_PATH_VARIABLE: "1", **more}


_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
WALL_TIME_FACTOR = 6  # wall time per processor time: the machine may have other work
MAX_OUTPUT_CHARS = 300  # letters of a process's output


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
    limit_arguments = (str(limits.memory_bytes), str(limits.seconds))
    command = python_command("-m", __name__, *limit_arguments, module, *arguments)
    environment = child_environment(**dict.fromkeys(_ONE_THREAD, "1"))
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env=environment,
            stdin=subprocess.DEVNULL, timeout=max(1.0, limits.seconds) * WALL_TIME_FACTOR,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise IsolatedProcessError(
            f"it took more than {WALL_TIME_FACTOR * limits.seconds:.0f} s", "time-limit"
        ) from error
    except OSError as error:
        raise IsolatedProcessError(f"no process could be started: {error}", "process-failed") from error
    lines = completed.stdout.splitlines()
    if completed.returncode == 0 and lines:
        reply = json.loads(lines[-1])
        if "failed" in reply:
            raise IsolatedProcessError(reply["failed"], reply["code"])
        return reply["answer"]
    raise IsolatedProcessError(*failure_reason(completed.returncode, completed.stderr, limits))


def failure_reason(code: int, stderr: str, limits: ProcessLimits) -> tuple[str, str]:
    """Return why a process failed, and the code of its `IsolatedProcessError`."""
    if os.name != "nt" and code in (-signal.SIGXCPU, -signal.SIGPROF, -signal.SIGKILL):
        return f"it took more than {limits.seconds:.0f} s of processor time", "time-limit"
    if any(marker in stderr for marker in ("bad_alloc", "MemoryError", "Cannot allocate memory")):
        return out_of_memory_message(limits.memory_bytes), "memory-limit"
    name = signal.Signals(-code).name if code < 0 else f"code {code}"
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "nothing")
    return f"its process crashed ({name}); its last output: {last[:MAX_OUTPUT_CHARS]}", "process-crashed"


def out_of_memory_message(limit: int) -> str:
    """Return that a process requested more than `limit` bytes, as the end of a sentence."""
    return f"it requested more than {limit / 1e9:.1f} GB of memory"


def apply_limits(limits: ProcessLimits) -> None:
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
        new_limit = soft + min(size_bytes, available_bytes() // 2)
        resource.setrlimit(resource.RLIMIT_DATA, (new_limit if most < 0 else min(new_limit, most), most))


def isolated_main(arguments: Sequence[str]) -> None:
    """Run one request; libraries print to standard output, so the answer uses a separate descriptor."""
    memory, seconds, name, *arguments_left = arguments
    module, _, function = name.partition(":")
    reply_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    limits = ProcessLimits(int(memory), float(seconds))
    apply_limits(limits)
    try:
        reply: dict[str, Any] = {
            "answer": getattr(importlib.import_module(module), function or "subprocess_main")(arguments_left)
        }
    except MemoryError:
        reply = {"failed": out_of_memory_message(limits.memory_bytes), "code": "memory-limit"}
    print(json.dumps(reply), file=reply_stream, flush=True)
    os._exit(0)  # a native library may fail at exit


if __name__ == "__main__":
    isolated_main(sys.argv[1:])


INTERRUPTED_EXIT_CODE, TERMINATED_EXIT_CODE = 130, 143  # 128 + the number of the signal


class TerminatedError(KeyboardInterrupt):
    """The process received SIGTERM."""


@dataclass
class _State:
    """requested: SIGTERM was received. deferrals: contexts that end by themselves then."""

    process: int = 0
    requested: bool = False
    deferrals: int = 0


_state = _State()


@contextlib.contextmanager
def sigterm_as_error() -> Iterator[None]:
    """Raise `TerminatedError` in the main thread if this process receives SIGTERM inside the context.

    Nothing changes in other threads, inside another such context, or where SIGTERM is ignored.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    _state.process, _state.requested, _state.deferrals = os.getpid(), False, 0
    signal.signal(signal.SIGTERM, _handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _state.requested = False


def _handle(number: int, frame: Any) -> None:
    if os.getpid() != _state.process:  # a fork, which its parent ends
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    was_requested, _state.requested = _state.requested, True
    if was_requested != (_state.deferrals > 0):
        return  # deferred, or the process is ending already
    raise TerminatedError


@contextlib.contextmanager
def termination_deferred() -> Iterator[None]:
    """Let the code inside the context end by itself after a first SIGTERM; then raise `TerminatedError`."""
    _state.deferrals += 1
    try:
        yield
    finally:
        _state.deferrals -= 1
        if _state.requested:
            raise TerminatedError  # also instead of an error, after which a run would go on


@contextlib.contextmanager
def sigterm_handler_kept() -> Iterator[None]:
    """Undo what a library's call inside the context makes of the handler of SIGTERM, as Ray's `init` does."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def is_termination_requested() -> bool:
    """Return whether this process has received SIGTERM."""
    return _state.requested


def interrupted_exit_code() -> int:
    """Return the exit code of an interrupted command: 143 after SIGTERM, else 130."""
    return TERMINATED_EXIT_CODE if _state.requested else INTERRUPTED_EXIT_CODE
