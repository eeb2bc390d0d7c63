"""What threads do for a service: requests a second and their times, by callers and threads of the model.

    python benchmarks/serving.py ARTIFACT TEST.jsonl.gz
    python benchmarks/serving.py ARTIFACT --memory

Each request is one text. For every number of threads the artifact is opened once (`smelt.load`) and all
callers, threads of this process, share it; the settings take turns, round by round, so that other work on the
machine meets all of them. Printed are medians over the rounds. With `--memory`: what the process holds once
it has searched in each of three ways.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import smelt
from smelt.api.load import Model

LONGEST = 128


def measure(model: Model, callers: int, texts: list[str]) -> tuple[float, float, float, float]:
    """Return requests a second, median and 95th percentile of a request in ms, processor ms a request."""

    def request(text: str) -> float:
        begin = time.perf_counter()
        model.generate([text], max_new_tokens=LONGEST)
        return 1000 * (time.perf_counter() - begin)

    cpu, begin = time.process_time(), time.perf_counter()
    with ThreadPoolExecutor(callers) as pool:
        times = sorted(pool.map(request, texts))
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    late = times[min(len(times) - 1, int(0.95 * len(times)))]
    return len(texts) / wall, statistics.median(times), late, 1000 * cpu / len(texts)


def print_memory(artifact: Path) -> None:
    """Print resident and anonymous memory (MB) as searches of other kinds come (Linux)."""

    def show(name: str) -> None:
        rollup = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
        rss, anonymous = (
            int(re.findall(rf"{field}: +(\d+) kB", rollup)[0]) / 1e3 for field in ("Rss", "Anonymous")
        )
        print(f"{name:10} resident {rss:5.0f} MB, anonymous {anonymous:5.0f} MB")

    text = ["A man in a red hat walks on the grass."]
    with smelt.load(artifact, threads=1) as model:
        show("opened")
        model.generate(text, max_new_tokens=8)
        show("greedy")
        model.generate(text, max_new_tokens=8, num_beams=4)
        show("beams")
        model.generate(text, max_new_tokens=8, do_sample=True)
        show("sampling")


def main() -> None:
    """Measure all settings and print a table of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path, help="a translator")
    parser.add_argument("test", type=Path, nargs="?")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--callers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.memory:
        print_memory(options.artifact)
        return
    if options.test is None:
        parser.error("TEST.jsonl.gz is needed")
    with gzip.open(options.test, "rt", encoding="utf-8") as stream:
        texts = [json.loads(line)["source"] for line in itertools.islice(stream, options.requests)]
    models = {count: smelt.load(options.artifact, threads=count) for count in options.threads}
    settings = list(itertools.product(options.threads, options.callers))
    results: dict[tuple[int, int], list[tuple[float, ...]]] = {setting: [] for setting in settings}
    for number in range(options.rounds + 1):  # the first one warms up
        for threads, callers in settings:
            values = measure(models[threads], callers, texts)
            if number:
                results[threads, callers].append(values)
    print(f"{os.cpu_count()} cores, {len(texts)} requests of one text, medians of {options.rounds} rounds")
    print("threads  callers  requests/s  p50 ms  p95 ms  processor ms")
    for (threads, callers), rounds in results.items():
        rate, middle, late, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{threads:7}  {callers:7}  {rate:10.1f}  {middle:6.1f}  {late:6.1f}  {cpu:12.1f}")
    for model in models.values():
        model.close()


if __name__ == "__main__":
    main()
