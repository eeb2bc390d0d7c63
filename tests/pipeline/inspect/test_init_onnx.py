"""A first recipe of a graph, whatever its author called things."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from ruamel.yaml import YAML

from smelt.core.errors import InputError
from smelt.pipeline.inspect.init_onnx import onnx_recipe_text
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs


def test_names_with_control_characters_are_escaped(tmp_path: Path) -> None:
    model = graphs.two_layer_classifier()
    model.producer_name = "by\x1b[31m\nme"
    path = graphs.save_model(model, tmp_path / "m.onnx")
    text = onnx_recipe_text(str(path), [], None, Path("m.yaml"), tmp_path)
    assert "by\\x1b[31m" in text
    assert text.replace("\n", "").isprintable()
    assert all(line.startswith("#") for line in text.splitlines()[:4])


def layers(*operators: str) -> Any:
    """Return a graph with a node of each of these operators, some of which share their weight."""
    weights = {"conv": np.ones((3, 3, 1, 1), np.float32), "matrix": np.ones((4, 4), np.float32)}
    nodes, last = [], "x"
    for index, operator in enumerate(operators):
        extra_inputs = {"Conv": ["conv"], "MatMul": ["matrix"]}.get(operator, [])
        nodes.append(helper.make_node(operator, [last, *extra_inputs], [f"v{index}"], f"n{index}"))
        last = f"v{index}"
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    sizes = ["N", 3, 4, 4]
    return graphs.make_model(
        nodes, [graphs.value_info("x", sizes)], [graphs.value_info(last, sizes)], tensors
    )


def written(model: Any, folder: Path, *data: Path) -> Any:
    path = graphs.save_model(model, folder / "m.onnx")
    return YAML(typ="safe").load(onnx_recipe_text(str(path), data, None, Path("m.yaml"), folder))


def scheme(recipe: Any) -> str | None:
    schemes = [stage["quantize-onnx"]["scheme"] for stage in recipe["stages"] if "quantize-onnx" in stage]
    return schemes[0] if schemes else None


@pytest.mark.parametrize(("operators", "expected"), [
    (("Conv", "Relu", "MatMul"), "int8-static"), (("MatMul", "Relu"), "int8-dynamic"),
    (("Conv", "MatMul", "Softmax", "MatMul", "Softmax"), "int8-dynamic"), (("Relu",), None),
])  # fmt: skip
def test_scheme_matches_operators_of_graph(
    operators: tuple[str, ...], expected: str | None, tmp_path: Path
) -> None:
    assert scheme(written(layers(*operators), tmp_path)) == expected


@pytest.mark.parametrize(("names", "expected"), [
    (("test", "calibration"), "int8-static"), (("test",), "int8-weight-only"),
])  # fmt: skip
def test_scheme_to_serve_has_no_ranges_of_a_batch(
    names: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["embedded"], "gather"),
        helper.make_node("MatMul", ["embedded", "table"], ["last_hidden_state"], "product"),
    ]
    table = numpy_helper.from_array(np.ones((4, 4), np.float32), "table")
    ids = [graphs.value_info("input_ids", ["N", "L"], TensorProto.INT64)]
    model = graphs.make_model(nodes, ids, [graphs.value_info("last_hidden_state", ["N", "L", 4])], [table])
    for name in ("config.json", "modules.json"):
        (tmp_path / name).write_text("{}" if name == "config.json" else "[]")
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    path = graphs.save_model(model, tmp_path / "m.onnx")
    data = [tmp_path / f"{name}.jsonl" for name in names]
    text = onnx_recipe_text(str(path), data, None, Path("m.yaml"), tmp_path, serve=True)
    assert scheme(YAML(typ="safe").load(text)) == expected


def choice(inside: list[Any], weights: dict[str, Any]) -> Any:
    """Return a graph of a convolution with the output `h`, and an If with the nodes `inside`."""
    outer = helper.make_node("Conv", ["x", "conv"], ["h"], "outer", pads=[1, 1, 1, 1])
    branch = helper.make_graph(
        inside, "branch", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    )
    node = helper.make_node("If", ["yes"], ["out"], "if", then_branch=branch, else_branch=branch)
    values = {"yes": np.bool_(True), "conv": np.ones((3, 3, 3, 3)), **weights}
    tensors = [
        numpy_helper.from_array(v.astype(np.float32) if v.dtype == np.float64 else v, name)
        for name, v in values.items()
    ]
    ends = (
        [graphs.value_info("x", ["N", 3, 4, 4])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
    )
    return graphs.make_model([outer, node], *ends, tensors)


@pytest.mark.parametrize(("matrix_width", "gru_width", "expected"), [
    (2, 0, {"int8": "int8-static"}),
    (200, 0, {"int8": "int8-dynamic"}),  # most weights are in the body, where int8-static has none
    (0, 16, {"int8": "int8-weight-only"}),  # neither int8 scheme quantizes a GRU
    (2, 16, {"int8": "int8-dynamic", "int8-weights": "int8-weight-only"}),
])  # fmt: skip
def test_scheme_follows_the_larger_part_of_the_weights(
    matrix_width: int, gru_width: int, expected: dict[str, str], tmp_path: Path
) -> None:
    weights = {"shape": np.array([4, -1, 12]), "matrix": np.ones((12, matrix_width or 1))}
    weights |= {"w": np.ones((1, 3 * gru_width, 12)), "r": np.ones((1, 3 * gru_width, gru_width))}
    inside = [helper.make_node("Reshape", ["h", "shape"], ["rows"], "rows")]
    if matrix_width:
        inside.append(helper.make_node("MatMul", ["rows", "matrix"], ["m"], "product"))
    if gru_width:
        inside.append(helper.make_node("GRU", ["rows", "w", "r"], ["", "g"], "gru", hidden_size=gru_width))
    outputs = [name for name, width in (("m", matrix_width), ("g", gru_width)) if width]
    inside += [helper.make_node("ReduceMean", [name], [f"{name}.mean"], keepdims=0) for name in outputs]
    inside.append(helper.make_node("Sum", [f"{name}.mean" for name in outputs], ["y"], "sum"))
    stages = written(choice(inside, weights), tmp_path)["stages"]
    schemes = {s["name"]: s["quantize-onnx"]["scheme"] for s in stages if "quantize-onnx" in s}
    assert schemes == expected


def test_hidden_states_with_pooling_config_are_embedder(tmp_path: Path) -> None:
    ids = [graphs.value_info(name, ["N", "L"], TensorProto.INT64) for name in ("input_ids", "attention_mask")]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"], "gather"),
        helper.make_node("Identity", ["attention_mask"], ["mask"], "mask"),
    ]
    table = numpy_helper.from_array(np.ones((9, 4), np.float32), "table")
    model = graphs.make_model(nodes, ids, [graphs.value_info("last_hidden_state", ["N", "L", 4])], [table])
    (tmp_path / "config.json").write_text("{}")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "number {number}"}}\n' for number in range(50)))
    assert written(model, tmp_path)["task"] == "custom"
    with raises_code("wrong-format", InputError):
        written(model, tmp_path, texts)
    (tmp_path / "modules.json").write_text("[]")
    recipe = written(model, tmp_path, texts)
    assert recipe["task"] == "sentence-similarity"
    # no stage trains a graph, so a tenth would be too few to score and the rest unused
    assert recipe["data"] == {"train": "texts.jsonl", "split": {"test": 0.8}}


def test_arrays_that_do_not_match_named_batch_get_no_axes(tmp_path: Path) -> None:
    model = graphs.gru_model(["batch", "time", 4], [1, "batch", 8], [1, "batch", 8])
    arrays = graphs.gru_rows(tmp_path / "rows.npz", 40)
    arrays["state"] = arrays["state"][:, :39]
    np.savez(tmp_path / "rows.npz", allow_pickle=False, **arrays)
    assert "axes" not in written(model, tmp_path, tmp_path / "rows.npz")["data"]  # which the plan refuses


def test_single_npz_file_or_folder_is_split(tmp_path: Path) -> None:
    graphs.write_rows(tmp_path / "data.npz", 50)
    (tmp_path / "rows").mkdir()
    graphs.write_rows(tmp_path / "rows/m_test.npz", 50)
    for data_path, name in ((tmp_path / "data.npz", "data.npz"), (tmp_path / "rows", "rows/m_test.npz")):
        data = written(graphs.two_layer_classifier(), tmp_path, data_path)["data"]
        assert data == {"train": name, "split": {"test": 0.8}}


def test_file_role_needs_a_full_word_of_the_name(tmp_path: Path) -> None:
    for name in ("bigvals_test", "bigvals_calibration"):
        graphs.write_rows(tmp_path / f"{name}.npz")
    splits = written(graphs.two_layer_classifier(), tmp_path, tmp_path)["data"]
    assert splits == {"test": "bigvals_test.npz", "calibration": "bigvals_calibration.npz"}
    (tmp_path / "rows.csv").write_text("x")
    with pytest.raises(InputError):
        written(graphs.two_layer_classifier(), tmp_path, tmp_path / "rows.csv")


def test_outputs_without_batch_axis_use_batch_size_1(tmp_path: Path) -> None:
    model = graphs.two_layer_classifier()
    assert "batch_size" not in written(model, tmp_path)["score"]
    model.graph.output.append(graphs.value_info("w1", [8, 16]))
    assert written(model, tmp_path)["score"]["batch_size"] == 1
