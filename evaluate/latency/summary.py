"""Judge timing rounds and summarize them for the report: which count, whether they agree, the speed-up.

A round is disturbed where other work kept the process from running for more than a tenth of the time.
Interleaving does not help against that: on two busy cores PyTorch with two threads became 25 times as
slow and ONNX Runtime did not, so that a busy machine appears as a speed-up of 138 in every round.
Disturbed rounds are repeated and do not count. A speed-up must also agree from round to round.

A process can lose time to others in three ways only: its threads wait in the run queue, its virtual
processors are taken by the hypervisor (steal), or it is throttled. On Linux the kernel counts all of
them; elsewhere psutil reports the use of all processors, and the rest is None. Sources: proc_stat(5) (times
in clock ticks of 10 ms), Documentation/scheduler/sched-stats.rst (`schedstat` of a task: run time, time in
the run queue, time slices; ns), Documentation/accounting/psi.rst (pressure stall information, microseconds),
all of the Linux kernel.

The speed-up is the geometric mean of the ratios of paired rounds (P. Fleming, J. Wallace, "How not to lie
with statistics", CACM 29(3), 1986, doi:10.1145/5666.5673), its interval Student's over their logarithms,
as for few measurements in A. Georges, D. Buytaert, L. Eeckhout, "Statistically rigorous Java performance
evaluation" (OOPSLA 2007, doi:10.1145/1297027.1297033), section 3.2. With three rounds it is wide: a
bootstrap or a range over so few rounds has a far lower coverage than its nominal one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_TASKS_FOLDER = Path("/proc/self/task")
_PRESSURE_FILE = Path("/proc/pressure/cpu")


@dataclass(frozen=True)
class CounterSnapshot:
    """Values of all counters. Seconds; None where the system does not count it.

    processor: used by all threads of this process. waited: its threads were ready to run and had no
    processor. busy, stolen: of all processors together. pressure: some task of the machine waited.
    """

    wall: float
    processor: float
    waited: float | None
    busy: float
    stolen: float
    pressure: float | None


@dataclass(frozen=True)
class MachineLoad:
    """Load between two snapshots.

    wall_ms, processor_ms, waited_ms: differences of `CounterSnapshot`. others: mean number of processors
    that were busy with other work; stolen: mean number that the hypervisor took. pressure: the share of the
    time in which some task of the machine waited for a processor. gpu_others: the share of the GPU's time, 0
    to 1, that other processes used; None on the CPU and where it is unknown.
    """

    wall_ms: float
    processor_ms: float
    waited_ms: float | None
    others: float
    stolen: float
    pressure: float | None
    gpu_others: float | None = None

    def dump(self) -> dict[str, float | None]:
        """Return a JSON-able dict."""
        return asdict(self)

    def lost_share(self, resources: ComputeResources) -> float:
        """Return the share of the time, 0 to 1, in which other work kept the process from running.

        With one thread on the processor it is all the time in which the thread did not run: nothing else
        makes it wait. Several threads also wait for each other; there it is the time that they waited in the
        run queue, or, since spinning threads are never counted as waiting, the demand of all threads beyond
        the available processors. On a GPU it is the latter, or the other processes' share of the GPU.
        """
        num_threads = min(
            resources.threads, resources.processors
        )  # more threads than processors disturb each other
        excess_load = max(0.0, self.others + self.stolen + num_threads - resources.processors) / num_threads
        if resources.device != "cpu":
            return min(1.0, max(excess_load, self.gpu_others or 0.0))
        if resources.threads == 1:
            cpu_share = self.processor_ms / self.wall_ms
            return min(1.0, max(0.0, 1 - cpu_share, self.stolen / resources.processors))
        return min(1.0, max(excess_load, (self.waited_ms or 0.0) / self.wall_ms))


def read_counters() -> CounterSnapshot:
    """Return all counters; takes a fraction of a millisecond."""
    import psutil

    times = psutil.cpu_times()
    # a guest's time is part of the user's; a process that waits for a disk does not use the processor
    idle = {"idle", "iowait", "guest", "guest_nice", "steal"}
    return CounterSnapshot(
        wall=time.perf_counter(),
        processor=time.process_time(),
        waited=_run_queue_seconds(_TASKS_FOLDER),
        busy=sum(value for name, value in times._asdict().items() if name not in idle),
        stolen=float(getattr(times, "steal", 0.0)),
        pressure=_cpu_pressure_seconds(_PRESSURE_FILE),
    )


def load_between(
    before: CounterSnapshot, after: CounterSnapshot, gpu_others: float | None = None
) -> MachineLoad:
    """Return the load between two snapshots of one process; gpu_others: see `MachineLoad`."""
    wall, processor = after.wall - before.wall, after.processor - before.processor
    waited_ms = None
    if before.waited is not None and after.waited is not None:
        waited_ms = 1000 * max(0.0, after.waited - before.waited)  # the counts of an ended thread are lost
    pressure = None
    if before.pressure is not None and after.pressure is not None:
        pressure = min(1.0, (after.pressure - before.pressure) / wall)
    return MachineLoad(
        wall_ms=1000 * wall,
        processor_ms=1000 * processor,
        waited_ms=waited_ms,
        others=max(0.0, (after.busy - before.busy - processor) / wall),
        stolen=max(0.0, (after.stolen - before.stolen) / wall),
        pressure=pressure,
        gpu_others=gpu_others,
    )


def _run_queue_seconds(tasks: Path) -> float | None:
    """Return the seconds that the threads in `tasks` have waited in the run queue."""
    total_ns = None
    try:
        for task in tasks.iterdir():
            try:
                total_ns = (total_ns or 0) + int((task / "schedstat").read_text(encoding="ascii").split()[1])
            except (OSError, IndexError, ValueError):
                continue  # a thread that has just ended, or a kernel without these counts
    except OSError:
        return None
    return None if total_ns is None else total_ns / 1e9


def _cpu_pressure_seconds(file: Path) -> float | None:
    """Return the seconds since boot in which some task waited for a processor."""
    try:
        some_line = file.read_text(encoding="ascii").splitlines()[0]
        return int(some_line.rsplit("total=", 1)[1]) / 1e6
    except (OSError, IndexError, ValueError):
        return None


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

    times_ms: of every call. parts: the parts of each call's time, see `smelt.evaluate.latency.worker`. texts:
    number of samples of all calls together. load: of the machine during the round. graph_ms: the time of each
    call's graphs alone; empty where the runtime does not measure it.
    """

    times_ms: list[float]
    parts: list[list[float]]
    texts: int
    load: MachineLoad
    graph_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """Return the median time of a call."""
        return statistics.median(self.times_ms)

    @property
    def processor_ms(self) -> float:
        """Return the mean processor time of a call, all threads together."""
        return self.load.processor_ms / len(self.times_ms)

    def lost_share(self, resources: ComputeResources) -> float:
        """Return `MachineLoad.lost_share` of the round."""
        return self.load.lost_share(resources)


@dataclass(frozen=True)
class RoundPair:
    """A round of an artifact and the baseline's paired round; None where there is no baseline."""

    own: TimingRound
    baseline: TimingRound | None

    def lost_share(self, resources: ComputeResources, baseline: ComputeResources) -> float:
        """Return the larger share of the time that either of the two lost to other work."""
        return max(
            self.own.lost_share(resources), self.baseline.lost_share(baseline) if self.baseline else 0.0
        )

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
    pairs: Sequence[RoundPair],
    resources: ComputeResources,
    baseline: ComputeResources,
    wanted: int = MIN_ROUNDS,
) -> RoundsVerdict:
    """Return which of `pairs` count, and whether a speed may be claimed from them.

    Args:
        pairs: at least one.
        resources: resources of the artifact's process.
        baseline: resources of the baseline's.
        wanted: number of undisturbed rounds that are requested.
    """
    lost_shares = [pair.lost_share(resources, baseline) for pair in pairs]
    calm = tuple(
        round_index for round_index, share in enumerate(lost_shares) if share <= MAX_ROUND_LOST_SHARE
    )
    if len(calm) < MIN_ROUNDS:
        num_disturbed = sum(share > MAX_ROUND_LOST_SHARE for share in lost_shares)
        used = "the CPU" if resources.device == baseline.device == "cpu" else "the CPU or the GPU"
        reason = (
            f"other processes used {used} in {num_disturbed} of {len(pairs)} rounds, up to "
            f"{100 * max(lost_shares):.0f} % of"
            " the time"
        )
        return RoundsVerdict(tuple(range(len(pairs))), False, "busy", reason)
    ratios = [ratio for round_index in calm if (ratio := pairs[round_index].speedup) is not None]
    is_stable = len(calm) >= wanted
    if len(ratios) >= MIN_ROUNDS:
        value, (_, high) = mean_speedup(ratios)
        if high > value * (1 + MAX_INTERVAL_SHARE):
            reason = f"the rounds disagree: from {min(ratios):.2f}× to {max(ratios):.2f}×"
            return RoundsVerdict(calm, False, "disagree", reason)
    return RoundsVerdict(calm, is_stable)


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
    pairs: Sequence[RoundPair],
    resources: ComputeResources,
    baseline: ComputeResources,
    lengths: MeanTokenCounts,
) -> LatencyRow:
    """Return percentiles in ms over all calls of the rounds that count, their parts, and the speed-up.

    throughput: samples per second. cpu_ms: mean processor time of a call, all threads together. speedup and
    its interval are None where there was no paired baseline; cpu_speedup is the same for processor time, also
    on a GPU, whose work is not part of it. baseline_p50_ms: the baseline's median call in the same rounds.
    graph_ms: the median over calls of the time in graphs alone.
    """
    verdict = judge_rounds(pairs, resources, baseline)
    counted_pairs = [pairs[round_index] for round_index in verdict.counted_rounds]
    rounds = [pair.own for pair in counted_pairs]
    calls = np.concatenate([np.asarray(r.times_ms) for r in rounds])
    p50, p90, p99 = (float(p) for p in np.percentile(calls, [50, 90, 99]))
    baseline_rounds = [pair.baseline for pair in counted_pairs if pair.baseline is not None]
    graph_times = [ms for r in rounds for ms in r.graph_ms]
    ratio, interval = _mean_ratio(pair.speedup for pair in counted_pairs)
    on_cpu = resources.device == baseline.device == "cpu"
    cpu_ratio, cpu_interval = _mean_ratio(pair.cpu_speedup if on_cpu else None for pair in counted_pairs)
    return {
        "input_tokens": round(lengths.input_tokens, 2) or None,  # images have none
        "output_tokens": round(lengths.output_tokens, 2) or None,
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
        "graph_ms": statistics.median(graph_times) if len(graph_times) == len(calls) else None,
        "cpu_ms": sum(r.load.processor_ms for r in rounds) / len(calls),
        "throughput": 1000 * sum(r.texts for r in rounds) / float(calls.sum()),
        "speedup": ratio,
        "speedup_ci95": interval,
        "cpu_speedup": cpu_ratio,
        "cpu_speedup_ci95": cpu_interval,
        "baseline_p50_ms": float(np.median([ms for r in baseline_rounds for ms in r.times_ms]))
        if baseline_rounds
        else None,
        "stable": verdict.stable,
        "cause": verdict.cause,
        "reason": verdict.reason,
        "parts": median_call_parts(calls, [part for r in rounds for part in r.parts], p50),
        "rounds_ms": [pair.own.median_ms for pair in pairs],
        "rounds": [
            _round_details(pair, resources, baseline, round_index in verdict.counted_rounds)
            for round_index, pair in enumerate(pairs)
        ],
    }


def _mean_ratio(ratios: Iterable[float | None]) -> tuple[float | None, list[float] | None]:
    """Return the mean of the ratios of paired rounds and its interval; None for fewer than two."""
    measured_ratios = [ratio for ratio in ratios if ratio is not None]
    return mean_speedup(measured_ratios) if len(measured_ratios) > 1 else (None, None)


def _round_details(
    pair: RoundPair, resources: ComputeResources, baseline: ComputeResources, counted: bool
) -> LatencyRow:
    """Return the report's entry of a pair of rounds; the load by other work is the larger of the two."""
    loads = [pair.own.load] + ([pair.baseline.load] if pair.baseline else [])
    pressures = [load.pressure for load in loads if load.pressure is not None]
    gpu_shares = [load.gpu_others for load in loads if load.gpu_others is not None]
    return {
        "counted": counted,
        "speedup": pair.speedup,
        "cpu_speedup": pair.cpu_speedup if resources.device == baseline.device == "cpu" else None,
        "baseline_ms": pair.baseline.median_ms if pair.baseline else None,
        "processor_share": loads[0].processor_ms / loads[0].wall_ms,
        "baseline_processor_share": loads[1].processor_ms / loads[1].wall_ms if pair.baseline else None,
        "lost_share": pair.lost_share(resources, baseline),
        "other_processors": max(load.others for load in loads),
        "cpu_steal": max(load.stolen for load in loads),
        "pressure": max(pressures, default=None),
        "other_gpu_share": max(gpu_shares, default=None),
    }


def median_call_parts(calls: NDArray[np.float64], parts: list[list[float]], p50: float) -> LatencyRow | None:
    """Return the parts of the median call's time, ms; None where the runner does not measure them.

    Calls with another number of parts are left out: an artifact may generate after short prompts in its graph
    and after long ones step by step.

    Args:
        calls: ms of every call.
        parts: the parts of each, as `TimedRunner.call_parts` returns them.
        p50: the median of `calls`.
    """
    if not parts or len(parts) != len(calls):
        return None
    distance = np.abs(calls - p50)
    median_calls = np.flatnonzero(distance <= MEDIAN_TOLERANCE * p50)
    if not len(median_calls):  # the median of an even number is between two calls
        median_calls = np.argsort(distance, kind="stable")[:2]
    kind = len(parts[median_calls[distance[median_calls].argmin()]])
    mean_parts = np.asarray(
        [parts[call_index] for call_index in median_calls if len(parts[call_index]) == kind]
    ).mean(axis=0)
    if len(mean_parts) == 3:
        return dict(zip(("tokenizing_ms", "model_ms", "rest_ms"), map(float, mean_parts), strict=True))
    if len(mean_parts) == 5:
        tokenizing, generating, tokens, detokenizing, first = map(float, mean_parts)
        return {
            "tokenizing_ms": tokenizing,
            "encoding_ms": None,
            "time_to_first_token_ms": tokenizing + first,
            "time_per_output_token_ms": (generating - first) / tokens if tokens else None,
            "further_tokens": tokens,
            "detokenizing_ms": detokenizing,
        }
    tokenizing, encoding, first, remaining, tokens, detokenizing = map(float, mean_parts)
    return {
        "tokenizing_ms": tokenizing,
        "encoding_ms": encoding,
        "time_to_first_token_ms": tokenizing + encoding + first,
        "time_per_output_token_ms": remaining / tokens if tokens else None,
        "further_tokens": tokens,
        "detokenizing_ms": detokenizing,
    }


def spread_over_lengths(texts: Sequence[str], count: int) -> list[int]:
    """Return the indices of `count` texts spread evenly over the lengths; repeated if there are too few.

    Lengths are bytes, so that the choice is the same for every tokenizer: the texts at the middles of
    `count` equal shares of the texts sorted by length.
    """
    order = sorted(range(len(texts)), key=lambda i: (len(texts[i].encode()), i))
    return [order[(2 * position + 1) * len(order) // (2 * count)] for position in range(count)]
