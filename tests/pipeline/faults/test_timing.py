"""A timing process that dies or hangs is an error of its step; the others are timed."""

import json
import os
import signal
from pathlib import Path

from smelt.core.artifact import read_artifact
from smelt.evaluate.latency.measurement import WorkerProcess
from smelt.evaluate.report.schema import validate_report
from tests.support import harness
from tests.support.models import tiny
from tests.support.processes import forked_workers
from tests.support.standins import fake_workers

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, test: data.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: magnitude}
    name: dies
  - prune: {targets: [ffn], keep_ratio: 0.25, importance: magnitude}
    from: model
    name: hangs
  - prune: {targets: [heads], keep_ratio: 0.5, importance: magnitude}
    from: model
    name: lives
score:
  quality: [accuracy]
  latency: {batch_sizes: [1], rounds: 3, texts: 2, min_round_ms: 1, threads: 1}
"""


def test_dead_and_hanging_timing_workers_are_step_errors(tmp_path, monkeypatch):
    tiny.write_bert(tmp_path / "m")
    tiny.write_labeled(tmp_path / "data.jsonl", 8)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    ask, loaded = WorkerProcess.ask, {}

    def sabotaged(self, **request):
        if request["op"] == "load":
            loaded[self] = read_artifact(Path(request["artifact"])).manifest.settings
        settings = loaded.get(self, {})
        if request["op"] == "round" and settings.get("targets") == ["ffn"]:
            is_killed = settings["keep_ratio"] == 0.5
            os.kill(self._process.pid, signal.SIGKILL if is_killed else signal.SIGSTOP)
            self._time_limit = self._time_limit if is_killed else 0.5
        return ask(self, **request)

    monkeypatch.setattr(WorkerProcess, "ask", sabotaged)
    fake_workers.ignore_disturbance(monkeypatch)
    forked_workers.install(monkeypatch)
    command = ["run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "r")]
    result = harness.smelt(*command)
    assert result.exit_code == 1
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    validate_report(report)
    steps = {step["name"]: step for step in report["steps"]}
    assert report["status"] == "error"
    dead_error, hanging_error = steps["dies"]["error"], steps["hangs"]["error"]
    assert (dead_error["code"], hanging_error["code"]) == ("timing-process-died", "timing-timed-out")
    assert all(value in dead_error["message"] for value in ("latency: ", "'round'", "signal 9"))
    assert all(value in hanging_error["message"] for value in ("latency: ", "'round'", "0.5 s"))
    assert [steps[n]["status"] for n in ("dies", "hangs", "lives")] == ["done"] * 3
    assert steps["dies"]["latency"] == steps["hangs"]["latency"] == []
    assert steps["lives"]["latency"][0]["speedup"] > 0
    assert steps["model"]["latency"][0]["speedup"] == 1
    assert steps["lives"]["quality"]["accuracy"]["n"] == 8
    for directory in (
        result.output,
        (tmp_path / "r/report.md").read_text(),
        (tmp_path / "r/report.html").read_text(),
    ):
        assert "0.5 s" in directory
        assert "timing-timed-out" not in directory  # its text, and not the object

    # what failed is not kept, so the next run takes these times again, and only these
    stored_scores = [json.loads(path.read_text()) for path in (tmp_path / ".store" / "scores").iterdir()]
    timed = [score["rows"] for score in stored_scores if "rows" in score]
    assert sorted(map(str, timed)) == sorted(str(steps[n]["latency"]) for n in ("model", "lives"))


def test_failed_timing_process_keeps_scores(tmp_path, monkeypatch):
    tiny.write_bert(tmp_path / "m")
    tiny.write_labeled(tmp_path / "data.jsonl", 8)
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def refuse(self, *arguments):
        raise BlockingIOError(11, "Resource temporarily unavailable")  # what fork says at the limit

    monkeypatch.setattr(WorkerProcess, "__init__", refuse)
    result = harness.smelt("run", tmp_path / "recipe.yaml", "--out", tmp_path / "r")
    assert result.exit_code == 1
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert [step["status"] for step in report["steps"]] == ["done"] * 4
    error = report["steps"][0]["error"]
    assert error["code"] == "system-error"
    assert error["message"].startswith("latency: Resource temporarily unavailable.")
