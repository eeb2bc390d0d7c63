"""Predictions of plans: what is refused, what is advised, what earlier runs and the store change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from smelt.core.artifact import StepRecord
from smelt.core.errors import InputError
from smelt.models.costs import CostInputs, SampleLengths, one_shot_cost
from smelt.models.model_size import count_parameters, size_from_config
from smelt.pipeline.execute.run_costs import cost_lines, predict_costs
from smelt.pipeline.plan.costs import (
    MachineLimits,
    check_costs,
    estimate_steps,
    fitting_settings,
    format_bytes,
    require_fitting,
)
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.recipe.stages import load_stage
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import tiny
from tests.support.pairs.paired_techniques import TECHNIQUES

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, test: data.jsonl}
stages:
  - finetune: {max_steps: 20, batch_size: 8, num_evals: 0}
  - prune: {targets: [ffn], keep_ratio: 0.5}
  - quantize: {scheme: int8-dynamic}
  - onnx: {}
score: {latency: false}
"""
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200,
}  # fmt: skip
BERT = LLAMA | {"model_type": "bert"}
MARIAN = {
    "model_type": "marian", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 200,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
}  # fmt: skip
ROOMY = MachineLimits(memory_bytes=10**12, free_bytes=10**12, disk_bytes=10**12)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    tiny.write_bert(folder / "m")
    tiny.write_labeled(folder / "data.jsonl", 16)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def _plan(home, *overrides):
    plan = load_plan(home / "recipe.yaml", overrides)
    return plan, estimate_steps(plan, plan.splits)


def test_estimated_sizes_follow_stages(home):
    _, found = _plan(home)
    weights = count_parameters(home / "m")
    tuned, pruned, quantized = (found[name].cost for name in ("finetune", "prune", "quantize"))
    assert tuned.least_bytes == 16 * weights
    assert tuned.result.parameters == weights
    [before], [after] = tuned.result.stacks, pruned.result.stacks
    assert after.matrices[0] == (before.matrices[0][0] // 2, before.matrices[0][1])
    assert quantized.disk_bytes < 0.5 * pruned.disk_bytes
    assert all(estimate.cost.work is not None for estimate in found.values())


@pytest.mark.parametrize("optional", [False, True])
def test_weights_exceeding_memory_are_rejected(home, optional):
    plan, found = _plan(home, f"finetune.optional={str(optional).lower()}")
    least = found["finetune"].cost.least_bytes
    limits = dataclasses.replace(ROOMY, memory_bytes=least - 1)
    messages = check_costs(plan, found, limits)
    assert [m.code for m in messages] == ([] if optional else ["needs-more-memory"])
    if not optional:
        with raises_code("needs-more-memory", InputError):
            require_fitting(messages)
    _, lighter = _plan(home, "finetune.optimizer=adafactor")
    assert lighter["finetune"].cost.least_bytes < least


def test_insufficient_free_memory_warns_with_fitting_settings(home):
    plan, found = _plan(home, "finetune.batch_size=16")
    likely = found["finetune"].cost.memory_bytes
    limits = dataclasses.replace(ROOMY, free_bytes=560_000_000 + likely - 1000)
    [message] = [m for m in check_costs(plan, found, limits) if m.step == "finetune"]
    assert (message.code, message.severity) == ("may-need-more-memory", "warning")
    fitting = fitting_settings(plan, plan.steps[0], found, limits.free_bytes)
    assert fitting["batch_size: 8, gradient_accumulation_steps: 2"] <= limits.free_bytes


def test_fitting_settings_for_several_processes_fit(home):
    """By the whole estimate, also where the lower bound is refused."""
    plan, found = _plan(home, "launch.num_processes=9", "finetune.batch_size=1")
    given = found["finetune"].cost
    for most in (given.least_bytes - 1, (given.memory_bytes + 560_000_000) // 2):
        fitting = fitting_settings(plan, plan.steps[0], found, most)
        for change, needed in fitting.items():
            part = change if change.startswith("launch") else f"finetune: {{{change}}}"
            _, other = _plan(
                home, "launch.num_processes=9", "finetune.batch_size=1", part.replace(": ", "=", 1)
            )
            assert needed == other["finetune"].cost.memory_bytes + 560_000_000 <= most
    assert "launch: {num_processes: 4}" in fitting


@pytest.mark.parametrize(
    ("part", "codes"), [(0.5, ["needs-more-disk"]), (1.0, ["may-need-more-disk"]), (9.0, [])]
)
def test_insufficient_disk_space_is_reported(home, part, codes):
    plan, found = _plan(home)
    artifacts = sum(estimate.cost.disk_bytes for estimate in found.values())
    limits = dataclasses.replace(ROOMY, disk_bytes=int(part * artifacts))
    assert [m.code for m in check_costs(plan, found, limits)] == codes
    every = [*found]
    assert check_costs(plan, found, limits, stored=every) == []


def test_gpu_memory_has_own_limit(home):
    plan, found = _plan(home)
    cost = dataclasses.replace(found["finetune"].cost, least_device_bytes=100, device_bytes=200)
    found |= {"finetune": dataclasses.replace(found["finetune"], cost=cost)}
    codes = [
        [m.code for m in check_costs(plan, found, dataclasses.replace(ROOMY, device_bytes=size))]
        for size in (99, 150, 250)
    ]
    assert codes == [["needs-more-memory"], ["may-need-more-memory"], []]


def test_earlier_records_correct_estimate_and_stored_steps_are_free(home):
    plan, found = _plan(home)
    speed = harness.MACHINE_SPEED
    plain = {s.name: s for s in predict_costs(plan, found, ROOMY, speed).steps}
    cost = found["prune"].cost
    record = StepRecord(
        kind=found["prune"].kind, machine="m", threads=1, seconds=3 * speed.seconds(cost.work),
        memory_bytes=2 * (cost.memory_bytes + speed.base_bytes), estimated_memory_bytes=cost.memory_bytes,
        work=cost.work.to_json(),
    )  # fmt: skip
    stored = {"finetune", "model", "model:score"}
    costs = predict_costs(plan, found, ROOMY, speed, stored=stored, records=[record])
    steps = {step.name: step for step in costs.steps}
    assert steps["prune"].seconds == pytest.approx(3 * plain["prune"].seconds)
    assert steps["prune"].memory_bytes == pytest.approx(2 * plain["prune"].memory_bytes, rel=1e-6)
    sources = {"model": "stored", "finetune": "stored", "prune": "measured", "quantize": "estimated"}
    assert {name: steps[name].source for name in sources} == sources
    assert (steps["finetune"].seconds, steps["finetune"].disk_bytes, steps["model"].scoring_seconds) == (
        0,
        0,
        0,
    )
    assert steps["finetune"].scoring_seconds == plain["finetune"].scoring_seconds > 0
    assert costs.seconds == pytest.approx(sum(s.seconds + s.scoring_seconds for s in costs.steps))


def test_records_predict_only_same_launch(home):
    divided = "{num_processes: 2, strategy: fsdp"
    launches = [
        "{}",
        "{num_processes: 2}",
        "{num_processes: 3}",
        f"{divided}}}",
        f"{divided}, cpu_offload: true}}",
    ]
    kinds = [
        {name: estimate.kind for name, estimate in _plan(home, f"launch={launch}")[1].items()}
        for launch in launches
    ]
    assert len({kind["finetune"] for kind in kinds}) == len(launches)
    assert kinds[0]["finetune"] == "finetune"
    assert {kind["prune"] for kind in kinds} == {"prune"}  # in one process


def test_several_processes_compute_on_cores_of_their_threads(home, monkeypatch):
    monkeypatch.setattr("smelt.pipeline.plan.costs.physical_cores", lambda: 8)
    found = {
        (count, threads): _plan(home, f"launch.num_processes={count}", f"threads={threads}")[1]
        for count, threads in ((1, 2), (3, 2), (16, 2), (16, "null"))
    }
    flops = {
        of: next(n for (unit, _), n in e["finetune"].cost.work.amounts.items() if unit == "training")
        for of, e in found.items()
    }
    ratios = {of: round(flops[1, 2] / n, 3) for of, n in flops.items()}
    assert ratios == {(1, 2): 1, (3, 2): 3, (16, 2): 4, (16, "null"): 1}


def test_plan_command_prints_table_and_json(home, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    printed = harness.smelt("plan", home / "recipe.yaml", code=0).output
    assert max(map(len, printed.splitlines())) <= 80
    found = json.loads(harness.smelt("plan", home / "recipe.yaml", "--json", code=0).output)
    names = ["model", "finetune", "prune", "quantize", "onnx"]
    assert [step["name"] for step in found["costs"]["steps"]] == names
    assert [step["name"] for step in found["steps"]] == names[1:]
    assert {"seconds", "memory_bytes", "disk_bytes", "source"} <= found["costs"]["steps"][1].keys()
    assert all(any(line.startswith(name) for line in printed.splitlines()) for name in [*names, "total"])
    assert list(Path.cwd().iterdir()) == []  # nothing is written


def test_plan_command_rejects_steps_exceeding_memory(home, monkeypatch):
    small = dataclasses.replace(ROOMY, memory_bytes=1000)
    monkeypatch.setattr("smelt.pipeline.execute.run_costs.machine_limits", lambda folder: small)
    result = harness.smelt("plan", home / "recipe.yaml", code=2)
    assert "needs-more-memory" in {message.code for message in result.error.messages}


@pytest.mark.parametrize("config", [LLAMA, BERT, MARIAN], ids=lambda config: config["model_type"])
def test_every_technique_estimates_consistent_lower_bound(config):
    size = size_from_config(config)
    tasks = {"llama": "language-modeling", "bert": "text-classification", "marian": "translation"}
    task = tasks[config["model_type"]]
    targets = (5, 6, 7) if task == "translation" else (0, 0, 0)
    samples = {name: SampleLengths((8, 9, 10), targets, 3) for name in ("train", "validation", "unlabeled")}
    for technique in TECHNIQUES.values():
        stage = load_stage(technique.stage)
        settings = stage.settings_type.model_validate(technique.settings)
        for known in (samples, {}):
            inputs = CostInputs(size, size, task, known, {"teacher": size})
            estimate = stage.estimate_cost(settings, inputs)
            cost = estimate or one_shot_cost(inputs)
            assert 0 < cost.least_bytes <= cost.memory_bytes
            assert cost.disk_bytes > 0
            if estimate and cost.work is not None and known:
                assert 0 < harness.MACHINE_SPEED.seconds(cost.work) < 3600
            for _, lighter in stage.lighter_settings(settings):
                assert stage.estimate_cost(lighter, inputs).memory_bytes > 0


def test_unknown_costs_are_marked_unknown(home):
    plan, _ = _plan(home)
    found = estimate_steps(plan, {})
    costs = predict_costs(plan, found, ROOMY, harness.MACHINE_SPEED, unread=["train"])
    assert costs.seconds is None
    assert {s.name: s.seconds for s in costs.steps}["finetune"] is None
    assert any("train" in line for line in cost_lines(costs)[-2:])


@pytest.mark.parametrize(("count", "text"), [(3_100_000, "3.1 MB"), (99e6, "99.0 MB"), (2.4e10, "24.0 GB")])
def test_small_byte_counts_are_not_rounded_to_zero(count, text):
    assert format_bytes(count) == text
