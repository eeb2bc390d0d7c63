"""Who is at work is left alone; who is dead is known to be, on this machine, in containers and on others."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from smelt.core import locks as heartbeats
from smelt.core.files import seconds_since_written
from smelt.core.locks import STALE_AFTER_S, current_owner, heartbeat, is_active, read_owner, write_owner
from tests.support.processes.concurrent_processes import WITHOUT_LOCKS, disable_file_locks, start

WORKER = """
import sys, time
from pathlib import Path
from smelt.core.locks import heartbeat
with heartbeat(Path(sys.argv[1])):
    print("at work", flush=True)
    time.sleep(60)
"""
BOTH = pytest.mark.parametrize("where", ["", WITHOUT_LOCKS], ids=["kernel", "no locks"])


@pytest.fixture
def worker(tmp_path):
    started = []

    def begin(where=""):
        process = start(where + WORKER, tmp_path / "x.owner")
        started.append(process)
        assert process.stdout.readline() == "at work\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def _mark(path, silent_s=0.0, **changes):
    """Write the marker of a process that this one is not."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    write_owner(descriptor, replace(current_owner(), **changes))
    os.close(descriptor)
    os.utime(path, (time.time() - silent_s,) * 2)
    return path


def _ended():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@BOTH
def test_marker_exists_while_process_works(tmp_path, where, monkeypatch):
    if where:
        disable_file_locks(monkeypatch)
    path = tmp_path / "x.owner"
    with heartbeat(path):
        assert read_owner(path) == replace(current_owner(), locked=not where)
        assert is_active(path)
    assert not path.exists()
    assert not is_active(path)


@BOTH
def test_killed_process_is_inactive_at_once(tmp_path, worker, where, monkeypatch):
    if where:
        disable_file_locks(monkeypatch)
    process, path = worker(where), tmp_path / "x.owner"
    assert is_active(path)
    process.kill()
    process.wait()
    assert path.exists()
    assert not is_active(path)


@BOTH
def test_silent_process_of_this_machine_is_active_while_alive(tmp_path, worker, where, monkeypatch):
    """A computer that was suspended for a night has touched nothing."""
    if where:
        disable_file_locks(monkeypatch)
    worker(where)
    os.utime(tmp_path / "x.owner", (0, 0))
    assert is_active(tmp_path / "x.owner")


def test_reused_process_id_is_not_the_recorded_process(tmp_path):
    owner = current_owner()
    assert is_active(_mark(tmp_path / "same"))
    assert not is_active(_mark(tmp_path / "reused", started=owner.started - 30))
    assert not is_active(_mark(tmp_path / "ended", process=_ended()))


@pytest.mark.parametrize(
    "elsewhere",
    # the second one held a lock that only its own machine sees, as on NFS with local locks
    [{"kernel": "another"}, {"kernel": "another", "locked": True}, {"namespace": 1}],
)
@pytest.mark.parametrize("locks", [True, False])
def test_process_of_other_machine_is_active_until_stale(tmp_path, elsewhere, locks, monkeypatch):
    """Its number means nothing here, whether a process has it or not."""
    if not locks:
        disable_file_locks(monkeypatch)
    for number in (os.getpid(), _ended()):
        path = _mark(tmp_path / "x.owner", process=number, **elsewhere)
        assert is_active(path)
        assert is_active(_mark(path, STALE_AFTER_S - 60, process=number, **elsewhere))
        assert not is_active(_mark(path, STALE_AFTER_S + 60, process=number, **elsewhere))


def test_locked_marker_of_other_machine_is_active_even_if_silent(tmp_path, worker):
    """As on NFS with locks: what holds the lock lives."""
    process, path = worker(), tmp_path / "x.owner"
    content = path.read_bytes()
    path.write_bytes(content.replace(current_owner().kernel.encode(), b"another"))
    os.utime(path, (0, 0))
    assert is_active(path)
    process.kill()
    process.wait()
    assert not is_active(path)


def test_released_lock_in_other_container_is_inactive(tmp_path):
    """All processes of one kernel see each other's locks, whatever their numbers are."""
    assert not is_active(_mark(tmp_path / "x.owner", namespace=1, locked=True))


def test_marker_without_record_is_active_until_stale(tmp_path):
    path = tmp_path / "x.owner"
    path.touch()
    assert is_active(path)
    os.utime(path, (time.time() - STALE_AFTER_S - 60,) * 2)
    assert not is_active(path)


def test_heartbeat_is_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeats, "HEARTBEAT_S", 0.01)
    path = tmp_path / "x.owner"
    with heartbeat(path):
        for _ in range(2):
            os.utime(path, (0, 0))
            deadline = time.monotonic() + 20
            while seconds_since_written(path) > 60:
                assert time.monotonic() < deadline, "no sign of life"
                time.sleep(0.01)


def test_heartbeat_thread_ends_with_work(tmp_path, monkeypatch):
    import threading

    monkeypatch.setattr(heartbeats, "HEARTBEAT_S", 0.01)
    before = threading.active_count()
    with heartbeat(tmp_path / "x.owner"):
        assert threading.active_count() == before + 1
    deadline = time.monotonic() + 20
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_marker_of_dead_process_is_replaced(tmp_path):
    path = _mark(tmp_path / "x.owner", process=_ended(), locked=True)
    with heartbeat(path):
        assert read_owner(path).process == os.getpid()


def test_marker_permissions_follow_umask(tmp_path):
    before = os.umask(0o022)
    try:
        with heartbeat(tmp_path / "x.owner"):
            assert (tmp_path / "x.owner").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)
