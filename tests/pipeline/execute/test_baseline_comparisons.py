"""Comparisons with a large baseline are made on request only; plans know their time from earlier runs."""

from __future__ import annotations

import dataclasses
import json

import pytest

from smelt.core.messages import message_codes
from smelt.models.model_size import INTERPRETER_BYTES
from smelt.pipeline.execute.run_costs import cost_lines, plan_costs, step_records
from smelt.pipeline.plan.costs import COMPARISONS, MachineLimits, check_costs, estimate_steps
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.recipe import recipe
from tests.support import harness
from tests.support.models import tiny

RECIPE = """
model: m
task: translation
threads: 1
data: {train: rows.jsonl, test: rows.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: magnitude}
score: {quality: [chrf], generation: {max_new_tokens: 3}, latency: false}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparisons")
    tiny.write_marian(folder / "m")
    tiny.write_pairs(folder / "rows.jsonl")
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def run(home, *overrides):
    """Run the recipe; return the report's codes, and whether layers and next tokens were compared."""
    options = [text for override in overrides for text in ("--set", override)]
    out = home / "runs" / "r"
    harness.smelt("run", home / "recipe.yaml", "--quiet", "--out", out, *options, code=0)
    report = json.loads((out / "report.json").read_text())
    step = report["steps"][1]
    codes = [message["code"] for message in report["warnings"]]
    return codes, step["layer_sqnr"] is not None, "kl_divergence" in step["agreement"]


def planned_costs(home, *overrides):
    return plan_costs(load_plan(home / "recipe.yaml", overrides), home / "runs" / "r")


def comparisons_row(home, *overrides):
    costs = planned_costs(home, *overrides)
    assert max(map(len, cost_lines(costs))) <= 80
    return next((step for step in costs.steps if step.name == COMPARISONS), None)


def test_large_baselines_are_compared_only_on_request(home, monkeypatch):
    monkeypatch.setattr(recipe, "MAX_COMPARED_PARAMETERS", 1000)
    codes, *compared = run(home)
    assert (codes.count("comparisons-skipped"), compared) == (1, [False, False])
    assert comparisons_row(home) is None
    codes, *compared = run(home, "score.sqnr_samples=2")
    assert (codes.count("comparisons-skipped"), compared) == (1, [True, False])
    codes, *compared = run(home, "score.sqnr_samples=2", "score.kl_samples=2")
    assert (codes.count("comparisons-skipped"), compared) == (0, [True, True])
    codes, *compared = run(home, "score.sqnr_samples=0", "score.kl_samples=0")
    assert (codes.count("comparisons-skipped"), compared) == (0, [False, False])


def test_plan_reports_that_large_baselines_are_not_compared(home, monkeypatch):
    assert "comparisons-skipped" not in message_codes(planned_costs(home).messages)
    monkeypatch.setattr(recipe, "MAX_COMPARED_PARAMETERS", 1000)
    assert "comparisons-skipped" in message_codes(planned_costs(home).messages)
    requested = ("score.sqnr_samples=2", "score.kl_samples=0")
    assert "comparisons-skipped" not in message_codes(planned_costs(home, *requested).messages)


def test_plan_predicts_comparisons_by_their_record(home):
    changed = ("score.sqnr_samples=4", "score.kl_samples=8")
    assert comparisons_row(home, *changed).seconds is None
    assert run(home, *changed)[1:] == (True, True)
    store = home / "runs" / ".store"
    [record] = [r for r in step_records(store, 1) if r.kind == f"{COMPARISONS} layers tokens cpu"]
    assert 0 < record.seconds < 600
    row = comparisons_row(home, *changed)
    assert (row.source, row.seconds, row.disk_bytes) == ("stored", 0.0, 0)
    row = comparisons_row(home, "score.sqnr_samples=16", "score.kl_samples=16")  # there are 8
    assert (row.source, row.measured_seconds) == ("measured", record.seconds)
    assert row.seconds == pytest.approx((8 + 8) / (4 + 8) * record.seconds)
    assert (
        comparisons_row(home, "score.sqnr_samples=0").source == "unknown"
    )  # a record of both is another kind
    run(home, *changed)  # all in the store: no record
    assert len([r for r in step_records(store, 1) if r.kind == record.kind]) == 1


def test_plan_warns_about_memory_of_comparisons(home):
    plan = load_plan(home / "recipe.yaml", ("score.kl_samples=0",))
    estimates = estimate_steps(plan, plan.splits)
    size = estimates["model"].size.result
    in_blocks = sum(stack.layers * stack.block_weights for stack in size.stacks)
    expected = 2 * 4 * (size.parameters - in_blocks + max(stack.block_weights for stack in size.stacks))
    needed = estimates[COMPARISONS].memory_bytes
    assert needed == expected + INTERPRETER_BYTES
    roomy = MachineLimits(memory_bytes=10**12, free_bytes=needed, disk_bytes=10**12)

    def settings(limits, *stored):
        return [m.setting for m in check_costs(plan, estimates, limits, stored) if m.setting]

    assert settings(roomy) == []
    short = dataclasses.replace(roomy, free_bytes=needed - 1)
    [message] = [m for m in check_costs(plan, estimates, short, ["prune"]) if m.setting]
    assert (message.code, message.setting) == ("may-need-more-memory", "score.sqnr_samples")
    assert settings(short, "prune", COMPARISONS) == []
