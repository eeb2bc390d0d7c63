"""Samples of different shapes: each file of a folder is the inputs of a whole call."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import smelt
from smelt import InputError
from smelt.data.npz_arrays import read_samples
from smelt.pipeline.plan.load_plan import load_plan
from smelt.runtimes.onnx_import.signature import read_signature
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs
from tests.support.processes import forked_workers

QUICK = "{batch_sizes: [1], rounds: 3, texts: 3, min_round_ms: 1, seconds: 0.3}"


def graph_network() -> Any:
    """Return nodes float32 [n, 4], edges int64 [2, e] -> scores [3], a mean over the edges."""
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(random.normal(size=(4, 16)).astype(np.float32), "w1"),
        numpy_helper.from_array(random.normal(size=(16, 3)).astype(np.float32), "w2"),
        numpy_helper.from_array(np.array(0), "zero"),
    ]
    nodes = [
        helper.make_node("Gather", ["edges", "zero"], ["first"]),
        helper.make_node("Gather", ["nodes", "first"], ["messages"]),
        helper.make_node("MatMul", ["messages", "w1"], ["h0"]),
        helper.make_node("Relu", ["h0"], ["h"]),
        helper.make_node("ReduceMean", ["h"], ["mean"], axes=[0], keepdims=0),
        helper.make_node("MatMul", ["mean", "w2"], ["scores"]),
    ]
    inputs = [
        graphs.value_info("nodes", ["n", 4]),
        graphs.value_info("edges", [2, "e"], TensorProto.INT64),
    ]
    return graphs.make_model(nodes, inputs, [graphs.value_info("scores", [3])], weights)


def write_calls(folder: Path, count: int, seed: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    calls = []
    for index in range(count):
        size = int(random.integers(2, 9))
        calls.append(
            {
                "nodes": random.normal(size=(size, 4)).astype(np.float32),
                "edges": random.integers(0, size, (2, size + 3)),
            }
        )
        np.savez(folder / f"graph{index:03}.npz", **calls[-1])
    return calls


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """The test samples; the current folder has a graph and folders of samples."""
    monkeypatch.chdir(tmp_path)
    onnx.save(graph_network(), "m.onnx")
    write_calls(tmp_path / "data/calibration", 8, seed=1)
    return write_calls(tmp_path / "data/test", 12, seed=2)


def test_samples_of_different_shapes_go_from_init_to_predictions(
    calls: list[dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forked_workers.install(monkeypatch)
    harness.smelt("init", "m.onnx", "--data", "data", "--out", "m.yaml", code=0)
    text = Path("m.yaml").read_text()
    assert "test: data/test" in text
    assert "calibration: data/calibration" in text
    assert "name: int8" in text
    Path("m.yaml").write_text(text.replace("{batch_sizes: [1]}", QUICK))
    harness.smelt("run", "m.yaml", code=0)
    report = json.loads(Path("runs/m/report.json").read_text())
    assert {step["name"]: step["quality"]["agreement"]["n"] for step in report["steps"]} == {
        "model": 12, "simplify": 12, "int8": 12,
    }  # fmt: skip
    assert all(step["latency"][0]["batch_size"] == 1 for step in report["steps"])
    artifact = Path("runs/m/artifacts/model")
    signature = read_signature(artifact)
    assert {value.axis for value in (*signature.inputs, *signature.outputs)} == {None}

    session = onnxruntime.InferenceSession(artifact / "model.onnx")
    expected = [session.run(["scores"], call)[0] for call in calls]
    lines = harness.smelt("predict", artifact, "--data", "data/test", code=0).stdout.splitlines()
    np.testing.assert_allclose([json.loads(line)["scores"] for line in lines], expected, rtol=1e-5)
    harness.smelt("predict", artifact, "--data", "data/test", "--out", "outputs", code=0)
    assert [path.name for path in sorted(Path("outputs").iterdir())] == [
        f"graph{i:03}.npz" for i in range(12)
    ]
    with np.load("outputs/graph003.npz") as arrays:
        np.testing.assert_allclose(arrays["scores"], expected[3], rtol=1e-5)
    one = harness.smelt("predict", artifact, "--data", "data/test/graph003.npz", code=0).stdout
    np.testing.assert_allclose(json.loads(one)["scores"], expected[3], rtol=1e-5)
    model = smelt.load(artifact)
    np.testing.assert_allclose(model.run(calls[5])["scores"], expected[5], rtol=1e-5)
    bench = ("--data", "data/test", "--rounds", "3", "--texts", "2", "--json")
    timed = json.loads(harness.smelt("bench", artifact, *bench, code=0).stdout)
    assert timed["settings"]["batch_sizes"] == [1]
    scores = harness.smelt(
        "eval", artifact, "--data", "data/test", "--baseline", "runs/m/artifacts/int8", code=0
    )
    assert "agreement" in scores.stdout


def test_single_folder_is_divided_into_test_and_calibration(calls: Any) -> None:
    harness.smelt("init", "m.onnx", "--data", "data/test", "--out", "m.yaml", code=0)
    plan = load_plan(Path("m.yaml"))
    assert plan.recipe.score.batch_size == 1
    assert plan.recipe.score.latency.batch_sizes == (1,)


RECIPE = """
model: m.onnx
task: custom
data: {test: data/test, calibration: data/calibration}
stages: []
score: {latency: false}
"""


@pytest.mark.parametrize(("old", "new", "code"), [
    ("latency: false", "latency: false, batch_size: 8", "fixed-batch-size"),
    ("latency: false", "latency: {batch_sizes: [1, 8]}", "fixed-batch-size"),
    ("data/calibration}", "data/calibration, axes: {nodes: 0}}", "settings-conflict"),
    ("data/calibration}", "empty}", "empty-data"),
    ("data/calibration}", "data/calibration/graph000.npz}", "mixed-samples"),
])  # fmt: skip
def test_settings_that_need_batches_are_refused(calls: Any, old: str, new: str, code: str) -> None:
    Path("empty").mkdir()
    Path("r.yaml").write_text(RECIPE.replace(old, new))
    with raises_code(code, InputError):
        load_plan(Path("r.yaml"))


def test_file_that_does_not_match_is_named(calls: Any) -> None:
    np.savez("data/test/graph007.npz", nodes=np.zeros((2, 5), np.float32), edges=np.zeros((2, 1), np.int64))
    Path("r.yaml").write_text(RECIPE)
    with raises_code("does-not-fit-graph", InputError) as caught:
        load_plan(Path("r.yaml"))
    assert "data/test/graph007.npz" in str(caught.value)


def test_fingerprint_depends_on_content_and_order_not_on_names(calls: Any, tmp_path: Path) -> None:
    samples = read_samples(tmp_path / "data/test")
    assert samples.select(range(12)).fingerprint == samples.fingerprint
    assert samples.select(range(11, -1, -1)).fingerprint != samples.fingerprint
    assert len({*samples.sample_hashes}) == 12
