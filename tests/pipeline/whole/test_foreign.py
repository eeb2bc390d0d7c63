"""A graph of somebody else, from the recipe to what people do with its artifact."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import smelt
from smelt import InputError
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import command_error, raises_code
from tests.support.graphs import imported_graphs as graphs
from tests.support.processes import forked_workers

RECIPE = """
model: m.onnx
task: custom
data: {test: test.npz, calibration: calibration.npz}
stages: STAGES
score: {latency: LATENCY}
"""
QUICK = "{batch_sizes: [1], rounds: 3, texts: 2, min_round_ms: 1, seconds: 0.3}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a graph and rows for it."""
    monkeypatch.chdir(tmp_path)
    graphs.save_model(graphs.two_layer_classifier(), tmp_path / "m.onnx")
    graphs.write_rows(tmp_path / "test.npz", label=np.arange(40))
    graphs.write_rows(tmp_path / "calibration.npz", seed=2)
    return tmp_path


def recipe(folder: Path, stages: str = "[]", latency: str = "false", **changes: str) -> Path:
    text = RECIPE.replace("STAGES", stages).replace("LATENCY", latency)
    for old, new in changes.items():
        text = text.replace(old, new)
    (folder / "r.yaml").write_text(text)
    return folder / "r.yaml"


def test_imported_graph_is_run_scored_timed_and_packaged(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked_workers.install(monkeypatch)
    done = harness.smelt("run", recipe(here, latency=QUICK), code=0)
    assert "runs/r/report.html" in done.output
    report = json.loads((here / "runs/r/report.json").read_text())
    assert report["verdict"]["reason"] == "no-deployable-step"  # there is nothing but the baseline
    step = report["steps"][0]
    assert {name: s["value"] for name, s in step["quality"].items()} == {
        "agreement": 100, "top1": 100, "relative_error": 0,
    }  # fmt: skip
    assert (step["format"], step["parameters"], step["quality"]["top1"]["n"]) == ("onnx", 212, 40)
    assert step["latency"][0]["unit"] == "rows/s"
    warned = json.loads((here / "runs/r/report.json").read_text())["warnings"]
    [unread] = [message["message"] for message in warned if message["code"] == "unread-arrays"]
    assert "label" in unread

    artifact_path = "runs/r/artifacts/model"
    lines = harness.smelt("predict", artifact_path, "--data", "test.npz", code=0).output.splitlines()
    x = np.load("test.npz")["x"]
    with smelt.load(artifact_path) as model:
        logits = model.run({"x": x})["logits"]
        np.testing.assert_allclose(logits, [json.loads(line)["logits"] for line in lines], rtol=1e-6)
        np.testing.assert_allclose(model.run({"x": x}, batch_size=7)["logits"], logits, rtol=1e-5)
        with raises_code("does-not-fit-task", InputError):
            model.generate(["text"])
        with raises_code("does-not-fit-graph", InputError) as excinfo:
            model.run({"y": x})
        assert "'x'" in str(excinfo.value)
        with raises_code("wrong-value", InputError):
            model.run(x)  # type: ignore[arg-type]
    assert (
        "n=40"
        in harness.smelt(
            "eval", artifact_path, "--data", "test.npz", "--baseline", artifact_path, code=0
        ).output
    )
    for arguments, code, fragment in (
        (("eval", artifact_path, "--data", "test.npz"), "missing-baseline", "--baseline"),
        (("package", artifact_path), "nothing-to-do", "cp -rL"),
        (("predict", artifact_path, "text"), "missing-data", "--data FILE.npz"),
        (("bench", artifact_path), "missing-data", "FILE.npz"),
    ):
        error = command_error(harness.smelt(*arguments, code=2))
        assert (error.code, fragment in str(error)) == (code, True)


def test_fixed_batch_is_used_for_scoring_and_timing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked_workers.install(monkeypatch)
    graphs.save_model(graphs.two_layer_classifier(batch=4), here / "m.onnx")
    quick = QUICK.replace("batch_sizes: [1], ", "")
    harness.smelt("run", recipe(here, latency=quick), code=0)
    step = json.loads((here / "runs/r/report.json").read_text())["steps"][0]
    assert [row["batch_size"] for row in step["latency"]] == [4]
    error = command_error(harness.smelt("plan", recipe(here, latency=QUICK), code=2))
    assert (error.code, bool(re.search(r"\b4\b", error.messages[0].message))) == ("fixed-batch-size", True)


def test_init_recipe_can_be_planned(here: Path) -> None:
    harness.smelt("init", "m.onnx", "--data", "test.npz", "--data", "calibration.npz", code=0)
    assert "m.yaml: custom" in harness.smelt("plan", "m.yaml", code=0).output
    assert max(map(len, (here / "m.yaml").read_text().splitlines())) <= 88
    assert "m.yaml" in str(harness.smelt("init", "m.onnx", code=2).error)


@pytest.mark.parametrize(("changes", "code", "setting", "named"), [
    ({"stages: []": "stages: [prune: {keep_ratio: 0.5}]"}, "wrong-model-format", "stages[0].prune", ()),
    ({"task: custom": "task: custom\ntokenizer: there"}, "does-not-fit-task", "tokenizer", ("custom",)),
    ({"test: test.npz": "test: m.onnx"}, "wrong-format", "data.test", (".npz",)),
    ({"test: test.npz": "test: test.npz, columns: {text: x}"}, "does-not-fit-task", "data.columns", ()),
    ({"model: m.onnx": "model: n.onnx"}, "missing-file", "model", ("n.onnx", "'m.onnx'?")),
])  # fmt: skip
def test_recipe_errors_have_lines(
    here: Path, changes: dict[str, str], code: str, setting: str, named: tuple[str, ...]
) -> None:
    with raises_code(code, InputError) as excinfo:
        load_plan(recipe(here, **changes))
    [message] = excinfo.value.messages
    assert message.setting == setting
    assert message.line is not None
    assert [value for value in named if value not in message.message] == []


def test_all_errors_are_reported_together(here: Path) -> None:
    graphs.save_model(graphs.cyclic_model(), here / "m.onnx")
    changes = {"test: test.npz": "test: gone.npz", "stages: []": "stages: [prune: {}]", "seed": "seed"}
    error = command_error(harness.smelt("plan", recipe(here, **changes), code=2))
    assert {(message.code, message.setting) for message in error.messages} >= {
        ("unsupported-graph", "model"),
        ("wrong-model-format", "stages[0].prune"),
    }


def test_missing_input_in_file_is_one_error(here: Path) -> None:
    np.savez("test.npz", wrong=np.ones((4, 8), np.float32))
    (here / "r.yaml").write_text(RECIPE.replace("STAGES", "[simplify: {}]").replace("LATENCY", "false"))
    with pytest.raises(InputError) as refused:
        load_plan(here / "r.yaml")
    assert str(refused.value).count("data.test") == 1


def test_graph_exceeding_memory_at_run_leaves_no_artifact(here: Path) -> None:
    graphs.save_model(graphs.huge_constant_model(), here / "m.onnx")
    assert isinstance(harness.smelt("run", recipe(here), code=2).error, InputError)
    assert not list((here / "runs/.store/artifacts").glob("*"))


@pytest.mark.parametrize(("stage", "setting"), [
    ("quantize: {exclude: [first, thrid]}", "quantize.exclude"),
    ("quantize-onnx: {scheme: int8-static, exclude: [thrid, auto]}", "quantize-onnx.exclude"),
    ("fp16: {keep_fp32: [MatMul, thrid]}", "fp16.keep_fp32"),
])  # fmt: skip
def test_name_that_no_node_has_is_refused_by_plan(here: Path, stage: str, setting: str) -> None:
    with raises_code("unknown-node", InputError) as refused:
        load_plan(recipe(here, f"[{{{stage}}}]"))
    assert refused.value.setting == f"stages[0].{setting}"
    load_plan(recipe(here, f"[{{{stage.replace('thrid', 'sec*')}}}]"))
    load_plan(recipe(here, f"[simplify, {{{stage}}}]"))  # simplified graphs have other nodes


@pytest.mark.parametrize(("stage", "refused"), [
    ("quantize: {}", ["quantize: {}", "fp16: {}"]),
    ("quantize: {scheme: int8-static}", ["quantize: {}", "fp16: {}"]),  # DequantizeLinear of constants
    ("fp16: {}", ["fp16: {}"]),
])  # fmt: skip
def test_quantized_or_fp16_file_is_recognized_by_plan_and_init(
    here: Path, stage: str, refused: list[str]
) -> None:
    harness.smelt("run", recipe(here, f"[{{{stage}, name: made}}]"), code=0)
    (here / "m.onnx").write_bytes((here / "runs/r/artifacts/made/model.onnx").read_bytes())
    for stages in refused:
        with raises_code("already-narrow", InputError):
            load_plan(recipe(here, f"[simplify, {{{stages}}}]"))
    harness.smelt("plan", recipe(here, "[simplify]"), code=0)
    harness.smelt("init", "m.onnx", "--data", "test.npz", "--data", "calibration.npz", code=0)
    assert ("quantize-onnx" in (here / "m.yaml").read_text()) == (len(refused) == 1)
    harness.smelt("plan", here / "m.yaml", code=0)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_float16_or_float64_file_is_quantized(here: Path, dtype: Any) -> None:
    model = graphs.two_layer_classifier()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graphs.save_model(model, here / "m.onnx")
    harness.smelt("run", recipe(here, "[simplify, {quantize: {}}]"), code=0)


def test_plan_warns_about_random_nodes(here: Path) -> None:
    model = graphs.two_layer_classifier()
    model.graph.node.append(helper.make_node("RandomNormalLike", ["logits"], ["noise"], "noisy"))
    model.graph.output.append(graphs.value_info("noise", ["N", 4]))
    graphs.save_model(model, here / "m.onnx")
    (message,) = [warning for warning in load_plan(recipe(here)).warnings if warning.code == "random-outputs"]
    assert "'noisy'" in message.message


def test_single_file_is_split_into_calibration_and_test(here: Path) -> None:
    harness.smelt("init", "m.onnx", "--data", "test.npz", code=0)
    splits = load_plan(here / "m.yaml").splits
    assert {name: len(split) for name, split in splits.items()} == {"train": 8, "test": 32}
    arrays = [split.arrays.values["x"] for split in splits.values() if split.arrays is not None]
    together = np.concatenate(arrays)
    np.testing.assert_array_equal(np.sort(together, 0), np.sort(np.load("test.npz")["x"], 0))


def test_init_writes_batch_size_one_for_state_of_one_sample(here: Path) -> None:
    graphs.save_model(graphs.gru_model(["N", "T", 4], [1, 1, 8], [1, 1, 8]), here / "m.onnx")
    random = np.random.default_rng(0)
    for name in ("test", "calibration"):
        x = random.normal(size=(24, 6, 4)).astype(np.float32)
        np.savez(here / f"{name}.npz", x=x, state=np.zeros((1, 1, 8), np.float32))
    harness.smelt("init", "m.onnx", "--data", "test.npz", "--data", "calibration.npz", code=0)
    text = (here / "m.yaml").read_text()
    assert "  latency: {batch_sizes: [1]}\n" in text
    assert "\n  batch_size: 1\n" in text
    harness.smelt("run", here / "m.yaml", "--set", "score.latency=false", code=0)
    (simplified,) = [
        step
        for step in json.loads((here / "runs/m/report.json").read_text())["steps"]
        if step["name"] == "simplify"
    ]
    assert simplified["warnings"] == []
