"""The metrics of the service in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
# name -> kind, help text, and for a histogram the upper bounds of its buckets
METRIC_SPECS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "smelt_requests_total": ("counter", "Answered requests, by path and status.", ()),
    "smelt_request_seconds": (
        "histogram",
        "Time from the headers of a prediction to its answer.",
        LATENCY_BUCKETS,
    ),
    "smelt_inputs_total": ("counter", "Inputs (texts, pairs, images) that were answered.", ()),
    "smelt_batch_size": ("histogram", "Inputs in a call of the model.", BATCH_BUCKETS),
    "smelt_batch_seconds": ("histogram", "Time of a call of the model.", LATENCY_BUCKETS),
    "smelt_failures_total": ("counter", "Calls of the model that failed.", ()),
    "smelt_inputs_cut_total": ("counter", "Texts that were truncated.", ()),
    "smelt_requests_in_flight": ("gauge", "Requests being read or answered.", ()),
    "smelt_inputs_waiting": ("gauge", "Inputs waiting for a call of the model.", ()),
    "smelt_ready": ("gauge", "1 if the model is loaded.", ()),
}


class PrometheusMetrics:
    """Counters and histograms. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: dict[str, defaultdict[str, float]] = {name: defaultdict(float) for name in METRIC_SPECS}
        for name in ("smelt_inputs_total", "smelt_failures_total"):  # counters without labels start at 0
            self.counts[name][""] = 0
        self.buckets = {name: [0] * (len(ends) + 1) for name, (_, _, ends) in METRIC_SPECS.items() if ends}
        self.sums = dict.fromkeys(self.buckets, 0.0)

    def count(self, name: str, more: float = 1, **labels: str) -> None:
        """Add to a counter. labels: values must not contain a quote, backslash or line break."""
        with self.lock:
            self.counts[name][",".join(f'{key}="{value}"' for key, value in labels.items())] += more

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        with self.lock:
            self.buckets[name][bisect_left(METRIC_SPECS[name][2], value)] += 1
            self.sums[name] += value

    def render(self, now: Mapping[str, float]) -> str:
        """Return all metrics. now: gauges and counters whose values are computed elsewhere."""
        with self.lock:
            return "".join(self.render_metric(name, now) for name in METRIC_SPECS)

    def render_metric(self, name: str, now: Mapping[str, float]) -> str:
        """Return the lines of a metric."""
        kind, about, ends = METRIC_SPECS[name]
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
