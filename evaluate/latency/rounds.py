"""Decides which timing rounds count, and whether they agree.

A round is disturbed where other work kept the process from running for more than a tenth of the time.
Interleaving does not help against that: on two busy cores PyTorch with two threads became 25 times as
slow and ONNX Runtime did not, so that a busy machine appears as a speed-up of 138 in every round.
Disturbed rounds are repeated and do not count. A speed-up must also agree from round to round.

The speed-up is the geometric mean of the ratios of paired rounds (P. Fleming, J. Wallace, "How not to lie
with statistics", CACM 29(3), 1986, doi:10.1145/5666.5673), its interval Student's over their logarithms,
as for few measurements in A. Georges, D. Buytaert, L. Eeckhout, "Statistically rigorous Java performance
evaluation" (OOPSLA 2007, doi:10.1145/1297027.1297033), section 3.2. With three rounds it is wide: a
bootstrap or a range over so few rounds has a far lower coverage than its nominal one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from smelt.evaluate.latency.machine_load import MachineLoad

# The share of a round that may be lost to other work.
MAX_ROUND_LOST_SHARE = 0.10
# The largest half-width of the speed-up's interval, as a share of the speed-up.
MAX_INTERVAL_SHARE = 0.10
# With fewer rounds their variation is unknown.
MIN_ROUNDS = 3
# At most this many times the requested rounds are measured.
MAX_ROUND_FACTOR = 3

DisturbanceCause = Literal["busy", "disagree"]


@dataclass(frozen=True)
class ComputeResources:
    """The resources of a process: threads, number of processors; device is cpu or cuda."""

    threads: int
    processors: int
    device: str = "cpu"


@dataclass(frozen=True)
class TimingRound:
    """Whole passes of one process over its samples.

    times_ms: of every call. parts: the parts of each call's time, see timed_runner.py. texts: number of
    samples of all calls together. load: of the machine during the round.
    """

    times_ms: list[float]
    parts: list[list[float]]
    texts: int
    load: MachineLoad

    @property
    def median_ms(self) -> float:
        """Return the median time of a call."""
        return statistics.median(self.times_ms)

    @property
    def processor_ms(self) -> float:
        """Return the mean processor time of a call, all threads together."""
        return self.load.processor_ms / len(self.times_ms)

    def lost_share(self, place: ComputeResources) -> float:
        """Return the share of the time, 0 to 1, in which other work kept the process from running.

        With one thread on the processor it is all the time in which the thread did not run: nothing else
        makes it wait. Several threads also wait for each other; there it is the time that they waited in the
        run queue, or, since spinning threads are never counted as waiting, the demand of all threads beyond
        the available processors. On a GPU only the latter is used.
        """
        load = self.load
        own = min(place.threads, place.processors)  # more threads than processors disturb each other
        crowded = max(0.0, load.others + load.stolen + own - place.processors) / own
        if place.device != "cpu":
            return min(1.0, crowded)
        if place.threads == 1:
            used = load.processor_ms / load.wall_ms
            return min(1.0, max(0.0, 1 - used, load.stolen / place.processors))
        return min(1.0, max(crowded, (load.waited_ms or 0.0) / load.wall_ms))


@dataclass(frozen=True)
class RoundPair:
    """A round of an artifact and the baseline's paired round; None where there is no baseline."""

    own: TimingRound
    baseline: TimingRound | None

    def lost_share(self, own: ComputeResources, baseline: ComputeResources) -> float:
        """Return the larger share of the time that either of the two lost to other work."""
        return max(self.own.lost_share(own), self.baseline.lost_share(baseline) if self.baseline else 0.0)

    @property
    def speedup(self) -> float | None:
        """Return how many times as fast as the baseline's the median call was."""
        return None if self.baseline is None else self.baseline.median_ms / self.own.median_ms

    @property
    def cpu_speedup(self) -> float | None:
        """Return the baseline's mean processor time of a call divided by the artifact's."""
        if self.baseline is None or not self.own.processor_ms:
            return None
        return self.baseline.processor_ms / self.own.processor_ms


@dataclass(frozen=True)
class RoundsVerdict:
    """Assessment of the rounds so far.

    counted_rounds: indices of the rounds that count. is_sufficient: no more are needed. cause: why no speed
    may be claimed, or None: other work (`busy`), the rounds (`disagree`). reason: the same as a text.
    """

    counted_rounds: tuple[int, ...]
    is_sufficient: bool
    cause: DisturbanceCause | None = None
    reason: str | None = None

    @property
    def stable(self) -> bool:
        """Whether a speed may be claimed."""
        return self.cause is None


def judge_rounds(
    pairs: Sequence[RoundPair], own: ComputeResources, baseline: ComputeResources, wanted: int = MIN_ROUNDS
) -> RoundsVerdict:
    """Return which of `pairs` count, and whether a speed may be claimed from them.

    Args:
        pairs: at least one.
        own: resources of the artifact's process.
        baseline: resources of the baseline's.
        wanted: number of undisturbed rounds that are requested.
    """
    lost = [pair.lost_share(own, baseline) for pair in pairs]
    calm = tuple(at for at, share in enumerate(lost) if share <= MAX_ROUND_LOST_SHARE)
    if len(calm) < MIN_ROUNDS:
        many = sum(share > MAX_ROUND_LOST_SHARE for share in lost)
        reason = (
            f"other processes used the CPU in {many} of {len(pairs)} rounds, up to {100 * max(lost):.0f} % of"
            " the time"
        )
        return RoundsVerdict(tuple(range(len(pairs))), False, "busy", reason)
    ratios = [ratio for at in calm if (ratio := pairs[at].speedup) is not None]
    enough = len(calm) >= wanted
    if len(ratios) >= MIN_ROUNDS:
        value, (_, high) = mean_speedup(ratios)
        if high > value * (1 + MAX_INTERVAL_SHARE):
            reason = f"the rounds disagree: from {min(ratios):.2f}× to {max(ratios):.2f}×"
            return RoundsVerdict(calm, False, "disagree", reason)
    return RoundsVerdict(calm, enough)


def mean_speedup(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, list[float]]:
    """Return the mean speed-up and its interval, from the ratios of at least two paired rounds."""
    logarithms = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logarithms)
    half = _student_t(confidence, len(ratios) - 1) * statistics.stdev(logarithms) / math.sqrt(len(ratios))
    return math.exp(middle), [math.exp(middle - half), math.exp(middle + half)]


@cache
def _student_t(confidence: float, freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + confidence) / 2, freedom))
