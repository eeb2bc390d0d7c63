"""OPT through the command line: configs that no published model but one has, and what transformers opens."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import smelt
from smelt.core.files import read_json_object
from smelt.models.checkpoint import load_model
from tests.support import harness
from tests.support.models import causal, every_family
from tests.support.standins.invalid_recipes import assert_refused

HEAD = """model: m
task: language-modeling
data: {train: t.txt, validation: t.txt, test: t.txt, windows: {length: 32}}
"""
SCORE = "threads: 1\nscore: {latency: false, generation: {max_new_tokens: 6}}\n"
STAGES = """stages:
  - prune: {targets: [heads, ffn], keep_ratio: 0.5, calibration_samples: 4}
  - prune: {targets: [width], keep_ratio: 0.75, calibration_samples: 4}
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 1, precision: fp32}
  - quantize: {scheme: int8-dynamic}
  - onnx: {target: ort-cpu}
"""
WITHOUT = {"enable_bias": False, "activation_function": "gelu", "_remove_final_layer_norm": True}


@pytest.fixture
def home(tmp_path):
    causal.write_lines(tmp_path / "t.txt", 2)
    return tmp_path


@pytest.mark.parametrize("command", ["plan", "run"])
def test_embedding_width_different_from_hidden_size_is_rejected(home, command):
    every_family.write_model(home / "m", "opt")
    path = home / "m" / "config.json"
    path.write_text(json.dumps(read_json_object(path) | {"word_embed_proj_dim": 32}))
    error = assert_refused(home, HEAD + STAGES + SCORE, "unsupported-config", command=command)
    assert all(
        value in str(error) for value in (f"{path}: ", "word_embed_proj_dim is 32", "hidden_size is 64")
    )


def test_opt_without_optional_parts_passes_all_stages(home):
    every_family.write_model(home / "m", "opt", **WITHOUT)
    content = read_json_object(home / "m" / "config.json")
    assert content | WITHOUT == content
    (home / "recipe.yaml").write_text(HEAD + STAGES + SCORE)
    steps = smelt.run(home / "recipe.yaml", out=home / "run").report["steps"]
    assert [step["status"] for step in steps] == ["done"] * len(steps), [s["error"] for s in steps]
    # random states that nothing norms make losses of 100 a token
    parent, graph = (math.log(step["quality"]["perplexity"]["value"]) for step in steps[-2:])
    assert graph == pytest.approx(parent, rel=0.01)


def test_transformers_loads_trained_and_pruned_opt(home):
    every_family.write_model(home / "m", "opt")
    stages = (
        "stages:\n  - prune: {targets: [ffn], keep_ratio: 0.5, calibration_samples: 4}\n"
        "  - finetune: {max_steps: 2, batch_size: 4}\n"
    )
    (home / "recipe.yaml").write_text(HEAD + stages + SCORE)
    step = smelt.run(home / "recipe.yaml", out=home / "run").report["steps"][-1]
    folder = home / "run" / step["artifact"]
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert reference.config.ffn_dim == 48
    assert reference.lm_head.weight is reference.model.decoder.embed_tokens.weight
    torch.testing.assert_close(harness.logits(reference), harness.logits(load_model(folder)[0]))
