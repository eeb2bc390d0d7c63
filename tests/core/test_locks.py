"""Locks end with their holder, whatever happens to it."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from smelt.core.locks import hold_folder, is_free, lock, remove_if_free

HOLDER = (
    "import sys, time; from pathlib import Path; from smelt.core.locks import lock\n"
    "with lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
)


def _holder(path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_is_free_again_when_its_holder_is_killed(tmp_path):
    path = tmp_path / "x.lock"
    process = _holder(path)
    assert not is_free(path)
    told = []

    def kill(holder):
        told.append(holder)
        os.kill(process.pid, signal.SIGKILL)

    with lock(path, kill):
        assert path.read_text() == f"process {os.getpid()}"
    assert told == [f"process {process.pid}"]
    assert not path.exists()
    process.wait()


def test_what_the_caller_raises_ends_the_wait_and_leaves_the_holder_alone(tmp_path):
    path = tmp_path / "x.lock"
    process = _holder(path)

    def refuse(holder):
        raise LookupError(holder)

    try:
        with pytest.raises(LookupError), lock(path, refuse):
            pytest.fail("it was held twice")
        assert not is_free(path)
    finally:
        process.kill()
        process.wait()


def test_only_one_of_many_holds_it_at_a_time(tmp_path):
    """Eight threads, each with a file of its own open: flock keeps them apart as it does processes."""
    inside, most, total = [], [], []

    def work():
        for _ in range(50):
            with lock(tmp_path / "x.lock"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
                total.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(total) == 400
    assert max(most) == 1


def test_the_file_of_a_dead_holder_is_swept_and_that_of_a_living_one_stays(tmp_path):
    path = tmp_path / "x.lock"
    process = _holder(path)
    remove_if_free(path)
    assert path.exists()
    process.kill()
    process.wait()
    assert path.exists()
    remove_if_free(path)
    assert not path.exists()


def test_a_held_folder_is_not_free_until_it_is_given_back(tmp_path):
    descriptor = hold_folder(tmp_path)
    assert descriptor is not None
    assert not is_free(tmp_path)
    os.close(descriptor)
    assert is_free(tmp_path)
    assert is_free(tmp_path / "nothing")
