"""The command `smelt package`."""

import errno
import os
import shutil
import subprocess
import sys

import exported
import harness
import packaged
import pytest
import tiny

from smelt.export.package import new_folder
from smelt.export.package.registry import FORMS


def test_it_writes_and_says_how_to_run_it(tmp_path):
    out = tmp_path / "p"
    done = harness.smelt("package", exported.artifact("translator"), "--out", out, code=0)
    assert f"Wrote {out} (" in done.output
    install, run = done.output.splitlines()[-2:]
    assert install == f"Install what it needs: (cd {out} && pip install --no-deps -r requirements.txt)"
    assert run == f'Run it: (cd {out} && python infer.py "TEXT")'
    assert (out / "infer.py").is_file()


def test_the_help_lists_the_forms():
    done = harness.smelt("package", "--help", code=0)
    for name, form in FORMS.items():
        assert f"{name}  " in done.output
        assert form.summary in " ".join(done.output.split())
    assert max(map(len, done.output.splitlines())) <= 80


def test_mistakes_are_told_with_exit_code_2(tmp_path):
    artifact = exported.artifact("translator")
    assert "no form 'x'" in harness.smelt("package", artifact, "--for", "x", code=2).output
    assert "no such folder" in harness.smelt("package", tmp_path / "none", code=2).output
    (tmp_path / "mine").touch()
    for nothing in ("", "  "):
        said = harness.smelt("package", artifact, "--out", nothing, code=2).output
        assert "--out: it is empty. Name the folder to write" in said
    above = harness.smelt("package", artifact, "--out", tmp_path / "mine" / "x", code=2).output
    assert f"{tmp_path / 'mine'}: this is a file" in " ".join(above.split())
    assert "not empty" in harness.smelt("package", artifact, "--out", tmp_path, code=2).output


def test_a_full_disk_is_told_with_exit_code_1(tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(new_folder, "flush", full)
    done = harness.smelt("package", exported.artifact("translator"), "--out", tmp_path / "p", code=1)
    assert "the disk is full" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_must_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    done = harness.smelt("package", exported.artifact("translator"), "--out", tmp_path / "p", code=2)
    assert "Permission denied" in done.output


@pytest.mark.parametrize("command", ["predict", "bench", "eval"])
def test_a_damaged_package_says_which_file_and_what_to_do(command, tmp_path):
    folder = shutil.copytree(packaged.written("translator"), tmp_path / "p")
    data = tiny.pairs(tmp_path / "rows.jsonl", 2)
    more = {"predict": ["two dogs"], "bench": [], "eval": ["--data", data]}[command]
    (folder / "generate.onnx").write_bytes(b"")
    said = " ".join(harness.smelt(command, folder, *more, code=2).output.split())
    assert f"{folder / 'generate.onnx'}: its bytes are not those that were written. Copy the package" in said
    (folder / "generate.onnx").unlink()
    said = " ".join(harness.smelt(command, folder, *more, code=2).output.split())
    assert f"{folder / 'generate.onnx'}: this file of the artifact is missing. Copy the package again" in said


def test_a_package_for_others_is_told_from_what_is_none(tmp_path):
    out = tmp_path / "p"
    harness.smelt("package", exported.artifact("classifier"), "--for", "optimum", "--out", out, code=0)
    for command in (["predict", out, "a"], ["bench", out], ["package", out]):
        said = " ".join(harness.smelt(*command, code=2).output.split())
        assert "It is a package of the form 'optimum', which others open" in said
    (out / "README.md").unlink()
    assert "a package of the form" not in harness.smelt("predict", out, "a", code=2).output


def test_a_package_that_was_used_is_still_one(tmp_path):
    folder = shutil.copytree(packaged.written("classifier"), tmp_path / "p")
    write = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", "import infer"], cwd=folder, check=True, env=write)
    assert (folder / "__pycache__").is_dir()
    harness.smelt("predict", folder, "two dogs", code=0)
