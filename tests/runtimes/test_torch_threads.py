"""torch's number of threads: the last runner decides, and the caller's is back in the end."""

import gc
import threading

import pytest
import torch

from smelt.core.errors import InputError
from smelt.runtimes import device
from smelt.runtimes.device import TorchThreads
from smelt.runtimes.registry import open_runner
from tests.support.expected_errors import raises_code
from tests.support.models import tiny


@pytest.fixture(autouse=True)
def three():
    """The caller works with three threads, whatever the machine has and other tests left open."""
    gc.collect()
    assert not device._wanted, "a test before these left a runner open and something holds it"
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_thread_count_is_restored_after_the_last_release(order):
    reservations = [TorchThreads(1), TorchThreads(2)]
    assert torch.get_num_threads() == 2
    reservations[order[0]].release()
    assert torch.get_num_threads() == (2 if order[0] == 0 else 1)
    reservations[order[1]].release()
    assert torch.get_num_threads() == 3
    reservations[0].release()
    assert torch.get_num_threads() == 3


def test_nothing_changes_without_a_number():
    reservation = TorchThreads(None)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(2)  # the caller changes it meanwhile
    reservation.release()
    assert torch.get_num_threads() == 2


def test_runner_restores_the_thread_count(tmp_path):
    artifact = tiny.as_artifact(tiny.write_bert(tmp_path / "b"), "text-classification")
    with open_runner(artifact, threads=1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_failed_load_changes_nothing(tmp_path):
    folder = tiny.write_bert(tmp_path / "b")
    (folder / "model.safetensors").unlink()
    with raises_code("missing-weights", InputError):
        open_runner(tiny.as_artifact(folder, "text-classification"), threads=1)
    assert torch.get_num_threads() == 3


def test_concurrent_runners_restore_the_thread_count():
    def work():
        for count in (1, 2, 4) * 30:
            TorchThreads(count).release()

    crowd = [threading.Thread(target=work) for _ in range(6)]
    for runner in crowd:
        runner.start()
    for runner in crowd:
        runner.join()
    reservation = TorchThreads(5)
    assert device._callers == [3]  # the number that a new one finds is the caller's
    reservation.release()
    assert torch.get_num_threads() == 3


def test_unclosed_runner_restores_the_thread_count_when_collected(tmp_path):
    artifact = tiny.as_artifact(tiny.write_bert(tmp_path / "b"), "text-classification")
    runner = open_runner(artifact, threads=1)
    assert torch.get_num_threads() == 1
    del runner
    gc.collect()
    assert torch.get_num_threads() == 3
