"""Which metrics a third-party graph is scored by."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from smelt import InputError
from smelt.core.messages import message_codes
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.plan.warnings import data_warnings
from tests.support import harness
from tests.support.expected_errors import command_error, raises_code
from tests.support.graphs import imported_graphs as graphs

RECIPE = """
model: m.onnx
task: custom
data: {test: test.npz}
stages: []
score: {latency: false}
"""
HEAT_MAP = [helper.make_node("Conv", ["x", "w"], ["map"], pads=[1, 1, 1, 1])]
POOLED = [
    helper.make_node("GlobalAveragePool", ["map"], ["pooled"]),
    helper.make_node("Flatten", ["pooled"], ["y"]),
]
SHAPES: dict[str, list[Any]] = {"map": ["N", 5, 8, 8], "y": ["N", 5]}


def write_recipe(folder: Path, outputs: list[str], more: str = "") -> Path:
    """Write a recipe of a graph: a convolution, whose map or mean over the map is an output."""
    weight = numpy_helper.from_array(np.ones((5, 3, 3, 3), np.float32), "w")
    output_infos = [graphs.value_info(name, SHAPES[name]) for name in outputs]
    nodes = [*HEAT_MAP, *(POOLED if "y" in outputs else [])]
    model = graphs.make_model(nodes, [graphs.value_info("x", ["N", 3, 8, 8])], output_infos, [weight])
    graphs.save_model(model, folder / "m.onnx")
    np.savez(folder / "test.npz", x=np.zeros((8, 3, 8, 8), np.float32))
    (folder / "r.yaml").write_text(RECIPE.replace("latency: false", f"latency: false{more}"))
    return folder / "r.yaml"


@pytest.mark.parametrize(("outputs", "metrics"), [
    (["y"], ("top1", "agreement", "relative_error")), (["map"], ("agreement", "relative_error")),
    (["map", "y"], ("agreement", "top1", "relative_error")),
])  # fmt: skip
def test_top1_is_scored_only_for_graphs_with_class_outputs(
    tmp_path: Path, outputs: list[str], metrics: tuple[str, ...]
) -> None:
    """The verdict judges by the first metric: that of a classifier is its decisions."""
    assert load_plan(write_recipe(tmp_path, outputs)).recipe.score.quality == metrics


def test_listed_metrics_keep_their_order(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, ["y"], ", quality: [agreement, top1]")
    assert load_plan(recipe).recipe.score.quality == ("agreement", "top1")


@pytest.mark.parametrize("more", [", quality: [agreement, top1]", "}\ngates: {top1: {min: 99}"])
def test_top1_of_heat_map_is_rejected(tmp_path: Path, more: str) -> None:
    with raises_code("does-not-fit-model", InputError):
        load_plan(write_recipe(tmp_path, ["map"], more))


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of a classifier, whose samples have gold labels `label`, and a module of metrics."""
    monkeypatch.chdir(tmp_path)
    graphs.save_model(graphs.two_layer_classifier(), tmp_path / "m.onnx")
    graphs.write_rows(tmp_path / "test.npz", label=np.arange(40) % 4)
    (tmp_path / "own.py").write_text(
        "def accuracy(predictions, references, sources):\n"
        "    assert {*sources[0]} == {'x', 'label'} and {*references[0]} == {'logits'}\n"
        "    return [p['logits'].argmax() == s['label'] for p, s in zip(predictions, sources)]\n"
    )
    return tmp_path / "r.yaml"


def test_function_of_user_reads_outputs_and_labels_of_data(classifier: Path) -> None:
    quality = ", quality: [own:accuracy, {allclose: {rtol: 0}}, {top1: {axes: {logits: -1}}}]"
    classifier.write_text(RECIPE.replace("latency: false", f"latency: false{quality}"))
    plan = load_plan(classifier)
    assert "unread-arrays" not in {message.code for message in plan.warnings}
    assert plan.recipe.data.axes == {"x": 0, "label": 0}
    harness.smelt("run", classifier, code=0)
    [step] = json.loads(Path("runs/r/report.json").read_text())["steps"]
    with np.load("test.npz") as arrays:
        logits = graphs.run_directly(Path("m.onnx"), {"x": arrays["x"]})["logits"]
        accuracy = (logits.argmax(1) == arrays["label"]).mean()
    values = {name: score["value"] for name, score in step["quality"].items()}
    assert values == pytest.approx({"own:accuracy": accuracy, "allclose": 100, "top1": 100})


def test_array_of_another_length_is_ignored(classifier: Path) -> None:
    with np.load("test.npz") as arrays:
        np.savez("test.npz", **arrays, anchors=np.zeros((3, 4)))
    classifier.write_text(RECIPE.replace("latency: false", "latency: false, quality: ['own:accuracy']"))
    harness.smelt("run", classifier, code=0)  # the function requires exactly `x` and `label`


@pytest.mark.parametrize(("metric", "code"), [
    ("{top1: {axes: {logit: -1}}}", "unknown-output"), ("{top1: {axes: {logits: -2}}}", "wrong-axis"),
    ("{allclose: {outputs: {y: {rtol: 0.1}}}}", "unknown-output"),
    ("{detection_ap: {boxes: logits, scores: score}}", "unknown-output"),
    ("{detection_ap: {boxes: logits, scores: logits, true_boxes: gold}}", "does-not-fit-graph"),
])  # fmt: skip
def test_setting_of_metric_that_graph_or_data_lack_is_refused(
    classifier: Path, metric: str, code: str
) -> None:
    classifier.write_text(RECIPE.replace("latency: false", f"latency: false, quality: [{metric}]"))
    with raises_code(code, InputError):
        load_plan(classifier)


def test_labels_of_divided_file_reach_function_of_user(classifier: Path) -> None:
    text = RECIPE.replace("{test: test.npz}", "{train: test.npz, split: {test: 0.8}}")
    classifier.write_text(text.replace("latency: false", "latency: false, quality: [own:accuracy]"))
    assert load_plan(classifier).recipe.data.axes == {"x": 0, "label": 0}
    harness.smelt("run", classifier, code=0)
    [step] = json.loads(Path("runs/r/report.json").read_text())["steps"]
    assert step["quality"]["own:accuracy"]["n"] == 32


@pytest.mark.parametrize("as_calls", [False, True])
def test_duplicates_between_splits_with_other_labels_warn(classifier: Path, as_calls: bool) -> None:
    with np.load("test.npz") as arrays:
        x, label = arrays["x"], arrays["label"]
    splits = {
        "test": {"x": x, "label": label},
        "calibration": {"x": x[:5]},
        "validation": {"x": x, "label": -label},
    }
    suffix = "" if as_calls else ".npz"
    for name, split in splits.items():
        np.savez(f"{name}.npz", **split)
        Path(name).mkdir()
        for index in range(5):
            call = {key: value[index : index + 1] for key, value in split.items()}
            np.savez(f"{name}/{index}.npz", **call)
    for name in ("calibration", "validation"):
        data = f"{{test: test{suffix}, {name}: {name}{suffix}}}"
        text = RECIPE.replace("{test: test.npz}", data).replace(
            "[]", "[quantize-onnx: {scheme: int8-static}]"
        )
        classifier.write_text(text.replace("latency: false", "latency: false, quality: ['own:accuracy']"))
        plan = load_plan(classifier)
        warnings = data_warnings(plan.recipe, False, plan.read_data())
        assert "test-rows-in-other-split" in message_codes(warnings)


def test_function_of_user_leaves_axes_of_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graphs.save_model(graphs.gru_model([None, None, 4], [1, None, 8], [1, None, 8]), tmp_path / "m.onnx")
    graphs.gru_rows(tmp_path / "test.npz", count=8)
    Path("own.py").write_text("def zero(predictions, references, sources):\n    return 0.0\n")
    text = RECIPE.replace("test.npz}", "test.npz, axes: {state: 1, new_state: 1}}")
    Path("r.yaml").write_text(text.replace("latency: false", "latency: false, quality: ['own:zero']"))
    assert load_plan(tmp_path / "r.yaml").recipe.data.axes == {"x": 0, "state": 1}


def test_axis_of_array_for_function_of_user(classifier: Path) -> None:
    with np.load("test.npz") as arrays:
        np.savez("test.npz", x=arrays["x"], label=np.arange(4)[None])
    text = RECIPE.replace("latency: false", "latency: false, quality: ['own:accuracy']")
    classifier.write_text(text)
    plan = load_plan(classifier)
    assert plan.recipe.data.axes == {"x": 0}  # no array of another length is read unless the recipe lists it
    assert "unread-arrays" in {message.code for message in plan.warnings}
    classifier.write_text(text.replace("test.npz}", "test.npz, axes: {label: null}}"))
    assert load_plan(classifier).recipe.data.axes == {"x": 0, "label": None}


def test_eval_scores_as_the_recipe_with_tolerances_and_function_of_user(classifier: Path) -> None:
    entries = ["own:accuracy", "allclose: {rtol: 0, outputs: {logits: {atol: 0.5}}}"]
    quality = ", ".join(f"{{{entry}}}" if ": " in entry else f"'{entry}'" for entry in entries)
    text = RECIPE.replace("latency: false", f"latency: false, quality: [{quality}]")
    stages = "stages: [{quantize-onnx: {scheme: int8-weight-only, max_difference: 1}}]"
    classifier.write_text(text.replace("stages: []", stages))
    harness.smelt("run", classifier, code=0)
    artifacts = Path("runs/r/artifacts")
    metrics = [option for entry in entries for option in ("--metric", entry)]
    result = harness.smelt(
        *("eval", artifacts / "quantize-onnx", "--data", "test.npz", "--baseline", artifacts / "model"),
        *(*metrics, "--json"),
        code=0,
    )
    step = json.loads(Path("runs/r/report.json").read_text())["steps"][-1]
    assert json.loads(result.stdout) == step["quality"]


@pytest.mark.parametrize(("metric", "code"), [
    ("allclose: {rtool: 0}", "unknown-setting"), ("allclose: {rtol: x}", "wrong-value"),
    ("allclose: {outputs: {y: {rtol: 0.1}}}", "unknown-output"), ("allclose: {", "invalid-yaml"),
    ("allclose: {atol: 1, atol: 2}", "duplicate-key"),
    ("detection_ap", "missing-setting"), ("own:absent", "no-such-function"), ("[1]", "unknown-metric"),
    ("detection_ap: {boxes: logits, scores: logits, true_boxes: gold}", "does-not-fit-graph"),
])  # fmt: skip
def test_eval_refuses_metric_that_a_recipe_refuses(classifier: Path, metric: str, code: str) -> None:
    classifier.write_text(RECIPE)
    harness.smelt("run", classifier, code=0)
    model = Path("runs/r/artifacts/model")
    arguments = ("eval", model, "--data", "test.npz", "--baseline", model, "--metric", metric)
    assert command_error(harness.smelt(*arguments, code=2)).code == code
