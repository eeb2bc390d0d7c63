"""The kinds of graphs that other tools write, from `smelt init` to what users do with the result."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import harness
from tests.support.graphs import foreign_kinds
from tests.support.processes import forked_workers

SCHEMES = {
    "lstm_in_if": "int8-dynamic",
    "gru": "int8-weight-only",  # ONNX Runtime has no integer GRU
    "weights_as_inputs": "int8-static",
    "fixed_batch": "int8-dynamic",
    "qdq": None,  # quantized already
    "float16": "int8-dynamic",
    "unrolled_recurrence": "int8-dynamic",
    "detector": "int8-dynamic",
    "external_data": "int8-dynamic",
    "different_axes": "int8-dynamic",
}


@pytest.mark.parametrize("kind", foreign_kinds.KINDS)
def test_init_recipe_of_graph_runs_and_gives_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    forked_workers.install(monkeypatch)
    foreign_kinds.write_kind(tmp_path, kind)
    harness.smelt("init", "model.onnx", "--data", "samples.npz", "--out", "r.yaml", code=0)
    scheme = SCHEMES[kind]
    steps = ["model", "simplify"] + ["int8"] * (scheme is not None)
    recipe = Path("r.yaml").read_text()
    assert f"quantize-onnx: {{scheme: {scheme}}}" in recipe or scheme is None
    harness.smelt("plan", "r.yaml", code=0)
    harness.smelt("run", "r.yaml", "--set", "score.latency=false", code=0)
    report = json.loads(Path("runs/r/report.json").read_text())
    agreement = {step["name"]: step["quality"]["agreement"]["value"] for step in report["steps"]}
    assert [*agreement] == steps
    assert agreement["model"] == 100
    # sizes of detections differ where a score crosses the threshold
    assert min(agreement.values()) > (50 if kind == "detector" else 97)
    artifact = f"runs/r/artifacts/{steps[-1]}"
    lines = harness.smelt("predict", artifact, "--data", "samples.npz", code=0).stdout.splitlines()
    assert len(lines) == foreign_kinds.COUNT
    assert all(np.size(values) for values in json.loads(lines[0]).values()) or kind == "detector"
    options = ("--rounds", "3", "--texts", "2", "--batch-size", "1")
    harness.smelt("bench", artifact, "--data", "samples.npz", *options, code=0)
