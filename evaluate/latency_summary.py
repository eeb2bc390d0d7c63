"""From the times of rounds to the numbers of the report, and which texts are timed at all."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_RESAMPLES = 2000

Row = dict[str, Any]


@dataclass
class Timing:
    """The rounds of one artifact at one batch size.

    input_tokens, output_tokens: mean per text. rounds: ms of every call, by round. texts: how many
    went through all calls together.
    """

    input_tokens: float
    output_tokens: float
    rounds: list[list[float]] = field(default_factory=list)
    texts: int = 0

    @property
    def medians(self) -> list[float]:
        """Each round's median call, ms."""
        return [statistics.median(r) for r in self.rounds]

    def extend(self, other: Timing) -> None:
        """Add the rounds of another measurement of the same texts."""
        self.rounds += other.rounds
        self.texts += other.texts


def summarize(timing: Timing, before: Timing | None) -> Row:
    """Return percentiles in ms over all calls, throughput in texts per second of work, and the speed-up."""
    calls = np.concatenate([np.asarray(r) for r in timing.rounds])
    p50, p90, p99 = (float(p) for p in np.percentile(calls, [50, 90, 99]))
    ratio, interval = (None, None) if before is None else speedup(before.medians, timing.medians)
    return {
        "input_tokens": round(timing.input_tokens, 2),
        "output_tokens": round(timing.output_tokens, 2),
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
        "throughput": 1000 * timing.texts / float(calls.sum()),
        "speedup": ratio,
        "speedup_ci95": interval,
        "rounds_ms": timing.medians,
    }


def speedup(
    baseline_ms: Sequence[float], own_ms: Sequence[float], seed: int = 0
) -> tuple[float, list[float]]:
    """Return how many times faster, and the 95 % interval, from the medians of paired rounds.

    Each pair of rounds gives a ratio; the value is their median, the interval the percentile
    bootstrap over rounds (B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, ch. 13).
    """
    ratios = np.asarray(baseline_ms, dtype=float) / np.asarray(own_ms, dtype=float)
    picks = np.random.default_rng(seed).integers(len(ratios), size=(_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), [2.5, 97.5])
    return float(np.median(ratios)), [float(low), float(high)]


def spread(texts: Sequence[str], count: int) -> list[int]:
    """Return the places of `count` texts spread evenly over the lengths; some repeated for too few.

    Lengths are bytes, so that the choice is the same for every tokenizer: the texts at the middles of
    `count` equal shares of the texts sorted by length.
    """
    order = sorted(range(len(texts)), key=lambda i: (len(texts[i].encode()), i))
    return [order[(2 * at + 1) * len(order) // (2 * count)] for at in range(count)]


def physical_cores() -> int:
    """Return the number of physical cores that this process may use."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))
