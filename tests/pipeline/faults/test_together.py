"""Two runs at the same time: on one store, on one step, in one folder."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from smelt.core.artifact import read_artifact
from smelt.core.locks import read_owner
from smelt.pipeline.execute.run import RunOptions, run_plan
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.models import tiny
from tests.support.processes.concurrent_processes import WITHOUT_LOCKS, disable_file_locks
from tests.support.processes.fork_server import shared_server

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: magnitude}
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 1, precision: fp32}
score: {quality: [accuracy], latency: false}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    tiny.write_bert(folder / "m")
    tiny.write_labeled(folder / "data.jsonl", 8)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


# A run whose stage waits for a file, so that the other run surely meets it at work.
SLOW = """
import time
from pathlib import Path
from smelt.compress.prune.stage import Prune
call = Prune.__call__

def slow(self, src, settings, ctx):
    Path(place, "at-work").touch()
    while not Path(place, "go").exists():
        time.sleep(0.01)
    call(self, src, settings, ctx)

Prune.__call__ = slow
"""


def _arguments(home, out, store):
    return ["run", str(home / "recipe.yaml"), "--until", "prune", "--out", str(out), "--store", str(store)]


def _until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server():
    return shared_server()


@pytest.fixture(params=["", WITHOUT_LOCKS], ids=["kernel", "lease"])
def slow_run(request, home, server, tmp_path, monkeypatch):
    """The process id of a run at its first step, on a file system with locks and on one without."""
    if request.param:
        disable_file_locks(monkeypatch)
    before = f"{request.param}\nplace = {str(tmp_path)!r}\n{SLOW}"
    process = server.start(*_arguments(home, tmp_path / "one", tmp_path / "s"), before=before)
    _until((tmp_path / "at-work").exists)
    yield process
    server.kill()


def _statuses(folder):
    return [step["status"] for step in json.loads((folder / "report.json").read_text())["steps"]]


def test_concurrent_runs_of_same_step_compute_it_once(home, server, tmp_path, slow_run):
    """While the slow run is at its step: its folder is refused, another step is not kept waiting."""
    error = command_error(harness.smelt(*_arguments(home, tmp_path / "one", tmp_path / "other"), code=2))
    assert (error.code, error.file) == ("folder-in-use", f"{tmp_path}/one")
    assert f"process {slow_run} " in str(error)

    arguments = [*_arguments(home, tmp_path / "apart", tmp_path / "s"), "--set", "prune.keep_ratio=0.25"]
    third_result = harness.smelt(*arguments)
    assert third_result.exit_code == 0, third_result.output
    assert "waits for" not in third_result.output
    assert server.is_running()

    waits = f"prune: waits for process {slow_run}, which is making the same step"
    log = tmp_path / "two" / "log.txt"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(
            run_plan, load_plan(home / "recipe.yaml", until="prune"), RunOptions(log.parent, tmp_path / "s")
        )
        _until(lambda: log.is_file() and waits in log.read_text())
        assert not (log.parent / "artifacts" / "prune").exists()
        (tmp_path / "go").touch()
        _until(lambda: not server.is_running())
        assert server.wait() == 0
        assert other.result(timeout=120).exit_code == 0
    assert _statuses(tmp_path / "one") == ["done", "done"]
    assert _statuses(tmp_path / "two") == ["cached", "cached"]
    for artifact in (tmp_path / "s" / "artifacts").iterdir():
        read_artifact(artifact).verify()
    assert not list((tmp_path / "s" / "locks").iterdir())


def test_step_of_killed_run_can_be_run_again(home, server, tmp_path, slow_run):
    os.kill(slow_run, signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    result = harness.smelt(*_arguments(home, tmp_path / "two", tmp_path / "s"))
    assert result.exit_code == 0, result.output
    assert "waits for" not in result.output
    assert _statuses(tmp_path / "two") == ["cached", "done"]
    assert not list((tmp_path / "s" / "tmp").iterdir())
    assert not list((tmp_path / "s" / "locks").iterdir())


def test_latency_is_measured_by_one_run_at_a_time(home, tmp_path, monkeypatch):
    from smelt.pipeline.execute.latency_scores import LatencyScores

    owners = []

    def measure(self, artifacts, *arguments):
        owners.append(str(read_owner(tmp_path / "s" / "locks" / "latency.lock")))
        return {}

    monkeypatch.setattr(LatencyScores, "measure", measure)
    arguments = _arguments(home, tmp_path / "r", tmp_path / "s")
    arguments[arguments.index("prune")] = "model"
    result = harness.smelt(*arguments, "--set", "score.latency={}")
    assert result.exit_code == 0, result.output
    assert owners == [f"process {os.getpid()}"]
