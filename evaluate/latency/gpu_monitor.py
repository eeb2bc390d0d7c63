"""Memory of this process on the GPU, and how much other processes use the GPU.

Both are what NVIDIA's driver counts by process, read with its management library (NVML, the package
nvidia-ml-py): memory of CUDA, of libraries and of every runtime is in it, and other containers' and users'
work. None where the driver does not tell: without a GPU, or in a container whose processes have other numbers
than the driver's.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from smelt.runtimes.device import cuda_bus_id, gpu_index


class GpuMonitor:
    """The GPU that this process computes on.

    nvml: the module `pynvml`, initialized. handle: its handle of the GPU.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def memory_bytes(self) -> int | None:
        """Return the memory that this process holds on the GPU; runtimes keep what they once allocated."""
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        sizes = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
        return None if not sizes or None in sizes else int(sum(sizes))

    def other_share(self, since: float, own_processes: Collection[int]) -> float | None:
        """Return the share of the multiprocessors' time, 0 to 1, that other processes used.

        The driver samples it several times in a second.

        Args:
            since: start of the time, seconds since the epoch.
            own_processes: ids of processes that belong to the measurement, this one among them.
        """
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, int(1e6 * since))
        except self._nvml.NVMLError:  # also where no process was active
            return None
        by_process: dict[int, list[int]] = defaultdict(list)
        for sample in samples:
            if sample.timeStamp > 1e6 * since:
                by_process[sample.pid].append(sample.smUtil)
        if os.getpid() not in by_process:  # the driver has other numbers for processes, or saw none of ours
            return None
        others = [values for pid, values in by_process.items() if pid not in own_processes]
        return min(1.0, sum(sum(values) / len(values) for values in others) / 100)


def open_gpu_monitor(device: str) -> GpuMonitor | None:
    """Return the monitor of this process's GPU; None on the CPU and where NVML does not work."""
    bus_id = cuda_bus_id(gpu_index()) if device == "cuda" else None
    if bus_id is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        return GpuMonitor(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus_id))
    except pynvml.NVMLError:
        return None
