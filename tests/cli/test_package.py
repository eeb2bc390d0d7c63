"""The command `smelt package`."""

import errno
import os
import shutil
import subprocess
import sys

import pytest

from smelt.api.package import PACKAGE_FORMATS
from smelt.export.package import write_package
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.graphs import exported_artifacts, standalone_packages
from tests.support.models import tiny


def test_package_command_writes_and_prints_how_to_run(tmp_path):
    out = tmp_path / "p"
    done = harness.smelt("package", exported_artifacts.exported_artifact("translator"), "--out", out, code=0)
    assert f"Wrote {out} (" in done.output
    install, run = done.output.splitlines()[-2:]
    assert install.endswith(f": (cd {out} && pip install --no-deps -r requirements.txt)")
    assert run == f'Run it: (cd {out} && python infer.py "TEXT")'
    assert (out / "infer.py").is_file()


def test_help_lists_package_formats():
    done = harness.smelt("package", "--help", code=0)
    for name, form in PACKAGE_FORMATS.items():
        assert f"{name}  " in done.output
        assert form.summary in " ".join(done.output.split())
    assert max(map(len, done.output.splitlines())) <= 80


def test_errors_have_exit_code_2(tmp_path):
    artifact = exported_artifacts.exported_artifact("translator")

    def refused(*arguments):
        return command_error(harness.smelt("package", *arguments, code=2))

    error = refused(artifact, "--format", "x")
    assert (error.code, "'x'" in str(error)) == ("unknown-package-format", True)
    assert refused(tmp_path / "none").code == "missing-folder"
    (tmp_path / "mine").touch()
    for empty_path in ("", "  "):
        assert refused(artifact, "--out", empty_path).code == "empty-text"
    error = refused(artifact, "--out", tmp_path / "mine" / "x")
    assert (error.code, str(tmp_path / "mine") in str(error)) == ("parent-not-a-folder", True)
    assert refused(artifact, "--out", tmp_path).code == "folder-not-empty"


def test_full_disk_has_exit_code_1(tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(write_package, "fsync_path", full)
    done = harness.smelt(
        "package", exported_artifacts.exported_artifact("translator"), "--out", tmp_path / "p", code=1
    )
    assert "error[disk-full]: " in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder_is_rejected(tmp_path):
    tmp_path.chmod(0o500)
    done = harness.smelt(
        "package", exported_artifacts.exported_artifact("translator"), "--out", tmp_path / "p", code=2
    )
    assert command_error(done).code == "unwritable-path"


@pytest.mark.parametrize("command", ["predict", "bench", "eval"])
def test_damaged_package_error_names_file_and_remedy(command, tmp_path):
    folder = shutil.copytree(standalone_packages.standalone_package("translator"), tmp_path / "p")
    data = tiny.write_pairs(tmp_path / "rows.jsonl", 2)
    arguments = {"predict": ["two dogs"], "bench": [], "eval": ["--data", data]}[command]
    (folder / "generate.onnx").write_bytes(b"")
    for code in ("changed-file", "missing-file"):
        error = command_error(harness.smelt(command, folder, *arguments, code=2))
        assert error.code == code
        assert str(folder / "generate.onnx") in str(error)
        assert "package" in str(error)  # to be copied again, where an artifact is made again
        (folder / "generate.onnx").unlink(missing_ok=True)


def test_package_in_other_format_is_recognized(tmp_path):
    out = tmp_path / "p"
    harness.smelt(
        "package",
        exported_artifacts.exported_artifact("classifier"),
        "--format",
        "optimum",
        "--out",
        out,
        code=0,
    )
    for command in (["predict", out, "a"], ["bench", out], ["package", out]):
        error = command_error(harness.smelt(*command, code=2))
        assert error.code == "not-an-artifact"
        assert "'optimum'" in str(error)
    (out / "README.md").unlink()
    error = command_error(harness.smelt("predict", out, "a", code=2))
    assert error.code == "not-an-artifact"
    assert "'optimum'" not in str(error)


def test_package_with_pycache_is_accepted(tmp_path):
    folder = shutil.copytree(standalone_packages.standalone_package("classifier"), tmp_path / "p")
    write = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", "import infer"], cwd=folder, check=True, env=write)
    assert (folder / "__pycache__").is_dir()
    harness.smelt("predict", folder, "two dogs", code=0)
