"""The command `smelt package`."""

import errno
import os

import exported
import harness
import pytest

from smelt.export.package import new_folder
from smelt.export.package.registry import FORMS


def test_it_writes_and_says_how_to_run_it(tmp_path):
    out = tmp_path / "p"
    done = harness.smelt("package", exported.artifact("translator"), "--out", out, code=0)
    assert f"Wrote {out} (" in done.output
    assert f'(cd {out} && python infer.py "TEXT")' in done.output
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
