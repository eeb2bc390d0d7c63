"""Choose the default thread count of an artifact: the fewest threads that are as fast as any.

Decoding token by token has too little work for two threads; encoders of long texts gain. So each thread count
is measured on the artifact's own graphs, with real samples.
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

# Another thread count is chosen only if it is faster by more than this fraction
THREADS_MARGIN = 0.05
_TIMING_ROUNDS = 7
_MIN_ROUND_SECONDS = 0.02
_NEW_TOKENS = 16
# threads of the previous session may spin for some milliseconds
_SETTLE_SECONDS = 0.02


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    found = getattr(os, "sched_getaffinity", None)
    return len(found(0)) if found else os.cpu_count() or 1


def measure_threads(
    folder: Path, target: str, dtype: str, batch: Batch, size: int, generates: bool
) -> tuple[int, dict[str, float]]:
    """Time calls of `size` texts with 1, 2, 4 ... N threads in turns; return the choice and ms by count.

    Args:
        folder: of the finished graphs, with the model's config files.
        target: of the export.
        dtype: compute precision of the runtime.
        batch: real texts.
        size: texts per call.
        generates: whether a call is a generation, of at most `_NEW_TOKENS` tokens.
    """
    from smelt.runtime.backends.open_runner import open_folder

    rows = np.resize(np.arange(len(batch.input_ids)), size)
    types = None if batch.token_type_ids is None else batch.token_type_ids[rows]
    used = Batch(batch.input_ids[rows], batch.attention_mask[rows], types)
    with ExitStack() as stack:
        calls = {}
        for count in thread_counts(available_cores()):
            runner = stack.enter_context(open_folder(folder, "onnx", target, count, dtype=dtype))
            calls[count] = partial(_run_once, runner, used, generates)
        return fewest_threads(_time_calls(calls))


def thread_counts(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and `most`; each count needs a runner with its own weights and threads."""
    return [n for n in (2**at for at in range(most.bit_length())) if n < most] + [most]


def _run_once(runner: Any, batch: Batch, generates: bool) -> None:
    from smelt.runtime.generate.generation_config import resolve_generation
    from smelt.runtime.generate.settings import GenerationSettings

    if generates:
        runner.generator(
            runner, batch, resolve_generation(GenerationSettings(max_new_tokens=_NEW_TOKENS), runner)
        )
    else:
        runner.forward(batch)


def _time_calls(calls: Mapping[int, Callable[[], None]]) -> dict[int, float]:
    """Return the median ms of a call by thread count, measured in rounds over all counts."""
    found: dict[int, list[float]] = {count: [] for count in calls}
    for at in range(_TIMING_ROUNDS + 1):  # the first round is a warm-up
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


def fewest_threads(times_ms: dict[int, float]) -> tuple[int, dict[str, float]]:
    """Return the fewest threads that are within the margin of the fastest, and the times for the report."""
    best = min(times_ms.values())
    count = min(n for n, took in times_ms.items() if took * (1 - THREADS_MARGIN) <= best)
    return count, {f"{n} thread{'s' * (n != 1)}": round(took, 3) for n, took in times_ms.items()}
