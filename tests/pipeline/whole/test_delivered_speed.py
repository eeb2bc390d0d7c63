"""The report's latency is what a user of `smelt.load` gets: a stopwatch measures the same.

Both sides are read in one interleaved run (benchmarks/stopwatch.py). On a machine that is busy the wall
clock wanders while processor time hardly does; so either may agree, and a bad moment is tried again.
"""

import json
import subprocess
import sys
from pathlib import Path

import causal
import pytest
import tiny

import smelt

STOPWATCH = Path(__file__).parents[3] / "benchmarks" / "stopwatch.py"
RECIPE = """
model: m
task: {task}
data: {{validation: {data}, test: {data}}}
stages: [onnx]
score: {{latency: false, generation: {{max_new_tokens: 6}}}}
"""


def _made(folder, task):
    """Return an ONNX artifact for `task`, and the file of its texts."""
    if task == "translation":
        tiny.write_marian(folder / "m")
        data = tiny.write_pairs(folder / "data.jsonl", 8)
    elif task == "text-classification":
        tiny.write_bert(folder / "m")
        data = tiny.write_labelled(folder / "data.jsonl", 8)
    else:
        causal.write_model(folder / "m", "gpt2")
        data = causal.write_lines(folder / "data.txt", 2)
    (folder / "recipe.yaml").write_text(RECIPE.format(task=task, data=data.name))
    result = smelt.run(folder / "recipe.yaml", out=folder / "run", quiet=True)
    assert result.exit_code == 0, result.report
    return result.artifact("onnx"), data


@pytest.mark.parametrize("task", ["translation", "text-classification", "language-modeling"])
def test_the_report_and_a_stopwatch_agree_within_a_tenth(tmp_path, task):
    artifact, data = _made(tmp_path, task)
    options = ["--texts", "4", "--rounds", "3", "--min-round-ms", "100", "--lengths", "8", "12", "--json"]
    for _ in range(4):
        command = [sys.executable, STOPWATCH, artifact, "--data", data, *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.stdout, done.stderr
        found = json.loads(done.stdout)
        assert min(found["stopwatch"].values()) > 0
        if done.returncode == 0:
            break
    ratios = found["ratio"]
    assert any(abs(ratio - 1) <= 0.1 for ratio in ratios.values()), found
    parts, p50 = found["report"]["parts"], found["report"]["p50_ms"]
    if task == "text-classification":
        whole = sum(parts.values())
    else:
        whole = parts["time_to_first_token_ms"] + parts["detokenizing_ms"]
        whole += parts["time_per_output_token_ms"] * parts["further_tokens"]
    assert whole == pytest.approx(p50, rel=0.05)
