"""What the driver counts by process, as a stand-in for NVML reports it."""

import os
from types import SimpleNamespace

import pynvml
import pytest

from smelt.evaluate.latency import gpu_monitor
from smelt.evaluate.latency.gpu_monitor import GpuMonitor, open_gpu_monitor

pytestmark = pytest.mark.quick

SELF, BASELINE, STRANGER = os.getpid(), 900_001, 900_002
START = 1_000.0


class FakeNvml:
    """`pynvml` with the processes and samples of one GPU."""

    NVMLError = pynvml.NVMLError

    def __init__(self, memory=(), samples=()):
        self.memory, self.samples = memory, samples

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.memory]

    def nvmlDeviceGetProcessUtilization(self, handle, since):  # noqa: N802
        if not self.samples:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return [
            SimpleNamespace(pid=pid, timeStamp=1e6 * seconds, smUtil=percent)
            for pid, seconds, percent in self.samples
        ]


@pytest.mark.parametrize(("memory", "expected"), [
    ([(SELF, 3 * 2**30), (STRANGER, 2**30)], 3 * 2**30),
    ([(STRANGER, 2**30)], None),  # a container, where processes have other numbers
    ([(SELF, None)], None),  # the driver does not count it
])  # fmt: skip
def test_memory_is_that_of_this_process(memory, expected):
    assert GpuMonitor(FakeNvml(memory=memory), None).memory_bytes() == expected


@pytest.mark.parametrize(("samples", "expected"), [
    ([(SELF, 1001, 80), (BASELINE, 1001, 10)], 0.0),
    ([(SELF, 1001, 60), (STRANGER, 1001, 20), (STRANGER, 1002, 40)], 0.3),
    ([(SELF, 1001, 60), (STRANGER, 999, 90)], 0.0),  # before the round
    ([(STRANGER, 1001, 90)], None),  # this process computed too, so its number must be another
    ([], None),
])  # fmt: skip
def test_share_of_others_leaves_out_the_measurement_itself(samples, expected):
    monitor = GpuMonitor(FakeNvml(samples=samples), None)
    share = monitor.other_share(START, {SELF, BASELINE})
    assert share == (None if expected is None else pytest.approx(expected))


def test_without_the_library_of_the_driver_there_is_no_monitor(monkeypatch):
    monkeypatch.setattr(gpu_monitor, "cuda_bus_id", lambda ordinal: "0000:0B:00.0")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: (_ for _ in ()).throw(pynvml.NVMLError(12)))
    assert open_gpu_monitor("cuda") is None
    assert open_gpu_monitor("cpu") is None
