"""A recurrent network of somebody else, whose state has its samples on axis 1, from the recipe to predict."""

import json
from pathlib import Path

import numpy as np
import pytest

import smelt
from smelt import InputError
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs
from tests.support.processes import forked_workers

NAMED = (["batch", "time", 4], ["layers", "batch", 8], ["layers", "batch", 8])
NAMELESS = ([None, None, 4], [1, None, 8], [1, None, 8])
RECIPE = """
model: m.onnx
task: custom
data: {test: test.npz, calibration: calibration.npzAXES}
stages: [simplify, {fp16: {}}]
score: {batch_size: 7, latency: LATENCY}
"""
QUICK = "{batch_sizes: [1, 3], rounds: 3, texts: 3, min_round_ms: 1, seconds: 0.3}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    graphs.gru_rows(tmp_path / "test.npz")
    graphs.gru_rows(tmp_path / "calibration.npz", 9, seed=2)
    return tmp_path


def recipe(axes: str = "", latency: str = "false") -> str:
    Path("r.yaml").write_text(RECIPE.replace("AXES", axes).replace("LATENCY", latency))
    return "r.yaml"


@pytest.mark.parametrize("shapes", [NAMED, NAMELESS], ids=["named", "nameless"])
def test_state_is_scored_timed_and_used_on_its_batch_axis(
    here: Path, shapes: tuple[list[object], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    forked_workers.install(monkeypatch)
    graphs.save_model(graphs.gru_model(*shapes), here / "m.onnx")
    axes = "" if shapes is NAMED else ", axes: {state: 1}"
    harness.smelt("run", recipe(axes, QUICK if shapes is NAMED else "false"), code=0)
    steps = json.loads((here / "runs/r/report.json").read_text())["steps"]
    assert [step["quality"]["agreement"]["n"] for step in steps] == [40, 40, 40]
    assert all(step["quality"]["agreement"]["value"] > 99.9 for step in steps)
    if shapes is NAMED:
        assert {row["batch_size"] for row in steps[0]["latency"]} == {1, 3}
    artifact_path = "runs/r/artifacts/model"
    harness.smelt("predict", artifact_path, "--data", "test.npz", "--out", "p.npz", code=0)
    with np.load("test.npz") as fed, np.load("p.npz") as predicted, smelt.load(artifact_path) as model:
        expected = graphs.run_directly(Path(artifact_path, "model.onnx"), fed)
        for outputs in (predicted, model.run(dict(fed), batch_size=11)):
            for name, value in expected.items():
                np.testing.assert_allclose(outputs[name], value, atol=1e-5)
    assert (
        "error[out-exists]"
        in harness.smelt("predict", artifact_path, "--data", "test.npz", "--out", "p.npz", code=2).output
    )
    harness.smelt("eval", artifact_path, "--data", "test.npz", "--baseline", artifact_path, code=0)


def test_unclear_or_wrong_axes_are_rejected_by_plan(here: Path) -> None:
    graphs.save_model(graphs.gru_model([None, None, 4], [2, None, 8], [2, None, 8]), here / "m.onnx")
    with pytest.raises(InputError) as raised:
        load_plan(recipe())
    assert raised.value.code == "unclear-axes"
    graphs.save_model(graphs.gru_model(*NAMELESS), here / "m.onnx")
    for axes, expected in (
        (", axes: {stat: 1}", "Did you mean 'state'"),
        (", axes: {state: 3}", "its axes are 0 to 2"),
        (", axes: {state: -1}", "data.axes.state"),
        ("", "data: {axes: {state: 1}}"),  # by the sizes of the arrays
    ):
        assert expected in " ".join(harness.smelt("plan", recipe(axes), code=2).output.split())


def test_init_infers_batch_axis_from_array_sizes(here: Path) -> None:
    graphs.save_model(graphs.gru_model(*NAMELESS), here / "m.onnx")
    harness.smelt("init", "m.onnx", "--data", "test.npz", "--data", "calibration.npz", code=0)
    assert load_plan("m.yaml").recipe.data.axes == {"x": 0, "state": 1}


def test_constant_array_has_no_batch_axis(here: Path) -> None:
    model = graphs.two_layer_classifier()
    model.graph.initializer.remove(next(t for t in model.graph.initializer if t.name == "w2"))
    model.graph.input.append(graphs.value_info("w2", [16, 4]))
    graphs.save_model(model, here / "m.onnx")
    weights = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    for name in ("test", "calibration"):
        graphs.write_rows(here / f"{name}.npz", 10, w2=weights)
    assert "w2" in harness.smelt("plan", recipe(), code=2).output
    harness.smelt("run", recipe(", axes: {w2: null}"), code=0)
    with np.load("test.npz") as fed, smelt.load("runs/r/artifacts/model") as model:
        logits = model.run(dict(fed), batch_size=3)["logits"]
        expected = graphs.run_directly(Path("runs/r/artifacts/model/model.onnx"), fed)["logits"]
        np.testing.assert_allclose(logits, expected, rtol=1e-5)
