"""An export prints none of torch's warnings on the terminal.

In processes of their own: pytest catches warnings, and some are given once in a process.
"""

import subprocess
import sys
from pathlib import Path

import tiny

RECIPE = """
model: model
task: translation
data: {test: data.jsonl, validation: data.jsonl}
threads: 1
score: {latency: false, generation: {max_new_tokens: 4}}
stages:
  - onnx: {target: ort-cpu}
"""


def test_an_export_prints_no_warnings(tmp_path):
    tiny.write_marian(tmp_path / "model")
    tiny.write_pairs(tmp_path / "data.jsonl")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
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
