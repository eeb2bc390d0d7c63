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
def test_what_is_made_has_normal_modes_whatever_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        with atomic_folder(tmp_path / "p") as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "a").write_text("a")
            (folder / "inner" / "a").chmod(0o700)
    finally:
        os.umask(before)
    made = tmp_path / "p"
    assert [mode(made), mode(made / "inner"), mode(made / "inner" / "a")] == [0o755, 0o755, 0o644]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_it_is_not_there_before_it_is_complete(tmp_path):
    out = tmp_path / "p"
    with atomic_folder(out) as folder:
        (folder / "a").write_text("a")
        assert not out.exists()
        assert folder.parent == out.parent
    assert (out / "a").read_text() == "a"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, InputError])
def test_an_error_leaves_nothing_not_even_the_folders_above(error, tmp_path):
    def fails(folder):
        (folder / "a").write_text("a")
        raise error("why")

    with pytest.raises(error):
        make(tmp_path / "x" / "y" / "p", fails)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_above_that_was_there_stays(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "x" / "y" / "p"):
        raise RuntimeError("why")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert list((tmp_path / "x").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("file", "folder-not-empty"),
        ("folder", "folder-not-empty"),
        ("link", "not-a-folder"),
        ("file in its place", "not-a-folder"),
    ],
)
def test_what_is_there_is_not_touched(content, code, tmp_path):
    out = tmp_path / "p"
    if content == "file in its place":
        out.write_text("mine")
    elif content == "link":
        (tmp_path / "real").mkdir()
        out.symlink_to(tmp_path / "real")
    else:
        (out / "mine").mkdir(parents=True) if content == "folder" else out.mkdir()
        (out / "mine").touch()
    before = sorted(tmp_path.rglob("*"))
    with raises_code(code, InputError):
        require_empty_destination(out)
    with raises_code(code, InputError), atomic_folder(out):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "p").mkdir(mode=0o700)
    with atomic_folder(tmp_path / "p") as folder:
        (folder / "a").touch()
    assert (tmp_path / "p" / "a").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_who_fills_the_folder_meanwhile_keeps_it(tmp_path):
    out = tmp_path / "p"

    def filled(folder):
        out.mkdir()
        (out / "theirs").touch()

    with raises_code("unwritable-path", InputError):
        make(out, filled)
    assert [path.name for path in out.iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_with_the_room_that_there_is(number, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "fsync_path", full(number))
    with raises_code("disk-full", RunError) as caught:
        make(tmp_path / "p")
    assert caught.value.file == str(tmp_path / "p")
    assert re.search(r"\([\d,]+ ", str(caught.value))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_the_form_writes(tmp_path):
    with raises_code("disk-full", RunError), atomic_folder(tmp_path / "x" / "p") as folder:
        full(errno.ENOSPC)(folder / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])
def test_a_place_that_must_not_be_written_is_named(number, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", full(number))
    with raises_code("unwritable-path", InputError) as caught:
        make(tmp_path / "p")
    assert caught.value.file == str(tmp_path)
    assert os.strerror(number) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", ["x/p", "x/y/p"])
def test_a_file_in_the_place_of_a_folder_above_is_named(out, tmp_path):
    (tmp_path / "x").write_text("mine")
    with raises_code("parent-not-a-folder", InputError) as caught:
        require_empty_destination(tmp_path / out)
    assert caught.value.file == str(tmp_path / "x")
    assert str(tmp_path / out) in str(caught.value)
    with raises_code("parent-not-a-folder", InputError), atomic_folder(tmp_path / out):
        pass
    assert (tmp_path / "x").read_text() == "mine"


def test_the_current_folder_is_not_replaced_under_its_users_feet(tmp_path, monkeypatch):
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
def test_what_a_killed_process_left_goes_with_the_next_try(tmp_path):
    out = tmp_path / "a+b"
    subprocess.run([sys.executable, "-c", KILLED, out], check=False)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert [path.rpartition(".")[2] for path in left] == ["part", "owner"]
    make(tmp_path / "a")  # another package
    assert sorted(path.name for path in tmp_path.iterdir()) == [*left, "a"]
    make(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a+b"]


def test_the_work_of_a_living_process_stays(tmp_path):
    mine = tmp_path / ".p.mine.part"
    mine.mkdir()
    fresh = tmp_path / ".p.0123abcd.part"  # without a marker: its maker may be about to write one
    fresh.mkdir()
    old = tmp_path / ".p.89abcdef.part"
    old.mkdir()
    os.utime(old, (1, 1))

    def meanwhile(folder):
        (folder / "a").write_text("a")
        make(tmp_path / "p")
        assert (folder / "a").read_text() == "a"

    with raises_code("unwritable-path", InputError):
        make(tmp_path / "p", meanwhile)
    assert sorted(path.name for path in tmp_path.iterdir()) == [fresh.name, mine.name, "p"]


def test_a_full_disk_is_told_whoever_says_it(tmp_path):
    with raises_code("disk-full", RunError) as caught, atomic_folder(tmp_path / "p"):
        raise Exception("No space left on device (os error 28)")  # as tokenizers does
    assert caught.value.file == str(tmp_path / "p")
    with pytest.raises(ValueError, check=lambda error: str(error) == "other"), atomic_folder(tmp_path / "p"):
        raise ValueError("other")
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_a_package_is_an_error(tmp_path):
    with raises_code("link-in-package", RunError) as caught, atomic_folder(tmp_path / "p") as folder:
        (folder / "a").symlink_to(tmp_path)
    assert caught.value.file == "a"
    assert list(tmp_path.iterdir()) == []
