"""What serve.py of packages answers in a second, by its options and the callers at the same time.

    python benchmarks/package_service.py TEST.jsonl.gz PACKAGE [PACKAGE ...]

Each request is one text, over a connection that a caller keeps. One service for each package and set of
options runs all the time, and they take turns, round by round, so that other work on the machine meets all of
them. Printed are medians over the rounds; `ratio` is the requests a second over those of the first package
and options with as many callers, in the same round, with the smallest and the largest of the rounds.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

OPTIONS = (
    "--workers 2 --max-batch 1",
    "--workers 2 --max-batch 8",
    "--workers 2 --max-batch 16",
    "--workers 2 --max-batch 32",
    "--workers 2 --max-batch 16 --max-wait 0.002",
    "--workers 1 --threads 2 --max-batch 16",
)


class RunningService:
    """A service with some options. name: both. cpu: seconds of the processor that it has used."""

    def __init__(self, package: Path, options: str) -> None:
        self.name = f"{package.name} {options}"
        command = [sys.executable, "serve.py", "--port", "0", *options.split()]
        self.process = subprocess.Popen(command, cwd=package, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rsplit(":", 1)[1])
        assert self.process.stdout.readline() == "ready\n"

    @property
    def cpu(self) -> float:
        """Seconds."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


def measure(service: RunningService, callers: int, texts: list[str]) -> tuple[float, float, float, float]:
    """Return requests a second, median and 95th percentile of a request in ms, processor ms a request."""
    left, latencies_ms = iter(texts), []
    lock = threading.Lock()

    def caller() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", service.port)
        while True:
            with lock:
                text = next(left, None)
            if text is None:
                return
            body = json.dumps({"inputs": [text]})
            begin = time.perf_counter()
            connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            latencies_ms.append(1000 * (time.perf_counter() - begin))

    cpu, begin = service.cpu, time.perf_counter()
    threads = [threading.Thread(target=caller) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall, times = time.perf_counter() - begin, sorted(latencies_ms)
    late = times[min(len(times) - 1, int(0.95 * len(times)))]
    return len(texts) / wall, statistics.median(times), late, 1000 * (service.cpu - cpu) / len(texts)


def main() -> None:
    """Measure all settings and print a table of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("test", type=Path)
    parser.add_argument("packages", type=Path, nargs="+", help="standalone packages")
    parser.add_argument("--field", default="source", help="of the rows")
    parser.add_argument("--options", nargs="+", default=list(OPTIONS))
    parser.add_argument("--callers", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with gzip.open(arguments.test, "rt", encoding="utf-8") as stream:
        texts = [json.loads(line)[arguments.field] for line in itertools.islice(stream, arguments.requests)]
    services = [
        RunningService(package, options)
        for package, options in itertools.product(arguments.packages, arguments.options)
    ]
    settings = list(itertools.product(arguments.callers, services))
    results: dict[tuple[int, RunningService], list[tuple[float, ...]]] = {setting: [] for setting in settings}
    for number in range(arguments.rounds + 1):  # the first one warms up
        for callers, service in settings:
            values = measure(service, callers, texts)
            if number:
                results[callers, service].append(values)
    print(f"{os.cpu_count()} cores, {len(texts)} requests of one text, medians of {arguments.rounds} rounds")
    print("callers  requests/s  ratio [least, most]  p50 ms  p95 ms  processor ms  package, options")
    for (callers, service), rounds in results.items():
        rate, middle, late, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [a[0] / b[0] for a, b in zip(rounds, results[callers, services[0]], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        columns = f"{callers:7}  {rate:10.1f}  {ratio:>19}  {middle:6.1f}  {late:6.1f}  {cpu:12.1f}"
        print(f"{columns}  {service.name}")
    for service in services:
        service.process.terminate()


if __name__ == "__main__":
    main()
