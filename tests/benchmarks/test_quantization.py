"""quantization.py: its recipes are ones that the plan accepts, and its table says what a report says."""

import json
import subprocess

import benchmarks_path  # noqa: F401 -- before what lies in benchmarks
import pytest
import quantization
import yaml
from parsed_recipes import parse_recipe

from smelt.compress.quantize.settings import QuantizeSettings

ARMS = quantization.selected_arms(None)


@pytest.mark.parametrize("task", quantization.TASKS)
def test_every_arm_is_a_branch_of_a_recipe(task, tmp_path):
    written = tmp_path / "recipe.yaml"
    written.write_text(yaml.safe_dump(quantization.recipe_of(task, tmp_path, ARMS, 7)))
    recipe = parse_recipe(written.read_text(), written)
    names = [stage.name for stage in recipe.stages]
    assert {f"{quantization.step_of(arm)}-ort-cpu" for arm in ("fp32", *ARMS)} <= set(names)
    assert recipe.baseline == "fp32-ort-cpu"


def test_arms_are_chosen_by_patterns():
    assert quantization.selected_arms(["int3 *", "binary trained"]) == [
        *(f"int3 {method}" for method in ("rtn", "gptq", "awq", "awq-gptq", "hqq")),
        "int3 rtn, zero points",
        "int3 awq clip, zero points",
        "int3 gptq v4",
        "int3 gptq g32",
        "int3 trained",
        "binary trained",
    ]


def test_int3_codes_embeddings_and_head_as_it_was_measured_in_each_arm():
    named = {}
    for arm in quantization.selected_arms(["int3 *"]):
        codes = quantization.stages_of(arm, {})[0]["quantize"]
        named[arm] = QuantizeSettings(**codes).resolved_embedding_scheme
    assert named.pop("int3 gptq v4") == "int4"
    assert set(named.values()) == {"int3"}


def test_trained_arms_start_at_codes_and_their_control_at_the_model():
    training = {"max_steps": 7}
    codes, distill = quantization.stages_of("int2 trained", training)
    assert (codes["quantize"]["scheme"], codes["from"]) == ("int2", "model")
    (control,) = quantization.stages_of("fp32 trained", training)
    assert control["from"] == "model"
    assert control["distill"] == distill["distill"]


def test_what_is_timed_are_arms_and_each_runtime_has_its_own_float32():
    assert set(quantization.TIMED) <= {"fp32", *ARMS}
    assert {"fp32"} < set(quantization.OPENVINO) <= set(quantization.TIMED)


def step(name, bits, against=None):
    quality = {"bleu": {"value": 37.0, "ci95": [35.0, 39.0]}}
    details = {"bits_per_weight": bits} if bits else {}
    return {
        "name": name, "status": "done", "details": details, "size_bytes": 6_540_000, "quality": quality,
        "against_baseline": against,
    }  # fmt: skip


def test_quality_is_told_of_the_graph_beside_the_bits_of_its_codes():
    worse = {"bleu": {"difference": -0.31, "ci95": [-0.72, 0.24], "p_value": 0.344}}
    steps = [step("model", None), step("fp32-ort-cpu", None), step("int4-gptq", 4.25, worse)]
    steps += [step("int4-gptq-ort-cpu", None, worse), step("int2-trained-codes", 2.74, worse)]
    steps += [step("int2-trained", None, worse), step("int2-trained-ort-cpu", None, worse)]
    *_, fp32, int4, trained = quantization.quality_table({"steps": steps}, "bleu")
    assert trained.split(" | ")[:2] == ["| int2 trained", "2.74"]
    assert fp32.strip("| ").split(" | ") == ["fp32", "32", "6.54", "37.00 [35.00, 39.00]", "–"]
    assert int4.strip("| ").split(" | ") == [
        "int4 gptq", "4.25", "6.54", "37.00 [35.00, 39.00]", "-0.31 [-0.72, +0.24], p = 0.344",
    ]  # fmt: skip


def timed(speedup, ci, stable=True):
    row = {"batch_size": 8, "p50_ms": 12.345, "stable": stable, "speedup": speedup, "speedup_ci95": ci}
    return {"latency": [row]}


def test_times_are_told_within_one_runtime_and_say_where_they_were_disturbed():
    found = {
        "ONNX Runtime": {"fp32": timed(1.0, [1.0, 1.0]), "pow2": timed(2.0, [1.9, 2.1])},
        "torch": {"fp32": timed(1.0, [1.0, 1.0], stable=False)},
    }
    _, _, fp32, pow2 = quantization.latency_table(found)
    assert fp32 == "| fp32 |  | 12.3 ms |  |  | 12.3 ms (unstable) |  |"
    assert pow2 == "| pow2 |  | 12.3 ms, 2.00 [1.90, 2.10] |  |  |  |  |"


def test_each_runtime_is_timed_apart_and_only_what_is_there(tmp_path, monkeypatch):
    artifacts = tmp_path / "translation" / "artifacts"
    for name in ("model", "int8-dynamic", "fp32-ort-cpu", "pow2-ort-cpu", "fp32-openvino"):
        (artifacts / name).mkdir(parents=True)
    asked = []

    def bench(command, **_):
        names = [word.rpartition("/")[2] for word in command if str(artifacts) in word]
        asked.append(names)
        output = json.dumps({"artifacts": {name: timed(1.0, [1.0, 1.0]) for name in names}})
        return subprocess.CompletedProcess(command, 0, stdout=output)

    monkeypatch.setattr(subprocess, "run", bench)
    assert quantization.time_artifacts("translation", tmp_path) == 0
    assert asked == [["fp32-ort-cpu", "pow2-ort-cpu"], ["model", "int8-dynamic"]]
    found = json.loads((tmp_path / "translation" / "latency.json").read_text())
    assert {runtime: list(arms) for runtime, arms in found.items()} == {
        "ONNX Runtime": ["fp32", "pow2"], "torch": ["fp32", "int8-dynamic"],
    }  # fmt: skip
