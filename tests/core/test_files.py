"""Files are whole or not there, whoever the umask lets read them can, and broken JSON is named."""

import errno
import math
import os
import stat
import subprocess
import sys
import time

import pytest

from smelt.core.errors import InputError
from smelt.core.files import (
    apply_umask,
    folder_size,
    fsync_path,
    partial_files,
    read_json_object,
    seconds_since_written,
    write_atomically,
    write_json,
)
from tests.support.expected_errors import raises_code

UMASKS = pytest.mark.parametrize("umask", [0o022, 0o077, 0o002], ids=oct)


@pytest.fixture
def under():
    """Set the umask until the test ends."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@UMASKS
def test_written_file_has_umask_permissions(tmp_path, under, umask):
    under(umask)
    write_json(tmp_path / "deep" / "x.json", {"a": 1})
    assert _mode(tmp_path / "deep" / "x.json") == 0o666 & ~umask
    assert _mode(tmp_path / "deep") == 0o777 & ~umask


def test_replaced_file_has_permissions_of_new_file(tmp_path):
    write_atomically(tmp_path / "x", "old")
    (tmp_path / "x").chmod(0o600)
    write_atomically(tmp_path / "x", "new\r\nline")
    assert (tmp_path / "x").read_bytes() == b"new\r\nline"
    assert _mode(tmp_path / "x") != 0o600


@UMASKS
def test_apply_umask_overrides_modes_set_by_libraries(tmp_path, under, umask):
    """safetensors, tempfile and others write for the owner alone; some keep what the source had."""
    under(umask)
    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True, mode=0o700)
    for name, mode in (("secret", 0o600), ("all", 0o777), ("deep/inner", 0o400)):
        (out / name).write_text("x")
        (out / name).chmod(mode)
    for folder in (out / "deep", out):
        folder.chmod(0o700)
    (out / "link").symlink_to("secret")
    apply_umask(out)
    assert {_mode(out / name) for name in ("secret", "all", "deep/inner")} == {0o666 & ~umask}
    assert {_mode(folder) for folder in (out, out / "deep")} == {0o777 & ~umask}
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_apply_umask_keeps_set_group_id_bit(tmp_path, under):
    """A store that a group shares has the set-group-id bit on its folders."""
    under(0o002)
    tmp_path.chmod(0o2775)
    (tmp_path / "out").mkdir()
    if not _mode(tmp_path / "out") & stat.S_ISGID:
        pytest.skip("this file system does not hand the bit on")
    apply_umask(tmp_path / "out")
    assert _mode(tmp_path / "out") == 0o2775


def test_process_umask_is_never_changed(tmp_path, monkeypatch):
    def umask(mask):
        raise AssertionError("the umask was set")

    monkeypatch.setattr(os, "umask", umask)
    (tmp_path / "out").mkdir()
    write_atomically(tmp_path / "out" / "x", "x")
    apply_umask(tmp_path / "out")


def test_file_system_without_permissions_is_tolerated(tmp_path, monkeypatch):
    def chmod(path, mode):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch(0o600)
    monkeypatch.setattr(os, "chmod", chmod)
    monkeypatch.setattr(type(tmp_path), "chmod", chmod)
    apply_umask(tmp_path / "out")


def test_failed_write_keeps_old_file_only(tmp_path, monkeypatch):
    write_atomically(tmp_path / "x", "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
        write_atomically(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_partial_file_of_killed_writer_is_recognized_by_name(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from smelt.core.files import write_atomically\n"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(Path(sys.argv[1], 'x.json'), 'half')"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    (tmp_path / ".hidden").touch()
    (tmp_path / "y.part").touch()
    [partial_file] = partial_files(tmp_path)
    assert partial_file.name.startswith(".x.json.")
    assert not list(partial_files(tmp_path / "nothing"))


def test_failed_folder_sync_is_ignored_and_full_disk_is_not(tmp_path, monkeypatch):
    (tmp_path / "x").touch()

    def fails(number):
        def fsync(descriptor):
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", fails(errno.EINVAL))
    fsync_path(tmp_path)
    with pytest.raises(OSError, check=lambda error: error.errno == errno.EINVAL):
        fsync_path(tmp_path / "x")
    monkeypatch.setattr(os, "fsync", fails(errno.ENOSPC))
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
        fsync_path(tmp_path)


def test_file_age_uses_clock_of_file_system(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.touch()
    real = time.time()
    os.utime(path, (real - 500, real - 500))
    monkeypatch.setattr(time, "time", lambda: real + 1e6)  # this machine's clock is wrong
    assert 499 < seconds_since_written(path) < 560
    assert seconds_since_written(tmp_path / "nothing") == math.inf
    assert os.listdir(tmp_path) == ["x"]


def test_file_age_is_zero_on_full_file_system(tmp_path, monkeypatch):
    (tmp_path / "x").touch()
    os.utime(tmp_path / "x", (0, 0))

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    assert seconds_since_written(tmp_path / "x") == 0.0


def test_folder_size_ignores_removed_files(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"de")
    assert folder_size(tmp_path) == 5
    monkeypatch.setattr(type(tmp_path), "rglob", lambda self, _: iter([self / "b", self / "gone"]))
    assert folder_size(tmp_path) == 2


@pytest.mark.parametrize(("text", "expected"), [('{"a": 1}', {"a": 1}), ("[1]", {}), (None, {})])
def test_read_json_object_returns_object_or_empty(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    assert read_json_object(tmp_path / "x.json") == expected


@pytest.mark.parametrize("raw", [b"{", b"\xff", b"[" * 100_000])
def test_invalid_json_error_names_file(tmp_path, raw):
    (tmp_path / "x.json").write_bytes(raw)
    with raises_code("invalid-json", InputError) as excinfo:
        read_json_object(tmp_path / "x.json")
    assert "x.json" in str(excinfo.value)
