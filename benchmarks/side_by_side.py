"""Artifacts that generate beside each other, text to text.

    python benchmarks/side_by_side.py TEST.jsonl.gz ARTIFACT ARTIFACT [...] --batch-size 1 8 32 --limit 96

Each round goes through all artifacts in one process. Printed are ms a sentence (median over the rounds), the
ratio to the first artifact of the same round (median, lowest, highest), and how many texts differ from its.
One thread and processor time unless --threads says more: then wall time. `--threads 0` takes those that are
written into the artifact.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from smelt.core.artifact import read_artifact
from smelt.data.examples import read_split
from smelt.data.splits import Columns
from smelt.generation.config import GenerationSettings
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_runner

Runners = dict[tuple[str, int], Any]
"""By the artifact's name, and threads."""


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-beams", dest="beams", type=int, nargs="+", default=[1])
    parser.add_argument("--max-new-tokens", type=int, default=None)
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    chosen = parser.parse_args()
    clock = time.process_time if chosen.threads == [1] else time.perf_counter
    split = read_split(str(chosen.data), "translation", Columns(), Path.cwd())
    texts = sorted((e.text for e in split.examples[: chosen.limit]), key=len)
    print("| artifact | threads | search | batch | ms | ratio | texts that differ |")
    print("|:--|--:|:--|--:|--:|--:|--:|")
    with ExitStack() as stack:
        runners: Runners = {}
        for path in chosen.artifacts:
            for threads in chosen.threads:
                opened = open_runner(read_artifact(path), threads=threads or None)
                runners[(path.name, threads)] = stack.enter_context(opened)
        for beams in chosen.beams:
            search = GenerationSettings(num_beams=beams, max_new_tokens=chosen.max_new_tokens)
            for size in chosen.batch_size:
                for line in compare(runners, texts, search, size, chosen.rounds, clock):
                    print(line, flush=True)


def compare(
    runners: Runners,
    texts: list[str],
    search: GenerationSettings,
    size: int,
    rounds: int,
    clock: Callable[[], float],
) -> Iterator[str]:
    """Yield a line of the table for each runner."""
    times: dict[Any, list[float]] = {name: [] for name in runners}
    outputs: dict[Any, list[str]] = {}
    groups = [texts[at : at + size] for at in range(0, len(texts), size)]
    for _ in range(rounds + 1):  # the first one warms up
        for name, runner in runners.items():
            began = clock()
            outputs[name] = [t for group in groups for t in generate_texts(runner, group, search, size)]
            times[name].append(1000 * (clock() - began) / len(texts))
    first = next(iter(runners))
    for name in runners:
        ratios = [own / other for own, other in zip(times[name][1:], times[first][1:], strict=True)]
        spread = f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
        differ = sum(a != b for a, b in zip(outputs[name], outputs[first], strict=True))
        ms = statistics.median(times[name][1:])
        cells = [name[0], name[1] or "own", search.summary(), size, f"{ms:.2f}", spread, differ]
        yield "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
