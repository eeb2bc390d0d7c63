"""Locks keep processes apart and end with their holder, also where the file system knows none."""

import errno
import fcntl
import json
import os
import signal
import time

import pytest

from smelt.core import locks
from smelt.core.locks import current_owner, file_lock, is_locked, read_owner, remove_stale_lock, try_lock
from tests.support.processes.concurrent_processes import WITHOUT_LOCKS, disable_file_locks, run_at_once, start

HOLDER = """
import sys, time
from pathlib import Path
from smelt.core.locks import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
# Reads a number, works, writes the number that follows: two at once lose a count, or meet inside.
COUNTER = """
import sys, time
from pathlib import Path
from smelt.core import locks
from smelt.core.locks import file_lock
locks._POLL_S = 0.001
home, waited = Path(sys.argv[1]), []
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    with file_lock(home / "x.lock", waited.append):
        count = int((home / "count").read_text())
        (home / "inside").touch(exist_ok=False)
        time.sleep(0.005)
        (home / "count").write_text(str(count + 1))
        (home / "inside").unlink()
print(len(waited))
"""
BOTH = pytest.mark.parametrize("where", ["", WITHOUT_LOCKS], ids=["kernel", "lease"])


@pytest.fixture
def held(tmp_path):
    """Start a process that holds the lock `x.lock` on the file system `where`."""
    started = []

    def begin(where=""):
        process = start(where + HOLDER, tmp_path / "x.lock")
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@BOTH
def test_concurrent_processes_hold_lock_one_at_a_time(tmp_path, where):
    """Four processes, ready before any begins, count 24 pieces of work; none is lost, none overlaps."""
    (tmp_path / "count").write_text("0")
    results = run_at_once(where + COUNTER, 4, tmp_path, 6)
    assert [status for _, status in results] == [0] * 4
    assert (tmp_path / "count").read_text() == "24"
    assert sum(int(waited) for waited, _ in results) > 0, "nobody met anybody"
    assert {path.name for path in tmp_path.iterdir()} == {"count"}


def test_threads_of_one_process_hold_lock_one_at_a_time(tmp_path):
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    together, inside, total = Barrier(4), [], []

    def work(_):
        together.wait()
        for _ in range(5):
            with file_lock(tmp_path / "x.lock"):
                inside.append(1)
                time.sleep(0.002)
                assert len(inside) == 1
                inside.pop()
                total.append(1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(total) == 20


def test_waiter_follows_replaced_lock_file(tmp_path):
    """The first holder leaves and removes the file; a third makes it again before the second looks again."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Event

    waits, third_left, entered = Event(), Event(), []

    def second():
        with file_lock(tmp_path / "x.lock", lambda holder: waits.set()):
            entered.append(third_left.is_set())

    with ThreadPoolExecutor(1) as pool:
        with file_lock(tmp_path / "x.lock"):
            other = pool.submit(second)
            assert waits.wait(20)
        with file_lock(tmp_path / "x.lock"):
            time.sleep(5 * locks._POLL_S)
            third_left.set()
        other.result(timeout=20)
    assert entered == [True]


@BOTH
def test_lock_is_free_after_holder_is_killed(tmp_path, held, where, monkeypatch):
    if where:
        disable_file_locks(monkeypatch)
    path = tmp_path / "x.lock"
    process = held(where)
    messages = []

    def kill(holder):
        messages.append(holder)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    with file_lock(path, kill):
        if not where:
            assert read_owner(path) == current_owner()
    assert messages == [f"process {process.pid}"]
    assert not list(tmp_path.iterdir())


def raises(expected):
    """Expect an error of the same kind with the same arguments."""
    return pytest.raises(type(expected), check=lambda error: error.args == expected.args)


@BOTH
def test_exception_of_caller_ends_wait_and_keeps_holder(tmp_path, held, where, monkeypatch):
    if where:
        disable_file_locks(monkeypatch)
    process = held(where)

    def refuse(holder):
        raise LookupError(holder)

    for _ in range(2):
        with raises(LookupError(f"process {process.pid}")), file_lock(tmp_path / "x.lock", refuse):
            pytest.fail("it was held twice")


@BOTH
def test_lock_file_is_swept_only_if_holder_is_dead(tmp_path, held, where, monkeypatch):
    if where:
        disable_file_locks(monkeypatch)
    process = held(where)
    [path] = tmp_path.iterdir()
    remove_stale_lock(path)
    assert path.exists()
    process.kill()
    process.wait()
    assert path.exists()
    remove_stale_lock(path)
    assert not path.exists()


def test_only_lock_files_are_swept(tmp_path):
    (tmp_path / "x.json").touch()
    remove_stale_lock(tmp_path / "x.json")
    assert (tmp_path / "x.json").exists()
    remove_stale_lock(tmp_path / "x.lock")


def test_is_locked_reports_lock_of_other_process(tmp_path, held, monkeypatch):
    process = held()
    path = tmp_path / "x.lock"
    assert is_locked(path) is True
    process.kill()
    process.wait()
    assert is_locked(path) is False
    assert is_locked(tmp_path / "nothing") is None
    disable_file_locks(monkeypatch)
    assert is_locked(path) is None


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_unsupported_flock_is_not_a_lock(tmp_path, monkeypatch, number):
    def flock(descriptor, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "x").open("w") as file:
        assert try_lock(file.fileno()) is None


def test_other_lock_error_is_raised(tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with raises(OSError(errno.EIO, "Input/output error")), file_lock(tmp_path / "x.lock"):
        pytest.fail("it was held")
    assert is_locked(tmp_path / "x.lock") is None


def _marker_of_another_machine(path, duration):
    """What filelock writes for a process of a machine that cannot be asked."""
    path.write_text(f"filelock/2\npid=7\nhost=node2\nmode=lease\ntoken=ab\nduration={duration!r}\nstart=1\n")


def test_lease_of_other_machine_is_taken_after_silence(tmp_path, monkeypatch):
    disable_file_locks(monkeypatch)
    monkeypatch.setattr(locks, "LEASE_S", 2.0)
    lease = tmp_path / "x.lock.lease"
    _marker_of_another_machine(lease, 2.0)
    messages, before = [], time.monotonic()
    with file_lock(tmp_path / "x.lock", messages.append):
        waited = time.monotonic() - before
    assert messages == ["process 7 on node2"]
    assert 2.0 <= waited < 20
    assert not list(tmp_path.iterdir())


def test_stale_lease_is_taken_without_waiting(tmp_path, monkeypatch):
    """As a run in the folder of one that died on another machine, which is refused until then."""
    disable_file_locks(monkeypatch)

    def refuse(holder):
        raise LookupError(holder)

    lease = tmp_path / ".lock.lease"
    _marker_of_another_machine(lease, locks.LEASE_S)
    with raises(LookupError("process 7 on node2")), file_lock(tmp_path / ".lock", refuse):
        pytest.fail("it was held twice")
    os.utime(lease, (time.time() - 2 * locks.LEASE_S - 60,) * 2)
    with file_lock(tmp_path / ".lock", refuse):
        assert lease.read_text().find(f"pid={os.getpid()}") > 0
    assert not list(tmp_path.iterdir())


def test_lease_without_owner_expires(tmp_path, monkeypatch):
    """A process that was killed between making the file and writing into it."""
    disable_file_locks(monkeypatch)
    monkeypatch.setattr(locks, "_OWNERLESS_S", 2.0)
    lease, messages = tmp_path / "x.lock.lease", []
    lease.touch()
    start_time = time.monotonic()
    with file_lock(tmp_path / "x.lock", messages.append):
        assert 1 < time.monotonic() - start_time < 30
        assert f"pid={os.getpid()}" in lease.read_text()
    assert messages == ["another process"]
    lease.touch()
    os.utime(lease, (time.time() - 60,) * 2)
    with file_lock(tmp_path / "x.lock", messages.append):  # nobody waits for one that is old
        pass
    assert messages == ["another process"]


def test_heartbeat_renews_lease(tmp_path, monkeypatch):
    disable_file_locks(monkeypatch)
    monkeypatch.setattr(locks, "LEASE_S", 6.0)
    with file_lock(tmp_path / "x.lock"):
        lease = tmp_path / "x.lock.lease"
        first = lease.stat().st_mtime_ns
        deadline = time.monotonic() + 3  # half of it: one that comes late is no loss
        while lease.stat().st_mtime_ns == first:
            assert time.monotonic() < deadline, "no sign of life"
            time.sleep(0.02)


def test_lease_of_other_machine_is_swept_only_after_long_silence(tmp_path):
    lease = tmp_path / "x.lock.lease"
    _marker_of_another_machine(lease, locks.LEASE_S)
    remove_stale_lock(lease)
    assert lease.exists()
    os.utime(lease, (time.time() - 2 * locks.LEASE_S - 60,) * 2)
    remove_stale_lock(lease)
    assert not lease.exists()


def test_temporary_loss_of_locks_keeps_held_lock(tmp_path, held, monkeypatch):
    """As where the lock daemon of a file server restarts: the file of the holder stays."""
    held()
    with monkeypatch.context() as patch:
        disable_file_locks(patch)
        with file_lock(tmp_path / "x.lock"):
            pass
    assert is_locked(tmp_path / "x.lock") is True


def test_lock_record_skips_first_byte(tmp_path):
    with file_lock(tmp_path / "x.lock"):
        raw = (tmp_path / "x.lock").read_bytes()
    assert raw[:1] == b" "
    assert json.loads(raw[1:])["process"] == os.getpid()
