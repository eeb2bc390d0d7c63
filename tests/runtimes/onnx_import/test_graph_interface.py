"""Dictionaries of a graph become arrays, and its inputs get other shapes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt import InputError
from smelt.pipeline.plan.load_plan import load_plan
from smelt.runtimes.onnx_import.graph_files import GraphFileError, graph_signature
from smelt.runtimes.onnx_import.graph_interface import replace_zipmaps, set_input_shapes
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs

RECIPE = """
model: m.onnx
task: custom
data: {test: test.npz}
stages: []
score: {latency: false}
"""
LABELS = {"int64s": [3, 5], "strings": ["猫", "dog"]}


def zipmap_model(kind: str = "int64s") -> Any:
    """Return a linear classifier as skl2onnx writes it: labels, and a dictionary for each sample."""
    is_text = kind == "strings"
    labels = [label.encode() for label in LABELS[kind]] if is_text else LABELS[kind]
    classifier = helper.make_node(
        "LinearClassifier",
        ["x"],
        ["label", "probabilities"],
        domain="ai.onnx.ml",
        coefficients=[1.0, -1.0, 0.5, -0.5],
        intercepts=[0.1, -0.1],
        post_transform="SOFTMAX",
        **{f"classlabels_{'strings' if is_text else 'ints'}": labels},
    )
    zipmap = helper.make_node(
        "ZipMap",
        ["probabilities"],
        ["output_probability"],
        domain="ai.onnx.ml",
        **{f"classlabels_{kind}": labels},
    )
    key = TensorProto.STRING if is_text else TensorProto.INT64
    value = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(key, value))
    outputs = [
        helper.make_tensor_value_info("label", key, [None]),
        helper.make_value_info("output_probability", maps),
    ]
    graph = helper.make_graph([classifier, zipmap], "g", [graphs.value_info("x", [None, 2])], outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("test.npz", x=np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32))
    return tmp_path


@pytest.mark.parametrize("kind", LABELS)
def test_zipmap_output_becomes_array_of_values(folder: Path, kind: str) -> None:
    onnx.save(zipmap_model(kind), "m.onnx")
    harness.smelt("init", "m.onnx", "--data", "test.npz", code=0)
    Path("m.yaml").write_text(RECIPE)
    plan = load_plan(folder / "m.yaml")
    assert "zipmap-replaced" in {message.code for message in plan.notes}
    harness.smelt("run", "m.yaml", code=0)
    artifact = Path("runs/m/artifacts/model")
    assert json.loads((artifact / "manifest.json").read_text())["details"]["zipmaps"] == {
        "output_probability": LABELS[kind]
    }
    with np.load("test.npz") as arrays:
        feeds = {"x": arrays["x"]}
    dictionaries = onnxruntime.InferenceSession("m.onnx").run(["output_probability"], feeds)[0]
    values = onnxruntime.InferenceSession(artifact / "model.onnx").run(["output_probability"], feeds)[0]
    np.testing.assert_array_equal(values, [[row[label] for label in LABELS[kind]] for row in dictionaries])


def test_sequence_of_other_operator_is_still_refused(folder: Path) -> None:
    node = helper.make_node("SequenceConstruct", ["x"], ["y"])
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    model = graphs.make_model([node], [graphs.value_info("x", ["N", 2])], [helper.make_value_info("y", kind)])
    assert replace_zipmaps(model) == {}
    onnx.save(model, "m.onnx")
    Path("m.yaml").write_text(RECIPE)
    with raises_code("unsupported-graph", InputError):
        load_plan(folder / "m.yaml")


def test_zipmap_and_shapes_together(folder: Path) -> None:
    model = zipmap_model()
    model.graph.input[0].CopyFrom(graphs.value_info("x", [1, 2]))
    del model.opset_import[0]  # ai.onnx.ml alone
    onnx.save(model, "m.onnx")
    Path("r.yaml").write_text(RECIPE + "shapes: {x: [batch, 2]}\n")
    harness.smelt("run", "r.yaml", code=0)
    written = onnx.load("runs/r/artifacts/model/model.onnx")
    assert {opset.domain for opset in written.opset_import} == {"", "ai.onnx.ml"}
    assert graph_signature(written).inputs[0].shape == ("batch", 2)


def test_graph_that_mixes_samples_of_freed_batch_is_refused(folder: Path) -> None:
    """The maximum over a batch of 1 is the sample's; over two different samples it is neither's."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "most"], ["y"]),
    ]
    ends = [graphs.value_info("x", [1, 2])], [graphs.value_info("y", [1, 2])]
    onnx.save(graphs.make_model(nodes, *ends), "m.onnx")
    Path("r.yaml").write_text(RECIPE + "shapes: {x: [batch, 2]}\n")
    assert "error[wrong-shape]" in harness.smelt("run", "r.yaml", code=2).output


def fixed_model(reshape_to: list[int] | None = None, batch: int = 1) -> Any:
    """Return x float32 [batch, 2] -> y, of fixed batch size; reshaped to a constant shape if one is given."""
    weights = [numpy_helper.from_array(np.array([[1, 2, 3], [4, 5, 6]], np.float32), "w")]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"])]
    if reshape_to is not None:
        weights.append(numpy_helper.from_array(np.array(reshape_to), "to"))
        nodes.append(helper.make_node("Reshape", ["h", "to"], ["r"]))
    last = nodes[-1].output[0]
    nodes.append(helper.make_node("Softmax", [last], ["y"]))
    shape = [batch, 3] if reshape_to is None else reshape_to
    return graphs.make_model(
        nodes, [graphs.value_info("x", [batch, 2])], [graphs.value_info("y", shape)], weights
    )


def test_fixed_batch_axis_is_freed(folder: Path) -> None:
    onnx.save(fixed_model(), "m.onnx")
    Path("r.yaml").write_text(RECIPE + "shapes: {x: [batch, 2]}\n")
    harness.smelt("run", "r.yaml", code=0)
    signature = graph_signature(onnx.load("runs/r/artifacts/model/model.onnx"))
    assert [value.shape for value in (*signature.inputs, *signature.outputs)] == [("batch", 2), ("batch", 3)]
    with np.load("test.npz") as arrays:
        x = arrays["x"]
    together = onnxruntime.InferenceSession("runs/r/artifacts/model/model.onnx").run(None, {"x": x})[0]
    session = onnxruntime.InferenceSession("m.onnx")
    single = np.concatenate([session.run(None, {"x": x[i : i + 1]})[0] for i in range(len(x))])
    np.testing.assert_allclose(together, single, rtol=1e-6)


def test_free_axis_is_fixed(folder: Path) -> None:
    onnx.save(graphs.two_layer_classifier(), "m.onnx")
    graphs.write_rows(folder / "test.npz")
    Path("r.yaml").write_text(RECIPE + "shapes: {x: [4, 8]}\n")
    harness.smelt("run", "r.yaml", code=0)
    signature = graph_signature(onnx.load("runs/r/artifacts/model/model.onnx"))
    assert [value.shape for value in (*signature.inputs, *signature.outputs)] == [(4, 8), (4, 4)]


@pytest.mark.parametrize("reshape_to", [[1, 3], [1, -1]])
def test_graph_that_computes_otherwise_with_new_shapes_is_refused(
    folder: Path, reshape_to: list[int]
) -> None:
    """[1, 3] fails for two samples; [1, -1] makes one sample of two, over which Softmax runs."""
    onnx.save(fixed_model(reshape_to), "m.onnx")
    Path("r.yaml").write_text(RECIPE + "shapes: {x: [batch, 2]}\n")
    assert "error[wrong-shape]" in harness.smelt("run", "r.yaml", code=2).output
    assert not Path("runs/r/artifacts/model").exists()


@pytest.mark.parametrize(
    ("shapes", "code"), [({"z": [1, 2]}, "unknown-input"), ({"x": [1, 2, 3]}, "wrong-shape")]
)
def test_shapes_that_do_not_match_inputs_are_refused(
    folder: Path, shapes: dict[str, list[int]], code: str
) -> None:
    with pytest.raises(GraphFileError) as caught:
        set_input_shapes(fixed_model(), shapes)
    assert caught.value.code == code
    onnx.save(fixed_model(), "m.onnx")
    Path("r.yaml").write_text(RECIPE + f"shapes: {json.dumps(shapes)}\n")
    with raises_code(code, InputError):
        load_plan(folder / "r.yaml")


@pytest.mark.parametrize("size", ["0", "-1", "1.5", "true", "''"])
def test_axis_that_is_neither_size_nor_name_is_refused(folder: Path, size: str) -> None:
    onnx.save(fixed_model(), "m.onnx")
    Path("r.yaml").write_text(RECIPE + f"shapes: {{x: [{size}, 2]}}\n")
    with pytest.raises(InputError):
        load_plan(folder / "r.yaml")
