"""A run that is killed again and again ends with what an undisturbed one ends with."""

import json
import os
import random
import signal
import time

import pytest

from smelt.core.artifact import read_artifact
from smelt.core.files import partial_files
from smelt.evaluate.report.schema import validate_report
from tests.support.models import tiny
from tests.support.pairs import matrix
from tests.support.processes.concurrent_processes import WITHOUT_LOCKS
from tests.support.processes.fork_server import shared_server

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.75, importance: magnitude}
  - finetune: {max_steps: 4, batch_size: 4, num_evals: 2, precision: fp32}
  - factorize: {method: svd, energy: 0.9, optimize_for: size}
  - distill: {max_steps: 2, batch_size: 4, num_evals: 1, precision: fp32}
  - prune: {targets: [heads], keep_ratio: 0.5, importance: magnitude}
  - quantize: {}
score: {quality: [accuracy], latency: false}
"""


def _command(home, folder):
    return [
        "run",
        str(home / "recipe.yaml"),
        "--quiet",
        "--out",
        str(folder / "r"),
        "--store",
        str(folder / "s"),
    ]


def _outcome(folder):
    """What a run found: scores, sizes and the hash of every file of every step."""
    report = json.loads((folder / "r" / "report.json").read_text())
    validate_report(report)
    assert report["status"] == "passed"
    same = (
        "name",
        "key",
        "quality",
        "against_baseline",
        "against_parent",
        "parameters",
        "size_bytes",
        "warnings",
    )
    steps = [{name: step[name] for name in same} for step in report["steps"]]
    hashes = {
        step["name"]: read_artifact(folder / "r" / step["artifact"]).manifest.files
        for step in report["steps"]
    }
    return steps, hashes


def _require_no_half_artifact(folder):
    for artifact in (folder / "s" / "artifacts").glob("*"):
        read_artifact(artifact).verify()


KILLS = (30, 8) if matrix.is_full_matrix() else (4, 1)


@pytest.fixture(scope="module")
def server():
    return shared_server()


@pytest.mark.parametrize(
    ("kills", "locks"), list(zip(KILLS, (True, False), strict=True)), ids=["kernel", "lease"]
)
def test_runs_killed_at_random_moments_equal_undisturbed_run(tmp_path, server, kills, locks):
    """Each campaign is a store of its own: killed and begun again until it is through.

    The second time on a file system that knows no locks, as some network ones are.
    """
    home = tmp_path / "home"
    tiny.write_bert(home / "m")
    tiny.write_labeled(home / "data.jsonl", 8)
    (home / "recipe.yaml").write_text(RECIPE)
    rng = random.Random(7)
    before = "" if locks else WITHOUT_LOCKS
    started = time.monotonic()
    server.start(*_command(home, tmp_path / "calm"), before=before)
    assert server.wait() == 0
    duration = time.monotonic() - started
    expected_outcome = _outcome(tmp_path / "calm")
    assert len(expected_outcome[0]) == 7
    num_killed, campaign, interrupted = 0, 0, 0
    while num_killed < kills:
        folder = tmp_path / f"stormy-{campaign}"
        campaign += 1
        assert campaign <= kills, "no run lasted long enough to be killed"
        exit_code = -signal.SIGKILL
        while exit_code == -signal.SIGKILL and num_killed < kills:
            process = server.start(*_command(home, folder), before=before)
            time.sleep(rng.uniform(0, duration / 2))
            os.kill(process, signal.SIGKILL)  # not reaped before `wait`, so it is still the same
            exit_code = server.wait()
            assert exit_code in (-signal.SIGKILL, 0)
            num_killed += exit_code == -signal.SIGKILL
            _require_no_half_artifact(folder)
            report = folder / "r" / "report.json"
            if exit_code and report.is_file():
                interrupted += json.loads(report.read_text())["status"] == "interrupted"
        if exit_code:
            server.start(*_command(home, folder), before=before)
            assert server.wait() == 0
        assert _outcome(folder) == expected_outcome
        # a kill between the making of a marker and its record leaves an empty file for an hour
        leftovers = [
            path for path in (folder / "s" / "tmp").iterdir() if path.is_dir() or path.stat().st_size
        ]
        assert not leftovers
        assert not list(partial_files(folder / "r"))
        assert not list((folder / "s" / "locks").iterdir())
    assert interrupted or not locks, "no kill fell between two steps"
