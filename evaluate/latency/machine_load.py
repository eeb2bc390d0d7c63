"""What a process got of the machine during a stretch of time, and what else the machine was doing.

A process can only lose time to others in three ways: its threads stand in the run queue, its virtual
processors are taken away by the hypervisor (steal), or it is throttled. On Linux the kernel counts all
of it; elsewhere psutil tells the use of all processors, and the rest is None.

Sources: proc_stat(5) (times in clock ticks of 10 ms), Documentation/scheduler/sched-stats.rst
(`schedstat` of a task: run time, time in the run queue, time slices; ns), Documentation/accounting/psi.rst
(pressure stall information, microseconds), all of the Linux kernel.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

_TASKS = Path("/proc/self/task")
_PRESSURE = Path("/proc/pressure/cpu")


@dataclass(frozen=True)
class Look:
    """What all counters stand at. Seconds; None where the system does not count it.

    processor: used by all threads of this process. waited: its threads, ready to run and without a
    processor. busy, stolen: of all processors together. pressure: some task of the machine waited.
    """

    wall: float
    processor: float
    waited: float | None
    busy: float
    stolen: float
    pressure: float | None


@dataclass(frozen=True)
class Load:
    """What happened between two looks.

    wall_ms, processor_ms, waited_ms: as in `Look`. others: how many processors were busy with other work,
    on average; stolen: how many the hypervisor took. pressure: the share of the time in which some task
    of the machine waited for a processor.
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


def look() -> Look:
    """Read all counters now; takes a fraction of a millisecond."""
    import psutil

    times = psutil.cpu_times()
    # a guest's time is part of the user's; whoever waits for a disk leaves the processor free
    idle = {"idle", "iowait", "guest", "guest_nice", "steal"}
    return Look(
        wall=time.perf_counter(),
        processor=time.process_time(),
        waited=_waited(_TASKS),
        busy=sum(value for name, value in times._asdict().items() if name not in idle),
        stolen=float(getattr(times, "steal", 0.0)),
        pressure=_pressure(_PRESSURE),
    )


def between(before: Look, after: Look) -> Load:
    """Return what happened between two looks of one process."""
    wall, processor = after.wall - before.wall, after.processor - before.processor
    waited = None
    if before.waited is not None and after.waited is not None:
        waited = 1000 * max(0.0, after.waited - before.waited)  # a thread that ended takes its sum along
    pressure = None
    if before.pressure is not None and after.pressure is not None:
        pressure = min(1.0, (after.pressure - before.pressure) / wall)
    return Load(
        wall_ms=1000 * wall,
        processor_ms=1000 * processor,
        waited_ms=waited,
        others=max(0.0, (after.busy - before.busy - processor) / wall),
        stolen=max(0.0, (after.stolen - before.stolen) / wall),
        pressure=pressure,
    )


def _waited(tasks: Path) -> float | None:
    """Return the seconds that the threads in `tasks` have spent in the run queue."""
    found = None
    try:
        for task in tasks.iterdir():
            try:
                found = (found or 0) + int((task / "schedstat").read_text(encoding="ascii").split()[1])
            except (OSError, IndexError, ValueError):
                continue  # a thread that has just ended, or a kernel that does not count
    except OSError:
        return None
    return None if found is None else found / 1e9


def _pressure(file: Path) -> float | None:
    """Return the seconds in which some task waited for a processor since the machine started."""
    try:
        some = file.read_text(encoding="ascii").splitlines()[0]
        return int(some.rsplit("total=", 1)[1]) / 1e6
    except (OSError, IndexError, ValueError):
        return None
