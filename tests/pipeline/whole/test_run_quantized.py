"""A run in which training follows quantization: float weights are found and kept, the model stays small."""

import json

from smelt.core.artifact import MASTER_WEIGHTS_FILE
from tests.support import harness
from tests.support.models import tiny

RECIPE = """
model: m
task: translation
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}
stages:
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 0}
  - quantize: {scheme: binary, group_size: 32}
  - distill: {max_steps: 2, batch_size: 4, num_evals: 1, learning_rate: 1.0e-2}
  - finetune: {max_steps: 1, batch_size: 4, num_evals: 0}
    name: again
  - onnx: {target: ort-cpu}
score: {quality: [bleu], generation: {max_new_tokens: 4}, latency: false}
"""


def test_training_after_quantize_starts_from_master_weights(tmp_path):
    tiny.write_marian(tmp_path / "m")
    tiny.write_pairs(tmp_path / "data.jsonl", 8)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    result = harness.smelt("run", tmp_path / "recipe.yaml", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    details = {
        name: json.loads((tmp_path / "run" / "artifacts" / name / "manifest.json").read_text())["details"]
        for name in ("quantize", "distill", "again")
    }
    # the step above quantize, not the untouched model; afterwards what the training before kept
    assert details["distill"]["latent_weights"] == "finetune"
    assert details["again"]["latent_weights"] == "kept"
    assert 0 < details["distill"]["codes_changed"] < 1
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    steps = {step["name"]: step for step in report["steps"]}
    assert steps["distill"]["size_bytes"] == steps["quantize"]["size_bytes"]
    # counted as weights, not as the bytes that hold eight of them; what the scales add is small
    parameters = [steps[name]["parameters"] for name in ("finetune", "quantize", "distill")]
    assert parameters[1] == parameters[2]
    assert 1 <= parameters[1] / parameters[0] < 1.05
    artifacts = tmp_path / "run" / "artifacts"
    master_weights = {name: (artifacts / name / MASTER_WEIGHTS_FILE) for name in (*details, "onnx")}
    assert [name for name, path in master_weights.items() if path.exists()] == ["distill", "again"]
    assert (
        details["distill"]["latent_bytes"]
        == master_weights["distill"].stat().st_size
        > steps["distill"]["size_bytes"]
    )
    assert steps["again"]["size_bytes"] == steps["quantize"]["size_bytes"]

    master_weights["distill"].write_bytes(master_weights["distill"].read_bytes()[:-1])
    result = harness.smelt("run", tmp_path / "recipe.yaml", "--out", tmp_path / "run", "--until", "distill")
    assert result.exit_code == 1
    assert MASTER_WEIGHTS_FILE in result.output
    assert "--rebuild distill" in result.output
