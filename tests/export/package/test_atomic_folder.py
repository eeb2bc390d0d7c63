"""A folder comes into being complete, with normal modes, or not at all."""

import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from smelt.core.errors import InputError, RunError
from smelt.export.package import write_package as module
from smelt.export.package.write_package import atomic_folder, require_empty_destination
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def make(out, inside=lambda folder: (folder / "a").write_text("a")):
    with atomic_folder(out) as folder:
        inside(folder)


def full(number):
    def fails(path, **_):
        raise OSError(number, os.strerror(number), str(path))

    return fails


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_package_files_have_normal_modes_for_any_umask(umask, tmp_path):
    previous_umask = os.umask(umask)
    try:
        with atomic_folder(tmp_path / "p") as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "a").write_text("a")
            (folder / "inner" / "a").chmod(0o700)
    finally:
        os.umask(previous_umask)
    target = tmp_path / "p"
    assert [mode(target), mode(target / "inner"), mode(target / "inner" / "a")] == [0o755, 0o755, 0o644]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_folder_appears_only_when_complete(tmp_path):
    out = tmp_path / "p"
    with atomic_folder(out) as folder:
        (folder / "a").write_text("a")
        assert not out.exists()
        assert folder.parent == out.parent
    assert (out / "a").read_text() == "a"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, InputError])
def test_error_removes_folder_and_created_parents(error, tmp_path):
    def fails(folder):
        (folder / "a").write_text("a")
        raise error("why")

    with pytest.raises(error):
        make(tmp_path / "x" / "y" / "p", fails)
    assert list(tmp_path.iterdir()) == []


def test_existing_parent_folder_is_kept_on_error(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "x" / "y" / "p"):
        raise RuntimeError("why")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert list((tmp_path / "x").iterdir()) == []


@pytest.mark.parametrize(("content", "code"), [
    ("file", "folder-not-empty"), ("folder", "folder-not-empty"), ("link", "not-a-folder"),
    ("file in its place", "not-a-folder"),
])  # fmt: skip
def test_existing_destination_is_not_modified(content, code, tmp_path):
    out = tmp_path / "p"
    if content == "file in its place":
        out.write_text("mine")
    elif content == "link":
        (tmp_path / "real").mkdir()
        out.symlink_to(tmp_path / "real")
    else:
        (out / "mine").mkdir(parents=True) if content == "folder" else out.mkdir()
        (out / "mine").touch()
    paths_before = sorted(tmp_path.rglob("*"))
    with raises_code(code, InputError):
        require_empty_destination(out)
    with raises_code(code, InputError), atomic_folder(out):
        pass
    assert sorted(tmp_path.rglob("*")) == paths_before


def test_empty_destination_is_accepted(tmp_path):
    (tmp_path / "p").mkdir(mode=0o700)
    with atomic_folder(tmp_path / "p") as folder:
        (folder / "a").touch()
    assert (tmp_path / "p" / "a").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_concurrently_created_destination_is_kept(tmp_path):
    out = tmp_path / "p"

    def filled(folder):
        out.mkdir()
        (out / "theirs").touch()

    with raises_code("unwritable-path", InputError):
        make(out, filled)
    assert [path.name for path in out.iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_error_reports_free_space(number, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "fsync_path", full(number))
    with raises_code("disk-full", RunError) as excinfo:
        make(tmp_path / "p")
    assert excinfo.value.file == str(tmp_path / "p")
    assert re.search(r"\([\d,]+ ", str(excinfo.value))
    assert list(tmp_path.iterdir()) == []


def test_disk_full_while_writing_raises_error(tmp_path):
    with raises_code("disk-full", RunError), atomic_folder(tmp_path / "x" / "p") as folder:
        full(errno.ENOSPC)(folder / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])
def test_unwritable_path_is_named(number, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", full(number))
    with raises_code("unwritable-path", InputError) as excinfo:
        make(tmp_path / "p")
    assert excinfo.value.file == str(tmp_path)
    assert os.strerror(number) in str(excinfo.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", ["x/p", "x/y/p"])
def test_file_in_place_of_parent_folder_is_named(out, tmp_path):
    (tmp_path / "x").write_text("mine")
    with raises_code("parent-not-a-folder", InputError) as excinfo:
        require_empty_destination(tmp_path / out)
    assert excinfo.value.file == str(tmp_path / "x")
    assert str(tmp_path / out) in str(excinfo.value)
    with raises_code("parent-not-a-folder", InputError), atomic_folder(tmp_path / out):
        pass
    assert (tmp_path / "x").read_text() == "mine"


def test_current_directory_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in (Path("."), tmp_path):
        with raises_code("current-folder", InputError):
            require_empty_destination(out)


KILLED = """
import os, signal, sys
from pathlib import Path
from smelt.export.package.write_package import atomic_folder
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "a").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_leftovers_of_killed_process_are_removed_by_next_run(tmp_path):
    out = tmp_path / "a+b"
    subprocess.run([sys.executable, "-c", KILLED, out], check=False)
    leftovers = sorted(path.name for path in tmp_path.iterdir())
    assert [path.rpartition(".")[2] for path in leftovers] == ["part", "owner"]
    make(tmp_path / "a")  # another package
    assert sorted(path.name for path in tmp_path.iterdir()) == [*leftovers, "a"]
    make(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a+b"]


def test_files_of_running_process_are_kept(tmp_path):
    own_part = tmp_path / ".p.mine.part"
    own_part.mkdir()
    unmarked_part = tmp_path / ".p.0123abcd.part"  # without a marker: its maker may be about to write one
    unmarked_part.mkdir()
    old = tmp_path / ".p.89abcdef.part"
    old.mkdir()
    os.utime(old, (1, 1))

    def meanwhile(folder):
        (folder / "a").write_text("a")
        make(tmp_path / "p")
        assert (folder / "a").read_text() == "a"

    with raises_code("unwritable-path", InputError):
        make(tmp_path / "p", meanwhile)
    assert sorted(path.name for path in tmp_path.iterdir()) == [unmarked_part.name, own_part.name, "p"]


def test_disk_full_message_of_library_is_recognized(tmp_path):
    with raises_code("disk-full", RunError) as excinfo, atomic_folder(tmp_path / "p"):
        raise Exception("No space left on device (os error 28)")  # as tokenizers does
    assert excinfo.value.file == str(tmp_path / "p")
    with pytest.raises(ValueError, check=lambda error: str(error) == "other"), atomic_folder(tmp_path / "p"):
        raise ValueError("other")
    assert list(tmp_path.iterdir()) == []


def test_link_in_package_is_rejected(tmp_path):
    with raises_code("link-in-package", RunError) as excinfo, atomic_folder(tmp_path / "p") as folder:
        (folder / "a").symlink_to(tmp_path)
    assert excinfo.value.file == "a"
    assert list(tmp_path.iterdir()) == []
