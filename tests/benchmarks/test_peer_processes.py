"""peers.py's processes: why one failed, environments of another processor, CTranslate2's vocabulary map."""

import json
import signal
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
from peer_systems import process
from peer_systems.systems import ENVIRONMENTS, System

from smelt.generation.backend import Batch
from smelt.generation.config import SHORTLIST_FILE, make_shortlist, write_shortlist

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


def test_vocabulary_map_has_candidates_of_shortlist(tmp_path, monkeypatch):
    """CTranslate2 reads a line per source token; the tokens of the line without one are always candidates."""
    monkeypatch.setitem(sys.modules, "ctranslate2", ModuleType("ctranslate2"))
    from peer_systems.ctranslate2_worker import vocabulary_map

    names = {0: "</s>", 1: "a", 2: "b", 3: "c", 4: "d", 5: "e"}
    shortlist = make_shortlist(
        np.array([[0, 0], [1, 3], [2, 2], [4, 5], [0, 0], [1, 5]]), np.array([0, 1]), 6
    )
    write_shortlist(shortlist, tmp_path)
    lines = vocabulary_map(tmp_path / SHORTLIST_FILE, names).splitlines()
    table = {source: set(targets.split(" ")) for source, targets in (line.split("\t") for line in lines)}
    for row in ([1, 0], [2, 3, 0], [5, 4, 1, 0]):
        ids = np.array([row])
        (allowed,) = shortlist.allowed_tokens(Batch(ids, np.ones_like(ids)), 6)
        candidates = table[""].union(*(table[names[token]] for token in row))
        assert candidates == {names[int(token)] for token in allowed.nonzero()[0]}
