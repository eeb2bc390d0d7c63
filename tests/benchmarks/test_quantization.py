"""quantization.py: its recipes are ones that the plan accepts, and its table says what a report says."""

import benches  # noqa: F401 -- before what lies in benchmarks
import pytest
import quantization
import yaml

from smelt.recipe.recipe import read_recipe

ARMS = quantization.chosen(None)


@pytest.mark.parametrize("task", quantization.TASKS)
def test_every_arm_is_a_branch_of_a_recipe(task, tmp_path):
    written = tmp_path / "recipe.yaml"
    written.write_text(yaml.safe_dump(quantization.recipe_of(task, tmp_path, ARMS, 7)))
    recipe = read_recipe(written)
    names = [stage.name for stage in recipe.stages]
    assert {f"{quantization.step_of(arm)}-ort-cpu" for arm in ("fp32", *ARMS)} <= set(names)
    assert recipe.baseline == "fp32-ort-cpu"


def test_arms_are_chosen_by_patterns():
    assert quantization.chosen(["int3 *", "binary trained"]) == [
        *(f"int3 {method}" for method in ("nearest", "gptq", "awq", "hqq")),
        "int3 trained",
        "binary trained",
    ]


def test_trained_arms_start_at_codes_and_their_control_at_the_model():
    training = {"max_steps": 7}
    codes, distill = quantization.stages_of("int2 trained", training)
    assert (codes["quantize"]["scheme"], codes["from"]) == ("int2", "model")
    (control,) = quantization.stages_of("fp32 trained", training)
    assert control["from"] == "model"
    assert control["distill"] == distill["distill"]


def step(name, bits, speedup, ci, against=None):
    quality = {"bleu": {"value": 37.0, "ci95": [35.0, 39.0]}}
    latency = [{"batch_size": 1, "speedup": speedup, "speedup_ci95": ci}]
    facts = {"bits_per_weight": bits} if bits else {}
    return {
        "name": name, "status": "done", "facts": facts, "size_bytes": 6_540_000, "quality": quality,
        "latency": latency, "against_baseline": against,
    }  # fmt: skip


def test_speed_is_told_within_one_runtime():
    worse = {"bleu": {"difference": -0.31, "ci95": [-0.72, 0.24], "p_value": 0.344}}
    report = {
        "steps": [
            step("model", None, 0.5, [0.4, 0.6]),
            step("fp32-ort-cpu", None, 1.0, [1.0, 1.0]),
            step("int4-gptq", 4.25, 0.25, [0.2, 0.3], worse),
            step("int4-gptq-ort-cpu", None, 2.0, [1.9, 2.1], worse),
        ]
    }
    *_, fp32, int4 = quantization.table(report, "bleu")
    assert fp32.split(" | ")[1:6] == ["32", "6.54", "37.00 [35.00, 39.00]", "–", "1.00 [1.00, 1.00]"]
    cells = int4.strip("| ").split(" | ")
    assert cells[:6] == [
        "int4 gptq", "4.25", "6.54", "37.00 [35.00, 39.00]", "-0.31 [-0.72, +0.24], p = 0.344",
        "2.00 [1.90, 2.10]",
    ]  # fmt: skip
    # torch: 0.25 of the baseline's speed beside the 0.5 of the model in torch
    assert cells[8] == "0.50"
