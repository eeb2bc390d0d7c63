"""A system as a process of its own: setting up its environment, making its files, asking it to work."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_systems.systems import COMPILED, ENVIRONMENTS, TORCH, System

BENCHMARKS = Path(__file__).resolve().parents[1]
MADE_FILE, MISSING_FILE = "made.json", "missing.txt"


class SystemUnavailableError(Exception):
    """A system that cannot be set beside the others, and why."""


def python_of(envs: Path, environment: str) -> str:
    """Return the Python of an environment."""
    return sys.executable if environment == "smelt" else str(envs / environment / "bin" / "python")


def _reason(output: str, status: int) -> str:
    """Return why a command failed: the last line of its output that names an error, and its signal if any."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.split(" ")[0].lower()] or lines or ["no output"]
    ended = f"{signal.Signals(-status).name}: " if status < 0 else ""
    return ended + errors[-1][:300]


def _wanted(environment: str) -> list[str]:
    """Return what an environment is made of: packages, and the processor that some are compiled for."""
    processor = [processor_flags()] if environment in COMPILED else []
    return [*ENVIRONMENTS[environment], *processor]


def processor_flags() -> str:
    """Return what distinguishes processors for a compiler: a hash of their instruction sets."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), platform.machine())
    return hashlib.sha256(flags.encode()).hexdigest()[:16]


def create_environment(envs: Path, environment: str, minutes: float) -> None:
    """Make an environment with the packages of the table, once.

    Raises:
        SystemUnavailableError: pip failed, now or in an earlier call; remove the folder to try again.
    """
    if environment == "smelt":
        return
    folder = envs / environment
    mark, missing = folder / MADE_FILE, folder / MISSING_FILE
    wanted = _wanted(environment)
    if mark.exists() and json.loads(mark.read_text()) == wanted:
        return
    if environment in COMPILED and mark.exists():
        shutil.rmtree(folder)  # made for another processor: pip would keep what it compiled there
    if missing.exists():
        raise SystemUnavailableError(f"not installed: {missing.read_text()}")
    if not Path(python_of(envs, environment)).exists():
        venv.create(folder, with_pip=True, symlinks=True)
    constraint = folder / "constraint.txt"
    constraint.write_text(TORCH + "\n")
    pip = [python_of(envs, environment), "-m", "pip", "install", "-q", "-c", str(constraint)]
    pip += ["--no-cache-dir"] if environment in COMPILED else []  # a cached wheel may be of another processor
    pip += ENVIRONMENTS[environment]
    try:
        done = subprocess.run(pip, check=False, capture_output=True, text=True, timeout=60 * minutes)
        failed = _reason(done.stderr, done.returncode) if done.returncode else ""
    except subprocess.TimeoutExpired:
        failed = f"pip did not end within {minutes:g} minutes"
    if failed:
        missing.write_text(failed)
        raise SystemUnavailableError(f"not installed: {failed}")
    mark.write_text(json.dumps(wanted))


def environment_of(threads: int) -> dict[str, str]:
    """Return a worker's environment: its threads, and no way to fetch anything."""
    variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    offline = {"HF_HUB_OFFLINE": "1", "OLIVE_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(BENCHMARKS)}
    return {**os.environ, **variables, **offline}


def command_of(envs: Path, system: System, what: str, job: dict[str, Any]) -> list[str]:
    """Return the command of a worker that shall `make` or `serve`."""
    module = f"peer_systems.{system.worker}"
    return [python_of(envs, system.environment), "-P", "-W", "ignore", "-m", module, what, json.dumps(job)]


def make(envs: Path, system: System, job: dict[str, Any], minutes: float) -> float:
    """Make a system's files, once; return how many seconds that took.

    Raises:
        SystemUnavailableError: its worker failed, now or in an earlier call; remove its folder to try again.
    """
    files = Path(job["files"])
    mark, missing = files / MADE_FILE, files / MISSING_FILE
    if system.artifact is not None:
        return 0.0
    if mark.exists():
        return float(json.loads(mark.read_text())["seconds"])
    if missing.exists():
        raise SystemUnavailableError(f"not made: {missing.read_text()}")
    files.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command_of(envs, system, "make", job),
            check=False,
            capture_output=True,
            text=True,
            timeout=60 * minutes,
            env=environment_of(2),
        )
        failed = _reason(done.stderr, done.returncode) if done.returncode else ""
    except subprocess.TimeoutExpired:
        failed = f"it did not end within {minutes:g} minutes"
    if failed:
        missing.write_text(failed)
        raise SystemUnavailableError(f"not made: {failed}")
    seconds = time.perf_counter() - began
    mark.write_text(json.dumps({"seconds": seconds}))
    return seconds


class Worker:
    """A system's process, which is blocked on a pipe when it is not its turn.

    Raises:
        SystemUnavailableError: it ended before it was ready, or at work.
    """

    def __init__(self, envs: Path, system: System, job: dict[str, Any], log: Path) -> None:
        self.system, self._log = system, log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command_of(envs, system, "serve", job),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment_of(job["threads"]),
            )
        self.version: str = self._read()["version"]

    def ask(self, case: dict[str, Any], batches: Sequence[Any]) -> dict[str, Any]:
        """Return what `worker.answer` says of these batches."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; reading says why
            print(json.dumps({**case, "batches": batches}), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            reason = _reason(self._log.read_text(errors="replace"), status)
            raise SystemUnavailableError(f"does not run: {reason}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        self._process.wait(60)
