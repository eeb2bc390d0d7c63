"""How many threads a finished artifact takes by itself: the fewest that are as fast as any.

Decoding token by token has too little work for two threads, which then wait for each other; encoders of long
texts gain. So each number is measured on the artifact's own graphs, on real rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from smelt.runtime.batch import Batch

# Another number is taken only where it is faster by more than this share
MARGIN = 0.05
_ROUNDS = 7
_MIN_ROUND_SECONDS = 0.02
_NEW_TOKENS = 16
# threads of the session that worked before may spin on for some milliseconds
_SETTLE_SECONDS = 0.02


def cores() -> int:
    """Return how many processors this process may use."""
    found = getattr(os, "sched_getaffinity", None)
    return len(found(0)) if found else os.cpu_count() or 1


def measure_threads(
    folder: Path, target: str, dtype: str, batch: Batch, size: int, generates: bool
) -> tuple[int, dict[str, float]]:
    """Time calls of `size` texts with 1, 2, 4 ... N threads, in turns; return the choice and ms by number.

    Args:
        folder: of the finished graphs, with the model's config files.
        target: of the export.
        dtype: what the runtime computes in.
        batch: real texts.
        size: of a call.
        generates: whether a call is a generation, of `_NEW_TOKENS` tokens at most.
    """
    from smelt.runtime.backends.open_runner import open_folder

    rows = np.resize(np.arange(len(batch.input_ids)), size)
    types = None if batch.token_type_ids is None else batch.token_type_ids[rows]
    used = Batch(batch.input_ids[rows], batch.attention_mask[rows], types)
    with ExitStack() as stack:
        calls = {}
        for count in numbers(cores()):
            runner = stack.enter_context(open_folder(folder, "onnx", target, count, dtype=dtype))
            calls[count] = partial(_call, runner, used, generates)
        return choose(_timed(calls))


def numbers(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and `most`: each of them is a runner with weights and threads of its own."""
    return [n for n in (2**at for at in range(most.bit_length())) if n < most] + [most]


def _call(runner: Any, batch: Batch, generates: bool) -> None:
    from smelt.runtime.generate.decoding import settle
    from smelt.runtime.generate.settings import Generation

    if generates:
        runner.generator(runner, batch, settle(Generation(max_new_tokens=_NEW_TOKENS), runner))
    else:
        runner.forward(batch)


def _timed(calls: Mapping[int, Callable[[], None]]) -> dict[int, float]:
    """Return the median ms of a call by number of threads, in rounds that go through all of them."""
    found: dict[int, list[float]] = {count: [] for count in calls}
    for at in range(_ROUNDS + 1):  # the first one warms up
        for count, call in calls.items():
            time.sleep(_SETTLE_SECONDS)
            times: list[float] = []
            began = time.perf_counter()
            while time.perf_counter() - began < _MIN_ROUND_SECONDS or not times:
                start = time.perf_counter()
                call()
                times.append(1000 * (time.perf_counter() - start))
            if at:
                found[count].append(median(times))
    return {count: median(times) for count, times in found.items()}


def choose(times_ms: dict[int, float]) -> tuple[int, dict[str, float]]:
    """Return the fewest threads that are within the margin of the fastest, and the times for the report."""
    best = min(times_ms.values())
    count = min(n for n, took in times_ms.items() if took * (1 - MARGIN) <= best)
    return count, {f"{n} thread{'s' * (n != 1)}": round(took, 3) for n, took in times_ms.items()}
