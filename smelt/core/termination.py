"""SIGTERM ends a command as Ctrl-C does, with exit code 143; a training first writes a checkpoint.

Slurm, Kubernetes and systemd send it some seconds before they kill a process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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


def is_termination_requested() -> bool:
    """Return whether this process has received SIGTERM."""
    return _state.requested


def interrupted_exit_code() -> int:
    """Return the exit code of an interrupted command: 143 after SIGTERM, else 130."""
    return TERMINATED_EXIT_CODE if _state.requested else INTERRUPTED_EXIT_CODE
