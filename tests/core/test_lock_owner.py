"""A process is told from another with its number, on this machine and on others."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from smelt.core import locks
from smelt.core.locks import current_owner, read_owner, write_owner


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def _record(process):
    return replace(current_owner(), process=process, started=locks._process_start_time(process))


def test_current_process_is_alive_with_start_time():
    owner = current_owner()
    assert owner.process == os.getpid()
    assert owner.is_alive() is True
    assert owner.started is not None
    assert str(owner) == f"process {os.getpid()}"


def test_ended_process_is_dead_even_as_zombie(child):
    owner = _record(child.pid)
    assert owner.is_alive() is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays as a zombie
    assert owner.is_alive() is False
    child.wait()
    assert owner.is_alive() is False


def test_process_with_reused_id_is_not_alive(child):
    owner = _record(child.pid)
    assert replace(owner, started=owner.started - 30).is_alive() is False
    assert replace(owner, started=None).is_alive() is True


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count from their start")
def test_changed_clock_does_not_change_process_identity(child, monkeypatch):
    """The kernel tells its start in seconds since 1970, and moves it when the clock is set."""
    import psutil

    owner = _record(child.pid)
    boot = psutil.boot_time()
    module = sys.modules["psutil._pslinux"]
    monkeypatch.setattr(module, "boot_time", lambda: boot + 7200)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot + 7200)
    assert abs(psutil.Process(child.pid).create_time() - time.time()) > 3600
    assert owner.is_alive() is True


@pytest.mark.parametrize("elsewhere", [{"kernel": "another"}, {"namespace": 1}])
def test_process_of_other_machine_has_unknown_state(elsewhere):
    owner = replace(current_owner(), host="node2", process=7, **elsewhere)
    assert owner.is_alive() is None
    assert str(owner) == "process 7 on node2"


def test_is_alive_sends_no_signal(child, monkeypatch):
    """On Windows os.kill(pid, 0) ends the process."""

    def kill(process, number):
        raise AssertionError("a signal was sent")

    owner = _record(child.pid)
    monkeypatch.setattr(os, "kill", kill)
    assert owner.is_alive() is True
    assert replace(owner, process=2**22 + 1, started=None).is_alive() is False


def test_shorter_record_replaces_longer_one(tmp_path):
    path = tmp_path / "x"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    long_record = replace(current_owner(), host="h" * 200, locked=True)
    for record in (long_record, current_owner()):
        write_owner(descriptor, record)
        assert read_owner(path) == record
    os.close(descriptor)


@pytest.mark.parametrize("content", [b"", b" ", b" {", b' {"host": "x"}', b' {"more": 1}', b" []", b" \xff"])
def test_invalid_record_has_no_owner(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    assert read_owner(tmp_path / "x") is None
    assert read_owner(tmp_path / "nothing") is None


def test_forked_process_has_its_own_record():
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, str(current_owner().started is not None and current_owner().process).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100).decode() == str(child)


def test_machine_without_boot_id_uses_host_name_and_network_card(monkeypatch):
    import platform
    import uuid

    def missing(*arguments, **settings):
        raise FileNotFoundError

    monkeypatch.setattr(locks.Path, "read_text", missing)
    assert locks._boot_id.__wrapped__() == f"{platform.node()} {uuid.getnode():012x}"
