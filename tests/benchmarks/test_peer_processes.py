"""peers.py's processes: why one failed, and environments that another processor cannot run."""

import json
import signal
import subprocess
import sys

import pytest
from peer_systems import process
from peer_systems.systems import ENVIRONMENTS, System

pytestmark = pytest.mark.quick


def test_killed_maker_is_reported_with_its_signal(tmp_path, monkeypatch):
    """llama.cpp compiled for another processor dies without a word."""
    program = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr(process, "command_of", lambda *arguments: [sys.executable, "-c", program])
    system = System("llama", "llamacpp-Q8_0", "llamacpp", "llamacpp_worker", "Q8_0", "int8")
    with pytest.raises(process.SystemUnavailableError, match=signal.SIGILL.name):
        process.make(tmp_path, system, {"files": str(tmp_path / "files")}, 1)


@pytest.mark.parametrize(("environment", "made_again"), [("llamacpp", True), ("stock", False)])
def test_environment_of_another_processor_is_compiled_again(tmp_path, monkeypatch, environment, made_again):
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(process.subprocess, "run", run)
    monkeypatch.setattr(process.venv, "create", lambda folder, **_: folder.mkdir(exist_ok=True))
    for flags in ("avx2", "avx2", "avx512"):
        monkeypatch.setattr(process, "processor_flags", lambda flags=flags: flags)
        process.create_environment(tmp_path, environment, 1)
        (tmp_path / environment / flags).touch()
    assert len(commands) == 1 + made_again
    assert all(("--no-cache-dir" in command) is made_again for command in commands)
    assert (tmp_path / environment / "avx2").exists() is not made_again
    recorded = json.loads((tmp_path / environment / process.MADE_FILE).read_text())
    assert set(ENVIRONMENTS[environment]) <= set(recorded)
