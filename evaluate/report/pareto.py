"""The Pareto-optimal steps of a report, in quality and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.evaluate.report.schema import is_step_at_chance


def pareto_front(steps: Sequence[Mapping[str, Any]], baseline: str | None = None) -> list[str]:
    """Return the names of the Pareto-optimal steps, in the order of `steps`.

    The two axes are the first quality metric of the report and the speed-up over the baseline at the
    smallest batch size that any step was timed with: the paired one, as in the verdict and the table.
    A step is excluded where it lacks either, where its times were disturbed, where it cannot be deployed
    (`deployable`: false) or where its quality is at chance level. A step is dominated where another is at
    least as good in both and better in one. If only the baseline has undisturbed times, nothing was compared
    and the result is empty.

    Args:
        steps: entries of report.json's `steps`.
        baseline: name of the step whose speed-up is 1, even if its timing was disturbed.
    """
    points = _front_points(steps, baseline)
    return [
        name
        for name, (quality, speed) in points.items()
        if not any(q >= quality and s >= speed and (q > quality or s > speed) for q, s in points.values())
    ]


def front_axes(steps: Sequence[Mapping[str, Any]]) -> tuple[str | None, int | None]:
    """Return the first quality metric and the smallest batch size of a report; None where there is none."""
    metric = next((metric for step in steps for metric in step.get("quality") or {}), None)
    sizes = [entry["batch_size"] for step in steps for entry in step.get("latency") or []]
    return metric, min(sizes, default=None)


def _front_points(steps: Sequence[Mapping[str, Any]], baseline: str | None) -> dict[str, tuple[float, float]]:
    """Return (quality, higher is better; speed-up) by step name."""
    metric, batch_size = front_axes(steps)
    points: dict[str, tuple[float, float]] = {}
    disturbed = False
    for step in steps:
        score = (step.get("quality") or {}).get(metric)
        rows = [row for row in step.get("latency") or [] if row["batch_size"] == batch_size]
        if not score or not rows or step.get("deployable") is False or is_step_at_chance(step):
            continue
        speed, counts = rows[0].get("speedup"), rows[0].get("stable") is not False or step["name"] == baseline
        disturbed |= speed is not None and not counts
        if speed is not None and counts:
            sign = 1 if score["higher_is_better"] else -1
            points[step["name"]] = (sign * score["value"], speed)
    return {} if disturbed and set(points) <= {baseline} else points
