"""Processor time of encoder graphs on one thread, interleaved: python benchmarks/static_times.py FOLDER..."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from smelt.runtimes.onnx_session import open_onnx_session

ROUNDS = 15
SHAPES = ((1, 16), (1, 128), (8, 64))


def main(folders: list[Path]) -> None:
    """Print the median time in ms of each graph, by batch size and length."""
    sessions = {folder.name: open_onnx_session(folder / "model.onnx", threads=1) for folder in folders}
    numbers = np.random.default_rng(0)
    for shape in SHAPES:
        feeds = {
            "input_ids": numbers.integers(1000, 20_000, shape),
            "attention_mask": np.ones(shape, np.int64),
        }
        times: dict[str, list[float]] = {name: [] for name in sessions}
        for _ in range(ROUNDS):
            for name, session in sessions.items():
                began = time.process_time()
                session.run(None, feeds)
                times[name].append(1000 * (time.process_time() - began))
        print(shape, {name: round(median(found[2:]), 2) for name, found in times.items()})


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
