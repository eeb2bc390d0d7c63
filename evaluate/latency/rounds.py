"""Which rounds count, and whether they agree: decisions over what was seen, and nothing else.

A round is disturbed where other work kept the process from running for more than a tenth of the time.
Interleaving does not help against that: on two busy cores PyTorch with two threads became 25 times as
slow and ONNX Runtime did not, so that a busy machine reads as a speed-up of 138, round after round.
Disturbed rounds are repeated and do not count. What is claimed must also agree from round to round.

The speed-up is the geometric mean of the ratios of paired rounds (P. Fleming, J. Wallace, "How not to lie
with statistics", CACM 29(3), 1986, doi:10.1145/5666.5673), its interval Student's over their logarithms,
as for few measurements in A. Georges, D. Buytaert, L. Eeckhout, "Statistically rigorous Java performance
evaluation" (OOPSLA 2007, doi:10.1145/1297027.1297033), section 3.2. With three rounds it is wide: a
bootstrap or a range over so few covers the truth far less often than it says.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from smelt.evaluate.latency.machine_load import Load

# The share of a round that may be lost to other work.
DISTURBED = 0.10
# How far the ends of the speed-up's interval may lie from the speed-up, as a share of it.
SPREAD = 0.10
# Fewer rounds than this say nothing of how much they vary.
FEWEST = 3
# So many times the rounds that are asked for are taken at most.
MOST = 3

Cause = Literal["busy", "disagree"]


@dataclass(frozen=True)
class Place:
    """What the process may use: threads, of so many processors; device is cpu or cuda."""

    threads: int
    processors: int
    device: str = "cpu"


@dataclass(frozen=True)
class Round:
    """Whole passes of one process over its texts.

    times_ms: of every call. parts: what each call's time went into, see watch.py. texts: that went
    through all calls together. load: what the machine did meanwhile.
    """

    times_ms: list[float]
    parts: list[list[float]]
    texts: int
    load: Load

    @property
    def median_ms(self) -> float:
        """The median call."""
        return statistics.median(self.times_ms)

    @property
    def processor_ms(self) -> float:
        """The mean processor time of a call, all threads together."""
        return self.load.processor_ms / len(self.times_ms)

    def lost(self, place: Place) -> float:
        """Return the share of the time, 0 to 1, in which other work kept the process from running.

        With one thread on the processor that is all the time that it did not use one: nothing else makes
        it wait. Several threads also wait for each other; there it is the time that they stood in the run
        queue, or, since threads that spin are never seen waiting, what they and others wanted beyond the
        processors that there are. On a GPU only the latter is looked at.
        """
        load = self.load
        own = min(place.threads, place.processors)  # threads beyond the processors disturb each other
        crowded = max(0.0, load.others + load.stolen + own - place.processors) / own
        if place.device != "cpu":
            return min(1.0, crowded)
        if place.threads == 1:
            used = load.processor_ms / load.wall_ms
            return min(1.0, max(0.0, 1 - used, load.stolen / place.processors))
        return min(1.0, max(crowded, (load.waited_ms or 0.0) / load.wall_ms))


@dataclass(frozen=True)
class Pair:
    """A round of an artifact and the baseline's beside it; None where there is no baseline."""

    own: Round
    baseline: Round | None

    def lost(self, own: Place, baseline: Place) -> float:
        """Return the larger share of the time that one of the two lost to other work."""
        return max(self.own.lost(own), self.baseline.lost(baseline) if self.baseline else 0.0)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the baseline's the median call was."""
        return None if self.baseline is None else self.baseline.median_ms / self.own.median_ms

    @property
    def cpu_speedup(self) -> float | None:
        """How many times the processor time of its calls the baseline's took, a call on average."""
        if self.baseline is None or not self.own.processor_ms:
            return None
        return self.baseline.processor_ms / self.own.processor_ms


@dataclass(frozen=True)
class Verdict:
    """What the rounds so far are good for.

    counted: the places of those that count. settled: no more are needed. cause: why nothing may be claimed
    from them, or None: other work (`busy`), the rounds (`disagree`). reason: the same in words.
    """

    counted: tuple[int, ...]
    settled: bool
    cause: Cause | None = None
    reason: str | None = None

    @property
    def stable(self) -> bool:
        """Whether a speed may be claimed."""
        return self.cause is None


def judge(pairs: Sequence[Pair], own: Place, baseline: Place, wanted: int = FEWEST) -> Verdict:
    """Decide which of `pairs` count, and whether a speed may be claimed from them.

    Args:
        pairs: at least one.
        own: of the artifact's process.
        baseline: of the baseline's.
        wanted: how many undisturbed rounds are asked for.
    """
    lost = [pair.lost(own, baseline) for pair in pairs]
    calm = tuple(at for at, share in enumerate(lost) if share <= DISTURBED)
    if len(calm) < FEWEST:
        many = sum(share > DISTURBED for share in lost)
        reason = (
            f"other work took the processor in {many} of {len(pairs)} rounds, up to {100 * max(lost):.0f} %"
            " of the time"
        )
        return Verdict(tuple(range(len(pairs))), False, "busy", reason)
    ratios = [ratio for at in calm if (ratio := pairs[at].speedup) is not None]
    enough = len(calm) >= wanted
    if len(ratios) >= FEWEST:
        value, (_, high) = speedup(ratios)
        if high > value * (1 + SPREAD):
            reason = f"the rounds disagree: from {min(ratios):.2f}× to {max(ratios):.2f}×"
            return Verdict(calm, False, "disagree", reason)
    return Verdict(calm, enough)


def speedup(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, list[float]]:
    """Return how many times as fast, and the interval, from the ratios of at least two paired rounds."""
    logarithms = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logarithms)
    half = _student(confidence, len(ratios) - 1) * statistics.stdev(logarithms) / math.sqrt(len(ratios))
    return math.exp(middle), [math.exp(middle - half), math.exp(middle + half)]


@cache
def _student(confidence: float, freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + confidence) / 2, freedom))
