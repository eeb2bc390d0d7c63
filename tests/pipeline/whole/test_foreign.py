"""A graph of somebody else, from the recipe to what people do with its artifact."""

import json
from pathlib import Path

import foreign_graphs as graphs
import forked_workers
import harness
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import smelt
from smelt import InputError
from smelt.plan.load import load_plan

RECIPE = """
model: m.onnx
task: tensors
data: {test: test.npz, calibration: calibration.npz}
stages: STAGES
score: {latency: LATENCY}
"""
QUICK = "{batch_sizes: [1], rounds: 3, texts: 2, min_round_ms: 1, seconds: 0.3}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a graph and rows for it."""
    monkeypatch.chdir(tmp_path)
    graphs.save(graphs.two_layers(), tmp_path / "m.onnx")
    graphs.rows(tmp_path / "test.npz", label=np.arange(40))
    graphs.rows(tmp_path / "calibration.npz", seed=2)
    return tmp_path


def recipe(folder: Path, stages: str = "[]", latency: str = "false", **changes: str) -> Path:
    text = RECIPE.replace("STAGES", stages).replace("LATENCY", latency)
    for old, new in changes.items():
        text = text.replace(old, new)
    (folder / "r.yaml").write_text(text)
    return folder / "r.yaml"


def test_an_untouched_graph_is_run_scored_timed_and_used(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked_workers.install(monkeypatch)
    done = harness.smelt("run", recipe(here, latency=QUICK), code=0)
    assert "smelt predict runs/r/artifacts/model --data FILE.npz" in done.output
    step = json.loads((here / "runs/r/report.json").read_text())["steps"][0]
    assert {name: s["value"] for name, s in step["quality"].items()} == {
        "agreement": 100, "top1": 100, "relative_error": 0,
    }  # fmt: skip
    assert (step["format"], step["parameters"], step["quality"]["top1"]["n"]) == ("onnx", 212, 40)
    assert step["latency"][0]["unit"] == "rows/s"
    assert any("no inputs of the graph: label" in w for w in json.loads(
        (here / "runs/r/report.json").read_text())["warnings"])  # fmt: skip

    place = "runs/r/artifacts/model"
    lines = harness.smelt("predict", place, "--data", "test.npz", code=0).output.splitlines()
    x = np.load("test.npz")["x"]
    with smelt.load(place) as model:
        found = model.run({"x": x})["logits"]
        np.testing.assert_allclose(found, [json.loads(line)["logits"] for line in lines], rtol=1e-6)
        np.testing.assert_allclose(model.run({"x": x}, batch_size=7)["logits"], found, rtol=1e-5)
        with pytest.raises(InputError, match="use run"):
            model.generate(["text"])
        with pytest.raises(InputError, match="no array 'x'"):
            model.run({"y": x})
        with pytest.raises(InputError, match="arrays by the names of the inputs"):
            model.run(x)  # type: ignore[arg-type]
    assert "n=40" in harness.smelt("eval", place, "--data", "test.npz", "--baseline", place, code=0).output
    assert "untouched graph" in harness.smelt("eval", place, "--data", "test.npz", code=2).output
    assert "cp -rL" in harness.smelt("package", place, code=2).output
    assert "give --data FILE.npz" in harness.smelt("predict", place, "text", code=2).output
    assert "FILE.npz" in harness.smelt("bench", place, code=2).output


def test_a_fixed_batch_is_kept_when_scoring_and_timing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked_workers.install(monkeypatch)
    graphs.save(graphs.two_layers(batch=4), here / "m.onnx")
    quick = QUICK.replace("batch_sizes: [1], ", "")
    harness.smelt("run", recipe(here, latency=quick), code=0)
    step = json.loads((here / "runs/r/report.json").read_text())["steps"][0]
    assert [row["batch_size"] for row in step["latency"]] == [4]
    assert "exactly 4 rows" in harness.smelt("plan", recipe(here, latency=QUICK), code=2).output


def test_init_writes_a_recipe_that_can_be_planned(here: Path) -> None:
    harness.smelt("init", "m.onnx", "--data", "test.npz", "--data", "calibration.npz", code=0)
    assert "m.yaml: tensors" in harness.smelt("plan", "m.yaml", code=0).output
    assert max(map(len, (here / "m.yaml").read_text().splitlines())) <= 88
    assert "this file exists" in harness.smelt("init", "m.onnx", code=2).output


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages: []": "stages: [prune: {keep: 0.5}]"}, "what can follow an ONNX model"),
        ({"task: tensors": "task: tensors\ntokenizer: there"}, "tokenizer: means nothing for task: tensors"),
        ({"test: test.npz": "test: m.onnx"}, "expected an .npz file"),
        ({"test: test.npz": "test: test.npz, columns: {text: x}"}, "found by the names of the inputs"),
        (
            {"model: m.onnx": "model: n.onnx"},
            "n.onnx: no such file; expected an ONNX model. Did you mean 'm.onnx'?",
        ),
    ],
)
def test_mistakes_of_recipes_are_said_with_their_line(here: Path, changes: dict[str, str], said: str) -> None:
    assert said in " ".join(harness.smelt("plan", recipe(here, **changes), code=2).output.split())


def test_all_mistakes_are_said_at_once(here: Path) -> None:
    graphs.save(graphs.circle(), here / "m.onnx")
    changes = {"test: test.npz": "test: gone.npz", "stages: []": "stages: [prune: {}]", "seed": "seed"}
    told = " ".join(harness.smelt("plan", recipe(here, **changes), code=2).output.split())
    for said in ("in a circle", "gone.npz: no such file", "what can follow an ONNX model"):
        assert said in told


def test_a_graph_that_asks_for_too_much_when_it_is_run_leaves_nothing(here: Path) -> None:
    graphs.save(graphs.bomb(), here / "m.onnx")
    assert "cannot run it on the first rows" in harness.smelt("run", recipe(here), code=2).output
    assert not list((here / "runs/.store/artifacts").glob("*"))


@pytest.mark.parametrize("kind", ["codes", "float16"])
def test_a_file_that_is_narrow_already_is_told_by_plan_and_init(here: Path, kind: str) -> None:
    harness.smelt("run", recipe(here, "[{quantize: {}}]" if kind == "codes" else "[{fp16: {}}]"), code=0)
    made = next((here / "runs/r/artifacts").glob("quantize*" if kind == "codes" else "fp16*"))
    (here / "m.onnx").write_bytes((made / "model.onnx").read_bytes())
    for stages in ("[{quantize: {}}]", "[simplify, {fp16: {}}]"):
        with pytest.raises(InputError) as raised:
            smelt.run(recipe(here, stages))
        assert raised.value.code == "already-narrow"
    harness.smelt("plan", recipe(here, "[simplify]"), code=0)
    harness.smelt("init", "m.onnx", "--data", "test.npz", "--data", "calibration.npz", code=0)
    assert "quantize" not in (here / "m.yaml").read_text().split("stages:")[1].split("score:")[0].replace(
        "nothing to quantize", ""
    )
    harness.smelt("plan", here / "m.yaml", code=0)


def test_a_file_of_float64_weights_is_scored_and_not_quantized(here: Path) -> None:
    model = graphs.two_layers()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
        )
    for found in (*model.graph.input, *model.graph.output):
        found.type.tensor_type.elem_type = TensorProto.DOUBLE
    graphs.save(model, here / "m.onnx")
    with pytest.raises(InputError) as raised:
        smelt.run(recipe(here, "[{quantize: {}}]"))
    assert raised.value.code == "already-narrow"
    harness.smelt("run", recipe(here, "[simplify]"), code=0)


def test_the_plan_names_nodes_that_draw_random_numbers(here: Path) -> None:
    model = graphs.two_layers()
    model.graph.node.append(helper.make_node("RandomNormalLike", ["logits"], ["noise"], "noisy"))
    model.graph.output.append(graphs.value("noise", ["N", 4]))
    graphs.save(model, here / "m.onnx")
    assert any("RandomNormalLike 'noisy'" in warning for warning in load_plan(recipe(here)).warnings)


def test_one_file_is_divided_into_what_is_calibrated_on_and_what_is_scored(here: Path) -> None:
    harness.smelt("init", "m.onnx", "--data", "test.npz", code=0)
    splits = load_plan(here / "m.yaml").splits
    assert {name: len(split) for name, split in splits.items()} == {"train": 8, "test": 32}
    parts = [split.arrays.values["x"] for split in splits.values() if split.arrays is not None]
    together = np.concatenate(parts)
    np.testing.assert_array_equal(np.sort(together, 0), np.sort(np.load("test.npz")["x"], 0))
