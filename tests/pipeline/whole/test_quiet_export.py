"""An export prints none of torch's warnings on the terminal.

In processes of their own: pytest catches warnings, and some are given once in a process.
"""

import subprocess
import sys
from pathlib import Path

import causal
import pytest
import tiny

RECIPE = """
model: model
task: {task}
data: {{test: {data}, validation: {data}}}
threads: 1
score: {{latency: false, generation: {{max_new_tokens: 4}}}}
stages:
  - onnx: {{target: ort-cpu}}
"""
MODELS = {
    "translation": (tiny.write_marian, lambda folder: tiny.write_pairs(folder / "data.jsonl"), "data.jsonl"),
    "language-modeling": (
        lambda folder: causal.write_model(folder, "llama"),
        lambda folder: causal.write_lines(folder / "data.txt", 1),
        "data.txt",
    ),
}


@pytest.mark.parametrize("task", MODELS)
def test_an_export_prints_no_warnings(task, tmp_path):
    make, write, data = MODELS[task]
    make(tmp_path / "model")
    write(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(task=task, data=data))
    smelt = Path(sys.executable).with_name("smelt")
    done = subprocess.run(
        [smelt, "run", "recipe.yaml", "--out", "run", "--store", "store"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/artifacts/onnx").exists()
    output = done.stdout + done.stderr
    for word in ("UserWarning", "FutureWarning", "DeprecationWarning", "TracerWarning", "nn_module_stack"):
        assert word not in output, output
