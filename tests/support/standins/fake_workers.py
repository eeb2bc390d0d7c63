"""Timing processes whose times are known, in place of real ones; and a judge who finds every machine calm."""

from __future__ import annotations

from typing import Any, ClassVar

from smelt.core.errors import RunError
from smelt.evaluate.latency import measurement, summary
from smelt.evaluate.report import step_schema


class FakeWorker:
    """Stands in for `WorkerProcess`.

    ms: how long a call takes, by the artifact's folder name; any other takes 15 ms. used: which share of
    a processor a round of it gets. fails: whether a round of it fails. asked: every request of all
    workers, with the folder.
    """

    ms: ClassVar[dict[str, float]] = {"base": 20.0, "twice": 10.0, "same": 20.0}
    asked: ClassVar[list[tuple[str, str]]] = []
    used = staticmethod(lambda folder, number: 0.99)
    fails = staticmethod(lambda folder, number: False)

    def __init__(self, threads: int, time_limit: float) -> None:
        self.threads, self.alive, self.number, self.folder = threads, True, 0, ""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.alive = False

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        if op == "load":
            self.folder = request["artifact"].rsplit("/", 1)[-1]
        self.asked.append((op, self.folder))
        ms = self.ms.get(self.folder, 15.0)
        if op == "load":
            assert request["threads"] == self.threads
            return {"runner": "fake 1", "device": "cpu"}
        if op == "prepare":
            return {"call_ms": ms, "input_tokens": 3, "output_tokens": 4, "whole": True}
        if op == "memory":
            return {"peak_bytes": 100}
        self.number += 1
        if self.fails(self.folder, self.number):
            raise RunError("broke", code="made-up")
        ms *= 1 + 0.004 * (self.number * len(self.folder) % 3)
        load = {"wall_ms": 10 * ms, "processor_ms": 10 * ms * self.used(self.folder, self.number)}
        load |= {"waited_ms": 0.0, "others": 0.2, "stolen": 0.0, "pressure": 0.1}
        return {"times_ms": [ms] * 10, "parts": [], "texts": 10, "load": load}


def install(monkeypatch: Any) -> Any:
    """Use made-up workers until the test ends; return their class, to set what they do."""
    kind = type("Worker", (FakeWorker,), {"asked": []})
    monkeypatch.setattr(measurement, "WorkerProcess", kind)
    monkeypatch.setattr(measurement, "_SETTLE_SECONDS", 0)
    # the times are made up, and so is whether random tiny models are worth having
    monkeypatch.setattr(step_schema, "is_chance_level", lambda *score: False)
    return kind


def ignore_disturbance(monkeypatch: Any) -> None:
    """Take every round for undisturbed: most tests must not depend on what else the machine does."""
    monkeypatch.setattr(summary, "MAX_ROUND_LOST_SHARE", 2.0)
    monkeypatch.setattr(summary, "MAX_INTERVAL_SHARE", 1e9)
