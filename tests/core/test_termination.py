"""SIGTERM becomes an error, at once or when a context has ended by itself."""

import os
import signal
import subprocess
import sys

import pytest

from smelt.core import system
from smelt.core.system import TerminatedError, sigterm_as_error, termination_deferred

pytestmark = [pytest.mark.quick, pytest.mark.skipif(os.name == "nt", reason="signals as POSIX has them")]


def _terminate():
    signal.raise_signal(signal.SIGTERM)  # handled before it returns; os.kill may return earlier


def test_sigterm_raises_at_once_and_is_ignored_during_exit():
    with sigterm_as_error():
        assert system.interrupted_exit_code() == 130
        with pytest.raises(TerminatedError):
            _terminate()
        _terminate()
        assert system.interrupted_exit_code() == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert system.interrupted_exit_code() == 130


def test_deferred_sigterm_raises_after_context_and_second_one_at_once():
    reached = []

    def work(times, error=None):
        with sigterm_as_error(), termination_deferred():
            for number in range(times):
                _terminate()
                reached.append(number)
            if error is not None:
                raise error

    for arguments in ((1,), (2,), (1, ValueError())):  # an error, after which a run would go on
        with pytest.raises(TerminatedError):
            work(*arguments)
    assert reached == [0, 0, 0]


def test_sigterm_ends_forked_child_without_handler():
    code = (
        "import os, signal\n"
        "from smelt.core.system import sigterm_as_error\n"
        "with sigterm_as_error():\n"
        "    child = os.fork()\n"
        "    if not child: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "-15\n"


def test_ignored_sigterm_is_still_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_as_error():
            _terminate()
    finally:
        signal.signal(signal.SIGTERM, before)
