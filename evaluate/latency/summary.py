"""From rounds to the numbers of the report, and which texts are timed at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.evaluate.latency.rounds import Pair, Place, judge, speedup

# The parts are those of the calls that took the median time, give or take this share of it; so they add
# up to it within this share.
NEAR = 0.05

Row = dict[str, Any]


@dataclass(frozen=True)
class Lengths:
    """Mean number of tokens of a text and of what the model makes of it."""

    input_tokens: float
    output_tokens: float


def summarize(pairs: Sequence[Pair], own: Place, baseline: Place, lengths: Lengths) -> Row:
    """Return percentiles in ms over all calls of the rounds that count, their parts, and the speed-up.

    throughput: texts per second of work. cpu_ms: mean time of a call on processors, all threads
    together. speedup and its interval are None where there was no baseline beside; cpu_speedup, the same of
    processor time, also on a GPU, of whose work the processor knows nothing. baseline_p50_ms: the baseline's
    over its calls in the same rounds.
    """
    verdict = judge(pairs, own, baseline)
    counted = [pairs[at] for at in verdict.counted]
    rounds = [pair.own for pair in counted]
    calls = np.concatenate([np.asarray(r.times_ms) for r in rounds])
    p50, p90, p99 = (float(p) for p in np.percentile(calls, [50, 90, 99]))
    beside = [pair.baseline for pair in counted if pair.baseline is not None]
    ratio, interval = _ratio(pair.speedup for pair in counted)
    on_cpu = own.device == baseline.device == "cpu"
    cpu_ratio, cpu_interval = _ratio(pair.cpu_speedup if on_cpu else None for pair in counted)
    return {
        "input_tokens": round(lengths.input_tokens, 2) or None,  # images have none
        "output_tokens": round(lengths.output_tokens, 2) or None,
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
        "cpu_ms": sum(r.load.processor_ms for r in rounds) / len(calls),
        "throughput": 1000 * sum(r.texts for r in rounds) / float(calls.sum()),
        "speedup": ratio,
        "speedup_ci95": interval,
        "cpu_speedup": cpu_ratio,
        "cpu_speedup_ci95": cpu_interval,
        "baseline_p50_ms": float(np.median([ms for r in beside for ms in r.times_ms])) if beside else None,
        "stable": verdict.stable,
        "cause": verdict.cause,
        "reason": verdict.reason,
        "parts": parts_of(calls, [part for r in rounds for part in r.parts], p50),
        "rounds_ms": [pair.own.median_ms for pair in pairs],
        "rounds": [
            _circumstances(pair, own, baseline, at in verdict.counted) for at, pair in enumerate(pairs)
        ],
    }


def _ratio(ratios: Iterable[float | None]) -> tuple[float | None, list[float] | None]:
    """Return the mean of the ratios of paired rounds and its interval; None of fewer than two."""
    found = [ratio for ratio in ratios if ratio is not None]
    return speedup(found) if len(found) > 1 else (None, None)


def _circumstances(pair: Pair, own: Place, baseline: Place, counted: bool) -> Row:
    """Return what the report tells of a pair of rounds; of what else went on, the worse of the two."""
    loads = [pair.own.load] + ([pair.baseline.load] if pair.baseline else [])
    pressures = [load.pressure for load in loads if load.pressure is not None]
    return {
        "counted": counted,
        "speedup": pair.speedup,
        "cpu_speedup": pair.cpu_speedup if own.device == baseline.device == "cpu" else None,
        "baseline_ms": pair.baseline.median_ms if pair.baseline else None,
        "processor_share": loads[0].processor_ms / loads[0].wall_ms,
        "baseline_processor_share": loads[1].processor_ms / loads[1].wall_ms if pair.baseline else None,
        "lost_share": pair.lost(own, baseline),
        "other_processors": max(load.others for load in loads),
        "cpu_steal": max(load.stolen for load in loads),
        "pressure": max(pressures, default=None),
    }


def parts_of(calls: NDArray[np.float64], parts: list[list[float]], p50: float) -> Row | None:
    """Return what the median call's time went into, ms; None where the runner does not show it.

    Args:
        calls: ms of every call.
        parts: what each of them went into, as `Watch.parts` gives it.
        p50: the median of `calls`.
    """
    if not parts or len(parts) != len(calls):
        return None
    distance = np.abs(calls - p50)
    near = np.flatnonzero(distance <= NEAR * p50)
    if not len(near):  # the median of an even number lies between two calls
        near = np.argsort(distance, kind="stable")[:2]
    means = np.asarray([parts[at] for at in near]).mean(axis=0)
    if len(means) == 3:
        return dict(zip(("tokenizing_ms", "model_ms", "rest_ms"), map(float, means), strict=True))
    if len(means) == 5:
        before, whole, tokens, after, first = map(float, means)
        return {
            "tokenizing_ms": before,
            "encoding_ms": None,
            "time_to_first_token_ms": before + first,
            "time_per_output_token_ms": (whole - first) / tokens if tokens else None,
            "further_tokens": tokens,
            "detokenizing_ms": after,
        }
    before, encoding, first, further, tokens, after = map(float, means)
    return {
        "tokenizing_ms": before,
        "encoding_ms": encoding,
        "time_to_first_token_ms": before + encoding + first,
        "time_per_output_token_ms": further / tokens if tokens else None,
        "further_tokens": tokens,
        "detokenizing_ms": after,
    }


def spread(texts: Sequence[str], count: int) -> list[int]:
    """Return the places of `count` texts spread evenly over the lengths; some repeated for too few.

    Lengths are bytes, so that the choice is the same for every tokenizer: the texts at the middles of
    `count` equal shares of the texts sorted by length.
    """
    order = sorted(range(len(texts)), key=lambda i: (len(texts[i].encode()), i))
    return [order[(2 * at + 1) * len(order) // (2 * count)] for at in range(count)]
