"""Work in a process of its own ends at its limits, and a crash there is a sentence here."""

import sys
from pathlib import Path

import pytest

from smelt.core.system import IsolatedProcessError, ProcessLimits, run_isolated

MODULE = """
import os, signal, sys
def subprocess_main(arguments):
    what = arguments[0]
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "memory":
        return len(bytearray(3_000_000_000))
    while what == "time":
        pass
    print("noise")
    return arguments
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asked_module.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_isolated_result_is_returned_despite_printed_output() -> None:
    assert run_isolated("asked_module", ["a", "b"], ProcessLimits(1_000_000_000, 10)) == ["a", "b"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
@pytest.mark.parametrize(
    ("what", "code"), [("crash", "process-crashed"), ("memory", "memory-limit"), ("time", "time-limit")]
)
def test_isolated_failures_are_reported_with_code(what: str, code: str) -> None:
    with pytest.raises(IsolatedProcessError, check=lambda error: error.code == code):
        run_isolated("asked_module", [what], ProcessLimits(1_000_000_000, 1))
