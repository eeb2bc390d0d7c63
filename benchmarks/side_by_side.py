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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from smelt.core.artifact import read_artifact
from smelt.core.data import Columns, read_split
from smelt.runtime.backends.open_runner import open_runner
from smelt.runtime.generate.settings import Generation
from smelt.runtime.predict import generate_texts


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    chosen = parser.parse_args()
    print("| artifact | threads | batch | ms | ratio | texts that differ |")
    print("|:--|--:|--:|--:|--:|--:|")
    with ExitStack() as stack:
        runners: dict[tuple[str, int], Any] = {}
        for path in chosen.artifacts:
            for threads in chosen.threads:
                artifact = read_artifact(path)
                opened = open_runner(artifact, threads=threads or None)
                runners[(path.name, threads)] = stack.enter_context(opened)
        split = read_split(str(chosen.data), "translation", Columns(), Path.cwd())
        texts = sorted((e.text for e in split.examples[: chosen.limit]), key=len)
        clock = time.process_time if chosen.threads == [1] else time.perf_counter
        for size in chosen.batch_size:
            times: dict[Any, list[float]] = {name: [] for name in runners}
            said: dict[Any, list[str]] = {}
            for _ in range(chosen.rounds + 1):  # the first one warms up
                for name, runner in runners.items():
                    groups = [texts[at : at + size] for at in range(0, len(texts), size)]
                    search = Generation(beams=chosen.beams)
                    began = clock()
                    said[name] = [t for group in groups for t in generate_texts(runner, group, search, size)]
                    times[name].append(1000 * (clock() - began) / len(texts))
            first = next(iter(runners))
            for name in runners:
                pairs = zip(times[name][1:], times[first][1:], strict=True)
                ratios = [own / other for own, other in pairs]
                spread = f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
                differ = sum(a != b for a, b in zip(said[name], said[first], strict=True))
                ms = statistics.median(times[name][1:])
                print(
                    f"| {name[0]} | {name[1] or 'own'} | {size} | {ms:.2f} | {spread} | {differ} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
