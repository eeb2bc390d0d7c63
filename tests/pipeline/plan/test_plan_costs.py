"""Predictions of plans: what is refused, what is advised, what earlier runs and the store change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from smelt.core.artifact import StepRecord
from smelt.core.errors import InputError
from smelt.models.model_size import SizeInputs, count_parameters, one_shot_size, size_from_config
from smelt.pipeline.plan.costs import (
    COMPARISONS,
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
from tests.support.models import masked, tiny
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
    _, estimates = _plan(home)
    weights = count_parameters(home / "m")
    tuned, pruned, quantized = (estimates[name].size for name in ("finetune", "prune", "quantize"))
    assert tuned.least_bytes == 16 * weights
    assert tuned.result.parameters == weights
    [before], [after] = tuned.result.stacks, pruned.result.stacks
    assert after.matrices[0] == (before.matrices[0][0] // 2, before.matrices[0][1])
    assert quantized.disk_bytes < 0.5 * pruned.disk_bytes


@pytest.mark.parametrize("optional", [False, True])
def test_weights_exceeding_memory_are_rejected(home, optional):
    plan, estimates = _plan(home, f"finetune.optional={str(optional).lower()}")
    least_bytes = estimates["finetune"].size.least_bytes
    limits = dataclasses.replace(ROOMY, memory_bytes=least_bytes - 1)
    messages = check_costs(plan, estimates, limits)
    assert [m.code for m in messages] == ([] if optional else ["needs-more-memory"])
    if not optional:
        with raises_code("needs-more-memory", InputError):
            require_fitting(messages)
    _, lighter = _plan(home, "finetune.optimizer=adafactor")
    assert lighter["finetune"].size.least_bytes < least_bytes


def test_insufficient_free_memory_warns_with_fitting_settings(home):
    plan, estimates = _plan(home)
    limits = dataclasses.replace(
        ROOMY, free_bytes=560_000_000 + estimates["finetune"].size.memory_bytes - 1000
    )
    [message] = [m for m in check_costs(plan, estimates, limits) if m.step == "finetune"]
    assert (message.code, message.severity) == ("may-need-more-memory", "warning")
    fitting = fitting_settings(plan, plan.steps[0], estimates, limits.free_bytes)
    assert fitting["optimizer: adafactor"] <= limits.free_bytes


def test_fitting_settings_for_several_processes_fit(home):
    """By the whole estimate, also where the lower bound is refused."""
    plan, estimates = _plan(home, "launch.num_processes=9", "finetune.batch_size=1")
    cost = estimates["finetune"].size
    for max_bytes in (cost.least_bytes - 1, (cost.memory_bytes + 560_000_000) // 2):
        fitting = fitting_settings(plan, plan.steps[0], estimates, max_bytes)
        for setting, needed in fitting.items():
            override = setting if setting.startswith("launch") else f"finetune: {{{setting}}}"
            _, other = _plan(
                home, "launch.num_processes=9", "finetune.batch_size=1", override.replace(": ", "=", 1)
            )
            assert needed == other["finetune"].size.memory_bytes + 560_000_000 <= max_bytes
    assert "launch: {num_processes: 4}" in fitting


@pytest.mark.parametrize(
    ("part", "codes"), [(0.5, ["needs-more-disk"]), (1.0, ["may-need-more-disk"]), (9.0, [])]
)
def test_insufficient_disk_space_is_reported(home, part, codes):
    plan, estimates = _plan(home)
    artifacts = sum(estimate.size.disk_bytes for estimate in estimates.values())
    limits = dataclasses.replace(ROOMY, disk_bytes=int(part * artifacts))
    assert [m.code for m in check_costs(plan, estimates, limits)] == codes
    every = [*estimates]
    assert check_costs(plan, estimates, limits, stored=every) == []


def test_gpu_memory_has_own_limit(home):
    plan, estimates = _plan(home)
    size = dataclasses.replace(estimates["finetune"].size, least_device_bytes=100, device_bytes=200)
    estimates |= {"finetune": dataclasses.replace(estimates["finetune"], size=size)}
    codes = [
        [m.code for m in check_costs(plan, estimates, dataclasses.replace(ROOMY, device_bytes=device))]
        for device in (99, 150, 250)
    ]
    assert codes == [["needs-more-memory"], ["may-need-more-memory"], []]


def _record(estimate, work_ratio=1.0, seconds=10.0, memory_ratio=1.0, **changes):
    size = estimate.size
    values = {
        "kind": estimate.kind,
        "machine": "m",
        "threads": 1,
        "seconds": seconds,
        "memory_bytes": round(memory_ratio * (size.memory_bytes + 560_000_000)),
        "estimated_memory_bytes": size.memory_bytes,
        "work": work_ratio * size.work,
    }
    return StepRecord(**values | changes)


@pytest.mark.parametrize(
    ("works", "seconds"),
    [
        ([], None),
        ([0.5], 20.0),
        ([4.0, 0.5, 2.0, 0.3], 20.0),  # the nearest, the newest of equally near ones
        ([0.2], None),
        ([5.0], None),
    ],
)
def test_predicted_time_scales_nearest_record_by_work(home, works, seconds):
    plan, costs = _plan(home)
    records = [_record(costs["prune"], work) for work in works]
    records += [_record(costs["prune"], 1.0, kind="other", seconds=1.0)]
    predicted = estimate_steps(plan, plan.splits, records)
    assert predicted["prune"].seconds == (None if seconds is None else pytest.approx(seconds))
    assert predicted["quantize"].seconds is None


@pytest.mark.parametrize(("ratio", "expected"), [(3.0, 3.0), (0.5, 1.0), (None, 1.0)])
def test_predicted_memory_is_maximum_of_estimate_and_record(home, ratio, expected):
    plan, costs = _plan(home)
    changes = {"memory_bytes": None} if ratio is None else {}
    record = _record(costs["finetune"], memory_ratio=ratio or 1.0, **changes)
    estimates = estimate_steps(plan, plan.splits, [record])
    plain = costs["finetune"].memory_bytes
    assert estimates["finetune"].memory_bytes == pytest.approx(expected * plain)
    limits = dataclasses.replace(ROOMY, free_bytes=round(2 * plain))
    codes = [m.code for m in check_costs(plan, estimates, limits) if m.step == "finetune"]
    assert codes == (["may-need-more-memory"] if expected == 3.0 else [])
    fitting = fitting_settings(plan, plan.steps[0], estimates, round(expected * plain) - 1)
    lighter = fitting_settings(plan, plan.steps[0], costs, plain - 1)
    assert {change: pytest.approx(expected * count) for change, count in lighter.items()} == fitting


@pytest.mark.parametrize("length", [16, 32])
def test_work_on_running_text_is_proportional_to_windows(tmp_path, length):
    """However the text is divided into lines; a training of so many updates has as much work."""
    masked.write_model(tmp_path / "m")
    text, works = "a man rides a horse over green grass " * 96, {}
    settings = {"epochs": "epochs: 1", "steps": "max_steps: 4"}
    for name, lines in (("one", [text]), ("many", text.split(" "))):
        (tmp_path / "t.txt").write_text("\n".join(lines))
        for kind, setting in settings.items():
            (tmp_path / "recipe.yaml").write_text(
                "model: m\ntask: masked-language-modeling\nscore: {latency: false}\n"
                f"data: {{train: t.txt, test: t.txt, windows: {{length: {length}}}}}\n"
                f"stages: [finetune: {{batch_size: 8, num_evals: 0, {setting}}}]\n"
            )
            plan, estimates = _plan(tmp_path)
            works[name, kind] = estimates["finetune"].size.work
    assert works["one", "epochs"] == pytest.approx(works["many", "epochs"], rel=0.1)
    num_windows = len(text) / 4 / length
    expected = works["one", "steps"] * num_windows / (4 * 8)
    assert works["one", "epochs"] == pytest.approx(expected, rel=0.1)
    count = len(plan.splits["train"])
    assert f"({count:,} " in str(plan)


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
    assert {kind["prune"] for kind in kinds} == {"prune taylor keep"}  # in one process


@pytest.mark.parametrize(
    "override", ["quantize.scheme=int4", "prune.importance=magnitude", "finetune.gradient_checkpointing=true"]
)
def test_records_predict_only_same_scheme_importance_and_checkpointing(home, override):
    (_, plain), (_, changed) = _plan(home), _plan(home, override)
    different = {name for name in plain if plain[name].kind != changed[name].kind}
    assert different == {override.partition(".")[0]}


def test_plan_command_prints_table_and_json(home, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    printed = harness.smelt("plan", home / "recipe.yaml", code=0).output
    assert max(map(len, printed.splitlines())) <= 80
    result = json.loads(harness.smelt("plan", home / "recipe.yaml", "--json", code=0).output)
    steps = ["finetune", "prune", "quantize", "onnx"]
    names = ["model", *steps, COMPARISONS]
    assert [step["name"] for step in result["costs"]["steps"]] == names
    assert [step["name"] for step in result["steps"]] == steps
    assert {"seconds", "memory_bytes", "disk_bytes", "source"} <= result["costs"]["steps"][1].keys()
    assert all(any(line.startswith(name) for line in printed.splitlines()) for name in [*names, "total"])
    assert list(Path.cwd().iterdir()) == []  # nothing is written


def test_plan_command_rejects_steps_exceeding_memory(home, monkeypatch):
    small_limits = dataclasses.replace(ROOMY, memory_bytes=1000)
    monkeypatch.setattr("smelt.pipeline.execute.run_costs.machine_limits", lambda folder: small_limits)
    result = harness.smelt("plan", home / "recipe.yaml", code=2)
    assert "needs-more-memory" in {message.code for message in result.error.messages}


@pytest.mark.parametrize("config", [LLAMA, BERT, MARIAN], ids=lambda config: config["model_type"])
def test_every_technique_estimates_consistent_lower_bound(config):
    size = size_from_config(config)
    tasks = {"llama": "language-modeling", "bert": "text-classification", "marian": "translation"}
    task = tasks[config["model_type"]]
    samples = dict.fromkeys(("train", "validation", "unlabeled"), 3)
    for technique in TECHNIQUES.values():
        stage = load_stage(technique.stage)
        settings = stage.settings_type.model_validate(technique.settings)
        for sample_lengths in (samples, {}):
            inputs = SizeInputs(size, size, task, sample_lengths, {"teacher": size})
            estimate = stage.estimate_size(settings, inputs) or one_shot_size(inputs)
            assert 0 < estimate.least_bytes <= estimate.memory_bytes
            assert estimate.disk_bytes > 0
            assert estimate.work is None or estimate.work > 0
            for _, lighter in stage.lighter_settings(settings):
                assert stage.estimate_size(lighter, inputs).memory_bytes > 0


@pytest.mark.parametrize(("count", "text"), [(3_100_000, "3.1 MB"), (99e6, "99.0 MB"), (2.4e10, "24.0 GB")])
def test_small_byte_counts_are_not_rounded_to_zero(count, text):
    assert format_bytes(count) == text
