"""What a service counts, in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# name -> kind, what it is, and of a histogram the upper ends of its buckets
METRICS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "smelt_requests_total": ("counter", "Answered requests, by path and status.", ()),
    "smelt_request_seconds": ("histogram", "From the headers of a prediction to its answer.", SECONDS),
    "smelt_inputs_total": ("counter", "Inputs (texts, pairs, images) that were answered.", ()),
    "smelt_batch_size": ("histogram", "Inputs in a call of the model.", SIZES),
    "smelt_batch_seconds": ("histogram", "Time of a call of the model.", SECONDS),
    "smelt_failures_total": ("counter", "Calls of the model that failed.", ()),
    "smelt_inputs_cut_total": ("counter", "Texts that were longer than the model takes.", ()),
    "smelt_requests_in_flight": ("gauge", "Requests that are being read or answered.", ()),
    "smelt_inputs_waiting": ("gauge", "Inputs that wait for a call of the model.", ()),
    "smelt_ready": ("gauge", "1 where the model is loaded.", ()),
}


class Measures:
    """Counters and histograms. Several threads may use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: dict[str, defaultdict[str, float]] = {name: defaultdict(float) for name in METRICS}
        for name in ("smelt_inputs_total", "smelt_failures_total"):  # those without labels begin with 0
            self.counts[name][""] = 0
        self.buckets = {name: [0] * (len(ends) + 1) for name, (_, _, ends) in METRICS.items() if ends}
        self.sums = dict.fromkeys(self.buckets, 0.0)

    def count(self, name: str, more: float = 1, **labels: str) -> None:
        """Add to a counter. labels: with values that hold no quote, backslash or line break."""
        with self.lock:
            self.counts[name][",".join(f'{key}="{value}"' for key, value in labels.items())] += more

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        with self.lock:
            self.buckets[name][bisect_left(METRICS[name][2], value)] += 1
            self.sums[name] += value

    def text(self, now: Mapping[str, float]) -> str:
        """Return all metrics. now: those that others know the value of, gauges and counters."""
        with self.lock:
            return "".join(self.one(name, now) for name in METRICS)

    def one(self, name: str, now: Mapping[str, float]) -> str:
        """Return the lines of a metric."""
        kind, about, ends = METRICS[name]
        lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        if ends:
            total = 0
            for end, number in zip((*map(str, ends), "+Inf"), self.buckets[name], strict=True):
                total += number
                lines.append(f'{name}_bucket{{le="{end}"}} {total}')
            lines += [f"{name}_sum {self.sums[name]}", f"{name}_count {total}"]
        elif name in now:
            lines.append(f"{name} {now[name]}")
        else:
            rows = self.counts[name]
            lines += [f"{name}{{{words}}} {rows[words]}" if words else f"{name} {rows['']}" for words in rows]
        return "\n".join(lines) + "\n"
