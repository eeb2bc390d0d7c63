"""The share of the machine that a process got during a period, and the load of other processes.

A process can lose time to others in three ways only: its threads wait in the run queue, its virtual
processors are taken by the hypervisor (steal), or it is throttled. On Linux the kernel counts all of
them; elsewhere psutil reports the use of all processors, and the rest is None.

Sources: proc_stat(5) (times in clock ticks of 10 ms), Documentation/scheduler/sched-stats.rst
(`schedstat` of a task: run time, time in the run queue, time slices; ns), Documentation/accounting/psi.rst
(pressure stall information, microseconds), all of the Linux kernel.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

_TASKS_FOLDER = Path("/proc/self/task")
_PRESSURE_FILE = Path("/proc/pressure/cpu")


@dataclass(frozen=True)
class CounterSnapshot:
    """Values of all counters. Seconds; None where the system does not count it.

    processor: used by all threads of this process. waited: its threads were ready to run and had no
    processor. busy, stolen: of all processors together. pressure: some task of the machine waited.
    """

    wall: float
    processor: float
    waited: float | None
    busy: float
    stolen: float
    pressure: float | None


@dataclass(frozen=True)
class MachineLoad:
    """Load between two snapshots.

    wall_ms, processor_ms, waited_ms: differences of `CounterSnapshot`. others: mean number of processors
    that were busy with other work; stolen: mean number that the hypervisor took. pressure: the share of the
    time in which some task of the machine waited for a processor.
    """

    wall_ms: float
    processor_ms: float
    waited_ms: float | None
    others: float
    stolen: float
    pressure: float | None

    def dump(self) -> dict[str, float | None]:
        """Return a JSON-able dict."""
        return asdict(self)


def read_counters() -> CounterSnapshot:
    """Return all counters; takes a fraction of a millisecond."""
    import psutil

    times = psutil.cpu_times()
    # a guest's time is part of the user's; a process that waits for a disk does not use the processor
    idle = {"idle", "iowait", "guest", "guest_nice", "steal"}
    return CounterSnapshot(
        wall=time.perf_counter(),
        processor=time.process_time(),
        waited=_run_queue_seconds(_TASKS_FOLDER),
        busy=sum(value for name, value in times._asdict().items() if name not in idle),
        stolen=float(getattr(times, "steal", 0.0)),
        pressure=_cpu_pressure_seconds(_PRESSURE_FILE),
    )


def load_between(before: CounterSnapshot, after: CounterSnapshot) -> MachineLoad:
    """Return the load between two snapshots of one process."""
    wall, processor = after.wall - before.wall, after.processor - before.processor
    waited = None
    if before.waited is not None and after.waited is not None:
        waited = 1000 * max(0.0, after.waited - before.waited)  # the counts of an ended thread are lost
    pressure = None
    if before.pressure is not None and after.pressure is not None:
        pressure = min(1.0, (after.pressure - before.pressure) / wall)
    return MachineLoad(
        wall_ms=1000 * wall,
        processor_ms=1000 * processor,
        waited_ms=waited,
        others=max(0.0, (after.busy - before.busy - processor) / wall),
        stolen=max(0.0, (after.stolen - before.stolen) / wall),
        pressure=pressure,
    )


def _run_queue_seconds(tasks: Path) -> float | None:
    """Return the seconds that the threads in `tasks` have waited in the run queue."""
    found = None
    try:
        for task in tasks.iterdir():
            try:
                found = (found or 0) + int((task / "schedstat").read_text(encoding="ascii").split()[1])
            except (OSError, IndexError, ValueError):
                continue  # a thread that has just ended, or a kernel without these counts
    except OSError:
        return None
    return None if found is None else found / 1e9


def _cpu_pressure_seconds(file: Path) -> float | None:
    """Return the seconds since boot in which some task waited for a processor."""
    try:
        some = file.read_text(encoding="ascii").splitlines()[0]
        return int(some.rsplit("total=", 1)[1]) / 1e6
    except (OSError, IndexError, ValueError):
        return None
