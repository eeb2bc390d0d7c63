"""The loop inside of the graph beside the loop in Python, over the same artifact: text to text.

    python benchmarks/graph_vs_python_loop.py TEST.jsonl.gz ARTIFACT... --num-beams 1 4 --batch-size 1 8

One thread, processor time, rounds that alternate between the two. Printed are ms a sentence (median over the
rounds), the ratio of each round's two times (median, lowest, highest), and how many texts differ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from smelt.core.artifact import read_artifact
from smelt.data.examples import read_split
from smelt.data.splits import Columns
from smelt.generation.config import GenerationSettings
from smelt.generation.search import generate_resolved
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_runner


def time_generation(
    runner: Any, texts: list[str], generation: GenerationSettings, size: int
) -> tuple[float, list[str]]:
    """Return processor seconds and texts, in batches of texts of similar length."""
    groups = [texts[at : at + size] for at in range(0, len(texts), size)]
    began = time.process_time()
    found = [text for group in groups for text in generate_texts(runner, group, generation, size)]
    return time.process_time() - began, found


def compare(runner: Any, texts: list[str], generation: GenerationSettings, size: int, rounds: int) -> str:
    """Return a row of the table."""
    seconds: dict[str, list[float]] = {"python": [], "graph": []}
    outputs: dict[str, list[str]] = {}
    whole = runner.generator
    for number in range(rounds + 1):  # the first one warms up
        for name, generator in (("python", generate_resolved), ("graph", whole)):
            runner.generator = generator
            took, outputs[name] = time_generation(runner, texts, generation, size)
            if number:
                seconds[name].append(1000 * took / len(texts))
    runner.generator = whole
    ratios = [graph / python for graph, python in zip(seconds["graph"], seconds["python"], strict=True)]
    differ = sum(a != b for a, b in zip(outputs["python"], outputs["graph"], strict=True))
    python, graph = (statistics.median(seconds[name]) for name in ("python", "graph"))
    spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    return f"{python:.2f} | {graph:.2f} | {spread} | {differ}"


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--num-beams", dest="beams", type=int, nargs="+", default=[1])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=None)
    chosen = parser.parse_args()
    print("| artifact | search | batch | loop in Python, ms | in the graph, ms | ratio | texts that differ |")
    print("|:--|:--|--:|--:|--:|--:|--:|")
    for path in chosen.artifacts:
        artifact = read_artifact(path)
        task: Any = artifact.manifest.task
        split = read_split(str(chosen.data), task, Columns(), Path.cwd())
        texts = sorted((e.text for e in split.examples[: chosen.limit]), key=len)
        with open_runner(artifact, threads=1) as runner:
            for beams in chosen.beams:
                generation = GenerationSettings(num_beams=beams, max_new_tokens=chosen.max_new_tokens)
                for size in chosen.batch_size:
                    row = compare(runner, texts, generation, size, chosen.rounds)
                    print(f"| {path.name} | {generation.summary()} | {size} | {row} |", flush=True)


if __name__ == "__main__":
    main()
