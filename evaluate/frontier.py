"""Which steps nothing else beats in both quality and latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def frontier(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the steps on the Pareto front, in the order of `steps`.

    The two axes are the first quality metric of the report and the p50 latency at the smallest batch
    size that any step was timed with. A step that lacks either is out. A step is dominated where
    another is at least as good in both and better in one.

    Args:
        steps: entries of report.json's `steps`.
    """
    points = _points(steps)
    return [
        name
        for name, (quality, latency) in points.items()
        if not any(
            q >= quality and ms <= latency and (q > quality or ms < latency) for q, ms in points.values()
        )
    ]


def axes(steps: Sequence[Mapping[str, Any]]) -> tuple[str | None, int | None]:
    """Return the first quality metric and the smallest batch size of a report; None where there is none."""
    metric = next((metric for step in steps for metric in step.get("quality") or {}), None)
    sizes = [entry["batch_size"] for step in steps for entry in step.get("latency") or []]
    return metric, min(sizes, default=None)


def _points(steps: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return (quality, higher is better; p50 in ms) by step name."""
    metric, batch_size = axes(steps)
    points = {}
    for step in steps:
        score = (step.get("quality") or {}).get(metric)
        times = [e["p50_ms"] for e in step.get("latency") or [] if e["batch_size"] == batch_size]
        if score and times:
            sign = 1 if score["higher_is_better"] else -1
            points[step["name"]] = (sign * score["value"], times[0])
    return points
