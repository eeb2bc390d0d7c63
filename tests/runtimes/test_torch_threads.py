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
def test_callers_number_is_back_when_all_have_let_go(order):
    held = [TorchThreads(1), TorchThreads(2)]
    assert torch.get_num_threads() == 2
    held[order[0]].release()
    assert torch.get_num_threads() == (2 if order[0] == 0 else 1)
    held[order[1]].release()
    assert torch.get_num_threads() == 3
    held[0].release()
    assert torch.get_num_threads() == 3


def test_nothing_changes_when_no_number_is_given():
    held = TorchThreads(None)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(2)  # the caller changes it meanwhile
    held.release()
    assert torch.get_num_threads() == 2


def test_a_runner_gives_back_what_it_took(tmp_path):
    artifact = tiny.as_artifact(tiny.write_bert(tmp_path / "b"), "text-classification")
    with open_runner(artifact, threads=1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_a_model_that_does_not_load_changes_nothing(tmp_path):
    folder = tiny.write_bert(tmp_path / "b")
    (folder / "model.safetensors").unlink()
    with raises_code("missing-weights", InputError):
        open_runner(tiny.as_artifact(folder, "text-classification"), threads=1)
    assert torch.get_num_threads() == 3


def test_many_threads_take_and_give_back_without_losing_the_callers_number():
    def work():
        for count in (1, 2, 4) * 30:
            TorchThreads(count).release()

    crowd = [threading.Thread(target=work) for _ in range(6)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    held = TorchThreads(5)
    assert device._callers == [3]  # the number that a new one finds is the caller's
    held.release()
    assert torch.get_num_threads() == 3


def test_a_runner_that_nobody_closed_lets_go_when_it_is_collected(tmp_path):
    artifact = tiny.as_artifact(tiny.write_bert(tmp_path / "b"), "text-classification")
    runner = open_runner(artifact, threads=1)
    assert torch.get_num_threads() == 1
    del runner
    gc.collect()
    assert torch.get_num_threads() == 3
