"""Summarizes rounds for the report and selects the samples that are timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.evaluate.latency.rounds import ComputeResources, RoundPair, judge_rounds, mean_speedup

# The parts are those of the calls within this share of the median time; so they sum up to it within this
# share.
MEDIAN_TOLERANCE = 0.05

LatencyRow = dict[str, Any]


@dataclass(frozen=True)
class MeanTokenCounts:
    """Mean number of input tokens and of output tokens."""

    input_tokens: float
    output_tokens: float


def summarize_rounds(
    pairs: Sequence[RoundPair], own: ComputeResources, baseline: ComputeResources, lengths: MeanTokenCounts
) -> LatencyRow:
    """Return percentiles in ms over all calls of the rounds that count, their parts, and the speed-up.

    throughput: samples per second. cpu_ms: mean processor time of a call, all threads together. speedup and
    its interval are None where there was no paired baseline; cpu_speedup is the same for processor time, also
    on a GPU, whose work is not part of it. baseline_p50_ms: the baseline's median call in the same rounds.
    """
    verdict = judge_rounds(pairs, own, baseline)
    counted = [pairs[at] for at in verdict.counted_rounds]
    rounds = [pair.own for pair in counted]
    calls = np.concatenate([np.asarray(r.times_ms) for r in rounds])
    p50, p90, p99 = (float(p) for p in np.percentile(calls, [50, 90, 99]))
    beside = [pair.baseline for pair in counted if pair.baseline is not None]
    ratio, interval = _mean_ratio(pair.speedup for pair in counted)
    on_cpu = own.device == baseline.device == "cpu"
    cpu_ratio, cpu_interval = _mean_ratio(pair.cpu_speedup if on_cpu else None for pair in counted)
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
        "parts": median_call_parts(calls, [part for r in rounds for part in r.parts], p50),
        "rounds_ms": [pair.own.median_ms for pair in pairs],
        "rounds": [
            _round_details(pair, own, baseline, at in verdict.counted_rounds) for at, pair in enumerate(pairs)
        ],
    }


def _mean_ratio(ratios: Iterable[float | None]) -> tuple[float | None, list[float] | None]:
    """Return the mean of the ratios of paired rounds and its interval; None for fewer than two."""
    found = [ratio for ratio in ratios if ratio is not None]
    return mean_speedup(found) if len(found) > 1 else (None, None)


def _round_details(
    pair: RoundPair, own: ComputeResources, baseline: ComputeResources, counted: bool
) -> LatencyRow:
    """Return the report's entry of a pair of rounds; the load by other work is the larger of the two."""
    loads = [pair.own.load] + ([pair.baseline.load] if pair.baseline else [])
    pressures = [load.pressure for load in loads if load.pressure is not None]
    return {
        "counted": counted,
        "speedup": pair.speedup,
        "cpu_speedup": pair.cpu_speedup if own.device == baseline.device == "cpu" else None,
        "baseline_ms": pair.baseline.median_ms if pair.baseline else None,
        "processor_share": loads[0].processor_ms / loads[0].wall_ms,
        "baseline_processor_share": loads[1].processor_ms / loads[1].wall_ms if pair.baseline else None,
        "lost_share": pair.lost_share(own, baseline),
        "other_processors": max(load.others for load in loads),
        "cpu_steal": max(load.stolen for load in loads),
        "pressure": max(pressures, default=None),
    }


def median_call_parts(calls: NDArray[np.float64], parts: list[list[float]], p50: float) -> LatencyRow | None:
    """Return the parts of the median call's time, ms; None where the runner does not measure them.

    Args:
        calls: ms of every call.
        parts: the parts of each, as `TimedRunner.call_parts` returns them.
        p50: the median of `calls`.
    """
    if not parts or len(parts) != len(calls):
        return None
    distance = np.abs(calls - p50)
    near = np.flatnonzero(distance <= MEDIAN_TOLERANCE * p50)
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


def spread_over_lengths(texts: Sequence[str], count: int) -> list[int]:
    """Return the indices of `count` texts spread evenly over the lengths; repeated if there are too few.

    Lengths are bytes, so that the choice is the same for every tokenizer: the texts at the middles of
    `count` equal shares of the texts sorted by length.
    """
    order = sorted(range(len(texts)), key=lambda i: (len(texts[i].encode()), i))
    return [order[(2 * at + 1) * len(order) // (2 * count)] for at in range(count)]
