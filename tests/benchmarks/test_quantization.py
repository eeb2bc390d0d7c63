"""quantization.py: its recipes are ones that the plan accepts, and its table says what a report says."""

import json
import subprocess

import pytest
import quantization

from smelt.pipeline.recipe.yaml_file import dump_yaml
from tests.support.parsed_recipes import parse_recipe

ARMS = quantization.selected_arms(None)


@pytest.mark.parametrize("task", quantization.TASKS)
def test_every_variant_is_a_branch_of_a_recipe(task, tmp_path):
    written = tmp_path / "recipe.yaml"
    written.write_text(dump_yaml(quantization.recipe_of(task, tmp_path, ARMS, 7)))
    recipe = parse_recipe(written.read_text(), written)
    names = [stage.name for stage in recipe.stages]
    assert {f"{quantization.step_of(arm)}-ort-cpu" for arm in ("fp32", *ARMS)} <= set(names)
    assert recipe.baseline == "fp32-ort-cpu"


def timed(speedup, ci, stable=True):
    row = {"batch_size": 8, "p50_ms": 12.345, "stable": stable, "speedup": speedup, "speedup_ci95": ci}
    return {"latency": [row]}


def test_times_are_compared_within_one_runtime_and_disturbances_are_reported():
    results = {
        "ONNX Runtime": {"fp32": timed(1.0, [1.0, 1.0]), "pow2": timed(2.0, [1.9, 2.1])},
        "torch": {"fp32": timed(1.0, [1.0, 1.0], stable=False)},
    }
    _, _, fp32, pow2 = quantization.latency_table(results)
    assert fp32 == "| fp32 |  | 12.3 ms |  |  | 12.3 ms (unstable) |  |"
    assert pow2 == "| pow2 |  | 12.3 ms, 2.00 [1.90, 2.10] |  |  |  |  |"


def test_only_available_runtimes_are_timed_each_separately(tmp_path, monkeypatch):
    artifacts = tmp_path / "translation" / "artifacts"
    for name in ("model", "int8-dynamic", "fp32-ort-cpu", "pow2-ort-cpu", "fp32-openvino"):
        (artifacts / name).mkdir(parents=True)
    asked = []

    def bench(command, **_):
        names = [argument.rpartition("/")[2] for argument in command if str(artifacts) in argument]
        asked.append(names)
        output = json.dumps({"artifacts": {name: timed(1.0, [1.0, 1.0]) for name in names}})
        return subprocess.CompletedProcess(command, 0, stdout=output)

    monkeypatch.setattr(subprocess, "run", bench)
    assert quantization.time_artifacts("translation", tmp_path) == 0
    assert asked == [["fp32-ort-cpu", "pow2-ort-cpu"], ["model", "int8-dynamic"]]
    latencies = json.loads((tmp_path / "translation" / "latency.json").read_text())
    assert {runtime: list(arms) for runtime, arms in latencies.items()} == {
        "ONNX Runtime": ["fp32", "pow2"], "torch": ["fp32", "int8-dynamic"],
    }  # fmt: skip
