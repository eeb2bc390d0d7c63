"""Who may read what a run writes is what the umask says: everything, by every stage, in store and run."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import harness
from tests.support.models import tiny
from tests.support.standins import fake_workers

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}
stages:
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 1, precision: fp32}
  - quantize: {}
  - onnx: {}
score: {quality: [accuracy], latency: {batch_sizes: [1], threads: 1, rounds: 3, texts: 2, min_round_ms: 1}}
"""
SHORT = """
model: m
task: text-classification
data: {test: data.jsonl}
stages:
  - quantize: {}
  - onnx: {}
score: {quality: [accuracy], latency: false}
"""
READ = """
import os, sys
from pathlib import Path
from smelt.core.artifact import read_artifact
os.setgid(65534); os.setuid(65534)
for folder in sys.argv[1:]:
    read_artifact(Path(folder)).verify()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    tiny.write_bert(folder / "m")
    (folder / "m" / "model.safetensors").chmod(
        0o600
    )  # as safetensors writes it, and as others may keep theirs
    tiny.write_labeled(folder / "data.jsonl", 8)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "short.yaml").write_text(SHORT)
    return folder


def _arguments(home, recipe, out):
    options = ["--out", str(out / "r"), "--store", str(out / "s")]
    return ["run", str(home / recipe), "--quiet", *options]


def _require_modes(folder, umask):
    """Require of every file and folder the permissions of a new one; return the files' names."""
    wrong_modes, names = {}, set()
    for path in (folder / "r", folder / "s", *folder.rglob("*")):
        if path.is_symlink():
            continue
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        if (mode := stat.S_IMODE(path.stat().st_mode)) != expected:
            wrong_modes[str(path.relative_to(folder))] = f"{mode:o}"
        if path.is_file():
            names.add(path.name)
    assert wrong_modes == {}
    return names


@pytest.mark.parametrize(("umask", "recipe"), [(0o077, "short.yaml"), (0o002, "recipe.yaml")])
def test_files_of_run_follow_umask(home, tmp_path, umask, recipe, monkeypatch):
    fake_workers.install(monkeypatch)  # the times are written by the run; who measures them writes nothing
    out = tmp_path / "out"
    before = os.umask(umask)
    try:
        out.mkdir()
        result = harness.smelt(*_arguments(home, recipe, out))
    finally:
        os.umask(before)
    assert result.exit_code == 0, result.output
    names = _require_modes(out, umask)
    written = {"recipe.yaml", "report.json", "report.md", "report.html", "log.txt"}
    written |= {
        "manifest.json",
        "structure.json",
        "config.json",
        "model.safetensors",
        "model.onnx",
        "vocab.txt",
    }
    assert written <= names


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_user_can_read_deployed_artifact(home):
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        out.chmod(0o755)
        before = os.umask(0o022)
        try:
            shutil.copytree(home, out / "home")
            result = harness.smelt(*_arguments(out / "home", "short.yaml", out))
        finally:
            os.umask(before)
        assert result.exit_code == 0, result.output
        artifacts = [str(path) for path in (out / "r" / "artifacts").iterdir()]
        assert len(artifacts) == 3
        command = [sys.executable, "-c", READ, *artifacts]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
        assert done.returncode == 0, done.stderr
