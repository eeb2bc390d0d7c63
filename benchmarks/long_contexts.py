"""What a further token of a language model costs behind long prompts: caches copied, and in place.

    python benchmarks/long_contexts.py ARTIFACT --prompts 512 2048 --batch-size 1 4

Greedy search in ONNX Runtime on the CPU, one thread, random prompts, processor time. Three arms: steps whose
caches are copied each time, steps that append to them where they lie, and the graph of the whole generation.
The first two continue the same prompts in turns, `--steps` tokens a round, and are compared bit for bit. The
graph takes its prompts anew in each of `--graph-rounds`: a further token is the difference between `--steps`
more tokens and none, next to the same difference of steps in place. Printed are medians, and of the ratio of
a round's two times median, 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.artifact import read_artifact
from smelt.data.batch import Batch
from smelt.generation.config import GenerationSettings, resolve_generation
from smelt.generation.graph_generation import run_generation_graph
from smelt.generation.search import generate_resolved
from smelt.runtimes.registry import open_runner


def open_step_runner(path: Path, in_place: bool) -> Any:
    """Return a runner whose steps append in place, or copy."""
    runner: Any = open_runner(read_artifact(path), 1)
    runner.start(1)  # opens the graph of a step
    if not runner.backend._in_place:
        raise SystemExit(f"{path}: its caches cannot grow in place")
    runner.backend._in_place = in_place
    return runner


def time_copied_and_in_place(runners: list[Any], batch: Batch, rounds: int, steps: int) -> list[list[float]]:
    """Return ms a token of each round, of both runners, whose logits must be the same."""
    states = [runner.encode(batch) for runner in runners]
    times: list[list[float]] = [[], []]
    tokens = batch.input_ids[:, -1]
    for number in range(rounds + 1):  # the first one warms up
        fed, found = tokens, []
        for runner, state, kept in zip(runners, states, times, strict=True):
            tokens, logits = fed, []
            begun = time.process_time()
            for _ in range(steps):
                logits.append(runner.decode_step(state, tokens))
                tokens = logits[-1].argmax(axis=-1)
            if number:
                kept.append(1e3 * (time.process_time() - begun) / steps)
            found.append(np.stack(logits))
        if not np.array_equal(found[0], found[1]):
            raise SystemExit("the two differ")
    return times


def time_graph_and_in_place(runners: list[Any], batch: Batch, rounds: int, steps: int) -> list[list[float]]:
    """Return ms a token of each round, of the graph of the whole generation and of steps in place."""
    arms: list[Callable[[Any, Batch, Any], Any]] = [
        run_generation_graph,
        partial(generate_resolved, single_prefill=True),
    ]
    few, many = (
        resolve_generation(GenerationSettings(max_new_tokens=n, min_new_tokens=n), runners[0])
        for n in (1, 1 + 3 * steps)
    )
    times: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        found = []
        for runner, search, kept in zip(runners, arms, times, strict=True):
            begun = time.process_time()
            found.append(search(runner, batch, many))
            between = time.process_time()
            search(runner, batch, few)
            if number:
                kept.append(1e3 * (2 * between - begun - time.process_time()) / (3 * steps))
        if found[0] != found[1]:
            raise SystemExit("the texts differ")
    return times


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--graph-rounds", type=int, default=4)
    chosen = parser.parse_args()
    copied, in_place = open_step_runner(chosen.artifact, False), open_step_runner(chosen.artifact, True)
    whole = open_runner(read_artifact(chosen.artifact), 1)
    print("| prompt | batch | instead of | ms a token | in place, ms | ratio |")
    print("|--:|--:|:--|--:|--:|--:|")
    for length in chosen.prompts:
        for size in chosen.batch_size:
            ids = np.random.default_rng(0).integers(5, int(whole.config["vocab_size"]), (size, length))
            batch = Batch(ids, np.ones_like(ids))
            rows = {
                "copied caches": time_copied_and_in_place(
                    [copied, in_place], batch, chosen.rounds, chosen.steps
                )
            }
            if chosen.graph_rounds:
                rows["one graph"] = time_graph_and_in_place(
                    [whole, in_place], batch, chosen.graph_rounds, chosen.steps
                )
            for name, times in rows.items():
                low, middle, high = np.percentile(np.array(times[0]) / np.array(times[1]), [10, 50, 90])
                before, after = (np.median(kept) for kept in times)
                print(
                    f"| {length:,} | {size} | {name} | {before:.2f} | {after:.2f} |"
                    f" {middle:.2f} [{low:.2f}, {high:.2f}] |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
