"""Small ONNX graphs as other exporters write them, good ones and hostile ones, and arrays to feed them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def value_info(name: str, shape: Sequence[Any], kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def make_model(nodes: Any, inputs: Any, outputs: Any, weights: Any = (), opset: int = 17, **more: Any) -> Any:
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9, **more)


def two_layer_classifier(batch: Any = "N", width: int = 16, seed: int = 0) -> Any:
    """Return a classifier of 8 numbers into 4 classes: x float32 [batch, 8] -> logits [batch, 4]."""
    random = np.random.default_rng(seed)
    weights = {
        "w1": random.normal(size=(8, width)), "b1": random.normal(size=width),
        "w2": random.normal(size=(width, 4)), "b2": random.normal(size=4),
    }  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h0"], "first"),
        helper.make_node("Add", ["h0", "b1"], ["h1"], "first_bias"),
        helper.make_node("Relu", ["h1"], ["h"], "relu"),
        helper.make_node("Identity", ["h"], ["h2"], "nothing"),
        helper.make_node("MatMul", ["h2", "w2"], ["o"], "second"),
        helper.make_node("Add", ["o", "b2"], ["logits"], "second_bias"),
    ]
    tensors = [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()]
    return make_model(nodes, [value_info("x", [batch, 8])], [value_info("logits", [batch, 4])], tensors)


def classifier_with_integer_output() -> Any:
    """Return `two_layer_classifier` with its logits also in hundredths: integers, which rounding changes."""
    model = two_layer_classifier(width=64)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(100), "hundred"))
    model.graph.node.append(helper.make_node("Mul", ["logits", "hundred"], ["more"]))
    model.graph.node.append(helper.make_node("Cast", ["more"], ["cents"], to=TensorProto.INT64))
    model.graph.output.append(value_info("cents", ["N", 4], TensorProto.INT64))
    return model


def gru_model(x: Sequence[Any], state: Sequence[Any], new_state: Sequence[Any]) -> Any:
    """Return a GRU of these shapes: x float32 [N, T, 4] and state [1, N, 8] -> y [N, T, 8], new_state."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Transpose", ["x"], ["by_time"], "first", perm=[1, 0, 2]),
        helper.make_node(
            "GRU", ["by_time", "w", "r", "", "", "state"], ["all", "new_state"], "gru", hidden_size=8
        ),
        helper.make_node("Squeeze", ["all", "one"], ["steps"], "squeeze"),
        helper.make_node("Transpose", ["steps"], ["y"], "last", perm=[1, 0, 2]),
    ]
    weights = [
        numpy_helper.from_array(random.normal(0, 0.3, (1, 24, 4)).astype(np.float32), "w"),
        numpy_helper.from_array(random.normal(0, 0.3, (1, 24, 8)).astype(np.float32), "r"),
        numpy_helper.from_array(np.array([1]), "one"),
    ]
    return make_model(
        nodes, [value_info("x", x), value_info("state", state)],
        [value_info("y", [x[0], x[1], 8]), value_info("new_state", new_state)], weights,
    )  # fmt: skip


def gru_rows(path: Path, count: int = 40, seed: int = 1) -> dict[str, Any]:
    """Write rows for `recurrent`, those of the state on axis 1; return them."""
    random = np.random.default_rng(seed)
    arrays = {
        "x": random.normal(size=(count, 6, 4)).astype(np.float32),
        "state": random.normal(size=(1, count, 8)).astype(np.float32),
    }
    np.savez(path, allow_pickle=False, **arrays)
    return arrays


def run_directly(path: Path, feeds: Any) -> dict[str, Any]:
    """Return what ONNX Runtime gives for all rows in one call."""
    from smelt.runtimes.onnx_session import open_onnx_session

    session = open_onnx_session(path, 1)
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, dict(feeds)), strict=True))


def save_model(model: Any, path: Path, outside: str | None = None) -> Path:
    """Write a model; with `outside`, its weights go into that file next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if outside is None:
        path.write_bytes(model.SerializeToString())
    else:
        onnx.save_model(model, str(path), save_as_external_data=True, location=outside, size_threshold=0)
    return path


def write_rows(path: Path, count: int = 40, seed: int = 1, **more: Any) -> Path:
    """Write rows of `x` for `two_layer_classifier`."""
    x = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    np.savez(path, x=x, **more)
    return path


def huge_constant_model() -> Any:
    """Return a small graph that computes 40 GB: a constant of 100,000 times 100,000."""
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["huge"]),
        helper.make_node("ReduceSum", ["huge"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["x", "sum"], ["y"]),
    ]
    shape = numpy_helper.from_array(np.array([100_000, 100_000]), "shape")
    return make_model(nodes, [value_info("x", ["N", 8])], [value_info("y", ["N", 8])], [shape])


def write_many_empty_nodes(path: Path, count: int) -> None:
    """Write a file of 2 bytes a node, each of which takes a hundred in memory."""
    graph = b"\x0a\x00" * count
    size, length = len(graph), b""
    while size >= 0x80:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    path.write_bytes(b"\x08\x09" + b"\x3a" + length + bytes([size]) + graph)


def cyclic_model() -> Any:
    nodes = [
        helper.make_node("Add", ["x", "c"], ["a"], "one"),
        helper.make_node("Relu", ["a"], ["b"], "two"),
        helper.make_node("Neg", ["b"], ["c"], "three"),
    ]
    return make_model(nodes, [value_info("x", ["N", 8])], [value_info("c", ["N", 8])])


def one_node_model(operator: str = "Relu", domain: str = "", opset: int = 17, **attributes: Any) -> Any:
    node = helper.make_node(operator, ["x"], ["y"], "node", domain=domain, **attributes)
    model = make_model([node], [value_info("x", ["N", 8])], [value_info("y", ["N", 8])], opset=opset)
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


def model_with_tensor(dims: Sequence[int], content: bytes) -> Any:
    """Return a model whose weight says that it has the shape `dims`, and holds these bytes."""
    model = make_model(
        [helper.make_node("Add", ["x", "w"], ["y"], "add")],
        [value_info("x", ["N", 8])],
        [value_info("y", ["N", 8])],
    )
    model.graph.initializer.append(TensorProto(name="w", data_type=FLOAT, dims=dims, raw_data=content))
    return model


def model_with_external_data(location: str, **options: str) -> Any:
    """Return a model whose weight of 32 bytes is said to lie in the file `location`."""
    model = model_with_tensor([8], b"")
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in {"location": location, **options}.items():
        tensor.external_data.add(key=key, value=text)
    return model


def make_artifact(folder: Path, model: Any, **details: Any) -> Any:
    """Write `model` as the first artifact of a run of the task `custom`, without a store."""
    from smelt.core.artifact import FileRecord, Manifest, read_artifact, write_manifest
    from smelt.core.files import MANIFEST, sha256_of
    from smelt.runtimes.onnx_import.graph_files import graph_signature
    from smelt.runtimes.onnx_import.signature import write_signature

    save_model(model, folder / "model.onnx")
    write_signature(folder, graph_signature(model))
    files = {
        p.name: FileRecord(sha256=sha256_of(p), size_bytes=p.stat().st_size)
        for p in folder.iterdir()
        if p.name != MANIFEST
    }
    manifest = Manifest(
        key="0" * 64, format="onnx", task="custom", stage="model", settings={}, seed=0, parent=None,
        versions={}, files=files, details={"foreign": True, "target": "ort-cpu", **details},
    )  # fmt: skip
    write_manifest(folder, manifest)
    return read_artifact(folder)


def make_split(count: int = 24, seed: int = 2) -> Any:
    """Return rows of `x` for `two_layer_classifier` as a split of a recipe."""
    from smelt.data.npz_arrays import SampleArrays
    from smelt.data.splits import split_from_arrays

    x = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return split_from_arrays("rows.npz", SampleArrays({"x": x}, count))


def class_logits(path: Path, data: Any) -> Any:
    """Return what a graph gives for the rows of a split, float32 [n, 4], where int8 products are exact."""
    from smelt.runtimes.onnx_session import open_onnx_session

    return open_onnx_session(path, 1).run(None, dict(data.arrays.values))[0]
