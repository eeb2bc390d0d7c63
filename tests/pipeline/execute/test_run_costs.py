"""A run records its steps' costs, a plan finds them in the store, and what cannot fit is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from smelt.core.artifact import read_artifact
from smelt.core.errors import InputError
from smelt.core.remote_store import open_remote_store
from smelt.core.store import Store
from smelt.pipeline.execute import run_costs
from smelt.pipeline.execute.run import RunOptions, run_plan
from smelt.pipeline.execute.run_costs import (
    cost_lines,
    machine_limits,
    plan_costs,
    step_records,
    stored_steps,
)
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import tiny

RECIPE = """
model: m
task: text-classification
threads: 1
data: {train: data.jsonl, test: data.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: magnitude}
  - factorize: {energy: 0.5, optimize_for: size}
score: {latency: false, sqnr_samples: 0}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("costs")
    tiny.write_bert(folder / "m")
    tiny.write_labeled(folder / "data.jsonl", 8)
    (folder / "recipe.yaml").write_text(RECIPE)
    options = RunOptions(folder / "runs" / "r", quiet=True)
    assert run_plan(load_plan(folder / "recipe.yaml", until="prune"), options).exit_code == 0
    return folder


def test_step_records_its_cost(home):
    manifest = read_artifact(home / "runs" / "r" / "artifacts" / "prune").manifest
    record = manifest.record
    assert record is not None
    assert (record.kind, record.threads, record.seconds) == ("prune magnitude keep", 1, manifest.seconds)
    assert record.memory_bytes is None or record.memory_bytes > 10**8
    store = home / "runs" / ".store"
    assert step_records(store, 1) == [record]
    assert step_records(store, 2) == []


@pytest.mark.parametrize(("overrides", "expected"), [
    ((), {"model", "prune"}), (("prune.keep_ratio=0.75",), {"model"}), (("seed=1",), set()),
])  # fmt: skip
def test_stored_steps_exclude_overridden_steps(home, overrides, expected):
    plan = load_plan(home / "recipe.yaml", overrides)
    stored = stored_steps(plan, plan.splits, Store(home / "runs" / ".store"))
    assert stored == expected


def test_stored_steps_cost_nothing_and_other_times_are_measured_or_unknown(home):
    for overrides, source in (((), "stored"), (("prune.keep_ratio=0.75",), "measured")):
        costs = plan_costs(load_plan(home / "recipe.yaml", overrides), home / "runs" / "r")
        steps = {step.name: step for step in costs.steps}
        assert [steps[name].source for name in ("model", "prune", "factorize")] == [
            "stored",
            source,
            "unknown",
        ]
        assert costs.seconds is None
        assert max(map(len, cost_lines(costs))) <= 80
    [record] = step_records(home / "runs" / ".store", 1)
    assert steps["prune"].seconds == pytest.approx(record.seconds)


@pytest.mark.parametrize(("until", "explained"), [("prune", 0), ("factorize", 1)])
def test_plan_explains_unknown_times_only_if_there_are_some(home, until, explained):
    costs = plan_costs(load_plan(home / "recipe.yaml", until=until), home / "runs" / "r")
    assert sum(line.startswith("?") for line in cost_lines(costs)) == explained


def test_plan_shows_default_calibration_tokens(home):
    tokens = []
    for samples in ("null", "4"):
        changes = ("prune.keep_ratio=0.75", f"prune.calibration_samples={samples}")
        costs = plan_costs(load_plan(home / "recipe.yaml", changes), home / "runs" / "other")
        assert max(map(len, lines := cost_lines(costs))) <= 80
        tokens.append({step.name: step.calibration_tokens for step in costs.steps})
        assert any(line.startswith("calibration ") and "factorize" in line for line in lines)
    config = json.loads((home / "m" / "config.json").read_text())
    expected = 10 * config["intermediate_size"]
    assert tokens[0] == {"model": None, "prune": expected, "factorize": 3 * expected // 4}
    assert tokens[1] == tokens[0] | {"prune": None}


def test_plan_reads_remote_store_without_copying(home, tmp_path):
    url = f"file://{home / 'bucket'}"
    filled = Store(home / "runs" / ".store", open_remote_store(url))
    for path in (filled.root / "artifacts").iterdir():
        filled.find(path.name)
    arguments = ("plan", home / "recipe.yaml", "--store", url, "--out", tmp_path / "r", "--json")
    steps = {
        step["name"]: step for step in json.loads(harness.smelt(*arguments, code=0).output)["costs"]["steps"]
    }
    sources = {"model": "stored", "prune": "stored", "factorize": "unknown"}
    assert {name: step["source"] for name, step in steps.items()} == sources
    assert list(tmp_path.iterdir()) == []
    local = run_costs._PlannedStore(tmp_path / "local", open_remote_store(url))
    plan = load_plan(home / "recipe.yaml")
    assert stored_steps(plan, plan.splits, local) == {"model", "prune"}
    assert [[*(local.root / name).iterdir()] for name in ("artifacts", "scores")] == [[], []]


def test_run_that_cannot_fit_is_rejected_before_writing(home, monkeypatch):
    small_limits = dataclasses.replace(machine_limits(home), memory_bytes=1000)
    monkeypatch.setattr(run_costs, "machine_limits", lambda folder: small_limits)
    plan = load_plan(home / "recipe.yaml", ("prune.keep_ratio=0.25",), until="prune")
    with raises_code("needs-more-memory", InputError):
        run_plan(plan, RunOptions(home / "runs" / "other", quiet=True))
    assert not (home / "runs" / "other").exists()
    stored = load_plan(home / "recipe.yaml", until="prune")
    assert run_plan(stored, RunOptions(home / "runs" / "r", quiet=True)).exit_code == 0
