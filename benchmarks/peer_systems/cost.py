"""What making an int8 BERT costs: export, simplifying and quantizing, in smelt and in Olive."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import Any

from peer_systems.process import command_of, create_environment, environment_of
from peer_systems.systems import System, systems_of

# that smelt compares and scores on; others do neither
_ROWS = 4


def tree_bytes(root: int) -> int:
    """Return the resident memory of a process and all below it, in bytes."""
    import psutil

    try:
        top = psutil.Process(root)
        members = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for member in members:
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # it ended while it was looked at
    return total


def cost(bench: Any, system: System) -> tuple[float, float, float]:
    """Make a system's files anew; return wall seconds, processor seconds and the most memory, in MB."""
    import resource

    create_environment(bench.envs, system.environment, bench.options.minutes)
    folder = bench.output_folder(system.work, "cost") / system.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # the store of what is made lies next to the files: removed with them, so that nothing is found there
    job = {**bench.job(system, 2), "files": str(folder / "files"), "limit": _ROWS}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began, most = time.perf_counter(), 0
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        command = command_of(bench.envs, system, "make", job)
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment_of(2))
        while process.poll() is None:
            most = max(most, tree_bytes(process.pid))
            time.sleep(0.1)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{system.name} ended with {process.returncode}; see {folder / 'log.txt'}.")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, used, most / 1e6


def compare_cost(bench: Any) -> str:
    """Return a table: smelt's int8 artifact beside Olive's, one run each, two threads."""
    lines = ["| system | wall, s | processor time, s | most memory, MB |", "|:--|--:|--:|--:|"]
    systems = {one.name: one for one in systems_of("bert")}
    for name in ("smelt-int8-dynamic", "olive-dynamic"):
        wall, used, most = cost(bench, systems[name])
        lines.append(f"| {name} | {wall:.1f} | {used:.1f} | {most:.0f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)
