"""The predicted time, memory and disk of every step of a plan, and their table.

Estimates become seconds by the speeds of this machine. Where the store has artifacts of the same kind of step
that this machine made, the estimate is multiplied by their median ratio of measured to estimated.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from smelt.core.artifact import StepRecord
from smelt.core.messages import Message, messages_to_json
from smelt.models.costs import INTERPRETER_BYTES, Work
from smelt.pipeline.inspect.machine import MachineSpeed
from smelt.pipeline.plan.costs import MachineLimits, StepEstimate, check_costs, format_bytes
from smelt.pipeline.plan.plan import Plan

# Files of an artifact besides the weights: tokenizer, config, manifest.
_SMALL_FILES_BYTES = 3_000_000
_WORKER_SECONDS = 5.0  # the start of a timing process


@dataclass(frozen=True)
class StepPrediction:
    """The prediction for one step; None: unknown.

    source: measured (by the ratio in earlier runs), estimated, stored (the artifact is in the store and costs
    nothing), or unknown. memory_bytes: with the interpreter. scoring_*: of scoring its artifact.
    """

    name: str
    source: str
    seconds: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    temporary_bytes: int = 0
    device_bytes: int = 0
    scoring_seconds: float | None = None
    scoring_memory_bytes: int | None = None


@dataclass(frozen=True)
class PlanCosts:
    """The predictions of a plan, and the messages about what does not fit: errors, then warnings."""

    steps: tuple[StepPrediction, ...]
    limits: MachineLimits
    latency_seconds: float | None = None
    messages: tuple[Message, ...] = ()
    unread: tuple[str, ...] = field(default=())

    @property
    def seconds(self) -> float | None:
        """Seconds of the run; None if a part is unknown."""
        parts = [self.latency_seconds or 0.0]
        for step in self.steps:
            if step.seconds is None or step.scoring_seconds is None:
                return None
            parts += [step.seconds, step.scoring_seconds]
        return sum(parts)

    @property
    def memory_bytes(self) -> int:
        """The largest memory of a step or of its scoring."""
        return max((max(s.memory_bytes or 0, s.scoring_memory_bytes or 0) for s in self.steps), default=0)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all new artifacts, and of the temporary files of one step."""
        most = max((step.temporary_bytes for step in self.steps), default=0)
        return sum(step.disk_bytes or 0 for step in self.steps) + most

    @property
    def errors(self) -> list[Message]:
        """What cannot fit."""
        return [message for message in self.messages if message.severity == "error"]

    def to_json(self) -> dict[str, Any]:
        """Return the predictions as JSON values."""
        names = StepPrediction.__dataclass_fields__
        return {
            "steps": [{name: getattr(step, name) for name in names} for step in self.steps],
            "seconds": self.seconds,
            "latency_seconds": self.latency_seconds,
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "limits": {name: getattr(self.limits, name) for name in MachineLimits.__dataclass_fields__},
            "unread": list(self.unread),
        }


def predict_costs(
    plan: Plan,
    estimates: Mapping[str, StepEstimate],
    limits: MachineLimits,
    speed: MachineSpeed | None,
    *,
    stored: Collection[str] = (),
    records: Sequence[StepRecord] = (),
    unread: Collection[str] = (),
) -> PlanCosts:
    """Return the predictions of all steps.

    Args:
        plan: the plan.
        estimates: of its steps.
        limits: of this machine.
        speed: of this machine; None: no times.
        stored: names of steps whose artifacts are in the store; `NAME:score` for their scores.
        records: of earlier steps on this machine with the same threads, newest first.
        unread: the splits that were not read.
    """
    base = INTERPRETER_BYTES if speed is None else speed.base_bytes
    steps = tuple(
        _predict(estimate, base, speed, stored, [r for r in records if r.kind == estimate.kind])
        for estimate in estimates.values()
    )
    found = PlanCosts(
        steps, limits, messages=tuple(check_costs(plan, estimates, limits, stored)), unread=tuple(unread)
    )
    return replace(found, latency_seconds=None if speed is None else _latency_seconds(plan, found))


_MAX_RECORDS = 5  # of the same kind of step


def _predict(
    estimate: StepEstimate,
    base: int,
    speed: MachineSpeed | None,
    stored: Collection[str],
    records: Sequence[StepRecord],
) -> StepPrediction:
    cost, score = estimate.cost, estimate.score
    scoring: dict[str, Any] = {}
    if f"{estimate.name}:score" in stored:
        scoring = {"scoring_seconds": 0.0, "scoring_memory_bytes": 0}
    elif score is not None:
        known = score.work is not None and speed is not None
        scoring = {
            "scoring_seconds": speed.seconds(score.work) if known and speed and score.work else None,
            "scoring_memory_bytes": score.memory_bytes + base,
        }
    if estimate.name in stored:
        return StepPrediction(estimate.name, "stored", 0.0, 0, 0, **scoring)
    if cost is None:
        return StepPrediction(estimate.name, "unknown", **scoring)
    times, memories, source = list[float](), list[float](), "estimated"
    for record in records[:_MAX_RECORDS] if speed is not None else ():
        source = "measured"
        if expected := speed.seconds(Work.from_json(record.work)) if speed else 0.0:
            times.append(record.seconds / expected)
        if record.memory_bytes is not None:
            memories.append(record.memory_bytes / (record.estimated_memory_bytes + base))
    seconds = None
    if cost.work is not None and speed is not None and (times or not estimate.is_gpu):
        seconds = speed.seconds(cost.work) * (statistics.median(times) if times else 1.0)
    memory = (cost.memory_bytes + base) * (statistics.median(memories) if memories else 1.0)
    return StepPrediction(
        estimate.name,
        source,
        seconds,
        round(memory),
        cost.disk_bytes + _SMALL_FILES_BYTES,
        cost.temporary_bytes,
        cost.device_bytes,
        **scoring,
    )


def _latency_seconds(plan: Plan, costs: PlanCosts) -> float | None:
    """Return the seconds of the latency measurements: rounds of each artifact, up to the time limits."""
    settings = plan.recipe.score.latency
    if not settings:
        return 0.0
    formats = {step.name: step.format for step in plan.steps if not step.unscored}
    timed = [name for name, kind in formats.items() if settings.is_timed(name, kind != "torch")]
    timed += [plan.recipe.baseline] if plan.recipe.baseline not in timed else []
    each = 2 * settings.rounds * settings.min_round_ms / 1000
    whole = len(timed) * (_WORKER_SECONDS + len(settings.batch_sizes) * min(each, settings.seconds))
    stages = [step.seconds or 0.0 for step in costs.steps]
    return min(whole, settings.max_minutes * 60 if settings.max_minutes else max(60.0, sum(stages)))


def plan_json(plan: Plan, costs: PlanCosts) -> dict[str, Any]:
    """Return a plan and its predictions as JSON values."""
    steps = [
        {
            "name": step.name,
            "stage": step.stage,
            "parent": step.parent,
            "format": step.format,
            "settings": step.settings.to_report(),
            "optional": step.optional,
            "unavailable": step.unavailable,
        }
        for step in plan.steps
    ]
    return {
        "recipe": str(plan.path),
        "task": plan.recipe.task,
        "steps": steps,
        "warnings": messages_to_json([*plan.warnings, *costs.messages]),
        "costs": costs.to_json(),
    }


_COLUMNS = "{:<28.28} {:>9} {:>8} {:>8} {:>9}  {}"


def cost_lines(costs: PlanCosts) -> list[str]:
    """Return the table of predictions, at most 80 columns."""
    rows = [("step", "time", "memory", "disk", "scoring", "")]
    for step in costs.steps:
        note = "" if step.source == "estimated" else step.source
        rows.append(
            (step.name, _time(step.seconds), _size(step.memory_bytes), _size(step.disk_bytes),
             _time(step.scoring_seconds), note)
        )  # fmt: skip
    if costs.latency_seconds:
        rows.append(("latency", _time(costs.latency_seconds), "", "", "", ""))
    rows.append(("total", _time(costs.seconds), _size(costs.memory_bytes), _size(costs.disk_bytes), "", ""))
    rows.append(
        ("this machine, free", "", _size(costs.limits.free_bytes), _size(costs.limits.disk_bytes), "", "")
    )
    lines = [_COLUMNS.format(*row).rstrip() for row in rows]
    for message in costs.messages:
        if message.severity != "error":
            lines += textwrap.wrap(f"warning     {message}", 80, subsequent_indent=" " * 12)
    device = max((step.device_bytes for step in costs.steps), default=0)
    if device:
        lines.append(f"GPU memory: {_size(device)} of {_size(costs.limits.device_bytes)}")
    if costs.unread:
        lines.append(f"times that depend on {', '.join(costs.unread)} are unknown: not read for a plan")
    return lines


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _size(count: int | None) -> str:
    return "?" if count is None else format_bytes(count)
