"""Artifacts with a shortlist beside the same without: text to text, one thread.

    python benchmarks/shortlist.py TEST.jsonl.gz WHOLE=LISTED [WHOLE=LISTED ...] --beams 1 4 --limit 64

WHOLE and LISTED are folders with graphs for ort-cpu. Processor time, rounds that alternate between the two.
Printed are ms a sentence (median over the rounds), the ratio of each round's two times (median, lowest,
highest), and how many texts differ.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from loop import timed

from smelt.core.data import Columns, read_split
from smelt.runtime.backends.open_runner import open_folder
from smelt.runtime.generate.settings import Generation


def compare(runners: list[Any], texts: list[str], generation: Generation, size: int, rounds: int) -> str:
    """Return a row of the table; `runners`: the whole one, the one with a list."""
    took: list[list[float]] = [[], []]
    said: list[list[str]] = [[], []]
    for number in range(rounds + 1):  # the first one warms up
        for at, runner in enumerate(runners):
            seconds, said[at] = timed(runner, texts, generation, size)
            if number:
                took[at].append(1000 * seconds / len(texts))
    ratios = [listed / whole for whole, listed in zip(*took, strict=True)]
    differ = sum(a != b for a, b in zip(*said, strict=True))
    spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    whole, listed = map(statistics.median, took)
    return f"{whole:.2f} | {listed:.2f} | {spread} | {differ}"


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("pairs", nargs="+")
    parser.add_argument("--beams", type=int, nargs="+", default=[1])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=None)
    chosen = parser.parse_args()
    print("| artifact | search | batch | all words, ms | shortlist, ms | ratio | texts that differ |")
    print("|:--|:--|--:|--:|--:|--:|--:|")
    split = read_split(str(chosen.data), "translation", Columns(), Path.cwd())
    texts = sorted((e.text for e in split.examples[: chosen.limit]), key=len)
    for pair in chosen.pairs:
        runners = [open_folder(Path(path), "onnx", "ort-cpu", 1) for path in pair.split("=")]
        for beams in chosen.beams:
            generation = Generation(beams=beams, max_new_tokens=chosen.max_new_tokens)
            for size in chosen.batch_size:
                row = compare(runners, texts, generation, size, chosen.rounds)
                name = Path(pair.split("=")[1]).name
                print(f"| {name} | {generation.summary()} | {size} | {row} |", flush=True)
        for runner in runners:
            runner.close()


if __name__ == "__main__":
    main()
