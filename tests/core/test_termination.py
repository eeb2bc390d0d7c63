"""SIGTERM becomes an error, at once or when a context has ended by itself.

Each test runs in a Python of its own: signals concern a whole process, whose libraries may handle them too.
"""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.quick, pytest.mark.skipif(os.name == "nt", reason="signals as POSIX has them")]

_IMPORTS = """
import os, signal, sys
from smelt.core import system
from smelt.core.system import TerminatedError, sigterm_as_error, termination_deferred

def terminate():
    try:
        signal.raise_signal(signal.SIGTERM)  # handled before it returns; os.kill may return earlier
    except TerminatedError:
        return "raised"
    return "returned"
"""


def _output(code):
    """Return the lines that the code prints in a new process."""
    program = _IMPORTS + textwrap.dedent(code)
    return subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()


def test_sigterm_raises_at_once_and_is_ignored_during_exit():
    assert _output("""
        with sigterm_as_error():
            print(system.interrupted_exit_code(), terminate())
            print(terminate(), system.interrupted_exit_code())
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, system.interrupted_exit_code())
    """) == ["130 raised", "returned 143", "True 130"]


@pytest.mark.parametrize(("count", "error"), [(1, None), (2, None), (1, "ValueError")])
def test_deferred_sigterm_raises_after_context_and_second_one_at_once(count, error):
    assert (
        _output(f"""
        try:
            with sigterm_as_error(), termination_deferred():
                for number in range({count}):
                    print(number, terminate())
                if {error}: raise {error}  # after which a run would go on
        except TerminatedError:
            print("raised after")
    """)
        == [["0 returned", "raised after"], ["0 returned", "1 raised", "raised after"]][count - 1]
    )


def test_sigterm_ends_forked_child_without_handler():
    assert _output("""
        with sigterm_as_error():
            child = os.fork()
            if not child: os.kill(os.getpid(), signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """) == [str(-signal.SIGTERM)]


def test_ignored_sigterm_is_still_ignored():
    assert _output("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with sigterm_as_error():
            print(terminate())
    """) == ["returned"]
