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


def test_names_that_yaml_does_not_allow_are_written_as_escapes(tmp_path: Path) -> None:
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
    for at, operator in enumerate(operators):
        more = {"Conv": ["conv"], "MatMul": ["matrix"]}.get(operator, [])
        nodes.append(helper.make_node(operator, [last, *more], [f"v{at}"], f"n{at}"))
        last = f"v{at}"
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    sizes = ["N", 3, 4, 4]
    return graphs.make_model(
        nodes, [graphs.value_info("x", sizes)], [graphs.value_info(last, sizes)], tensors
    )


def written(model: Any, folder: Path, *data: Path) -> Any:
    path = graphs.save_model(model, folder / "m.onnx")
    return YAML(typ="safe").load(onnx_recipe_text(str(path), data, None, Path("m.yaml"), folder))


def scheme(recipe: Any) -> str | None:
    found = [stage["quantize-onnx"]["scheme"] for stage in recipe["stages"] if "quantize-onnx" in stage]
    return found[0] if found else None


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        (("Conv", "Relu", "MatMul"), "int8-static"),
        (("MatMul", "Relu"), "int8-dynamic"),
        (("Conv", "MatMul", "Softmax", "MatMul", "Softmax"), "int8-dynamic"),
        (("Relu",), None),
    ],
)
def test_the_scheme_is_one_that_does_something_to_the_operators(
    operators: tuple[str, ...], expected: str | None, tmp_path: Path
) -> None:
    assert scheme(written(layers(*operators), tmp_path)) == expected


def test_products_in_a_body_are_quantized_and_convolutions_in_it_are_not(tmp_path: Path) -> None:
    for operator, expected in (("MatMul", "int8-dynamic"), ("Conv", None)):
        branch = helper.make_graph(
            [helper.make_node(operator, ["x", "w"], ["y"], "inside")],
            "branch",
            [],
            [graphs.value_info("y", ["N", 3, 4, 4])],
        )
        shape = (3, 3, 1, 1) if operator == "Conv" else (4, 4)
        weights = [
            numpy_helper.from_array(np.ones(shape, np.float32), "w"),
            numpy_helper.from_array(np.bool_(True), "yes"),
        ]
        node = helper.make_node("If", ["yes"], ["out"], "if", then_branch=branch, else_branch=branch)
        sizes = ["N", 3, 4, 4]
        model = graphs.make_model(
            [node], [graphs.value_info("x", sizes)], [graphs.value_info("out", sizes)], weights
        )
        assert scheme(written(model, tmp_path)) == expected


def test_hidden_states_with_a_rule_of_pooling_beside_them_are_an_embedder(tmp_path: Path) -> None:
    ids = [graphs.value_info(name, ["N", "L"], TensorProto.INT64) for name in ("input_ids", "attention_mask")]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"], "gather"),
        helper.make_node("Identity", ["attention_mask"], ["mask"], "mask"),
    ]
    table = numpy_helper.from_array(np.ones((9, 4), np.float32), "table")
    model = graphs.make_model(nodes, ids, [graphs.value_info("last_hidden_state", ["N", "L", 4])], [table])
    (tmp_path / "config.json").write_text("{}")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "number {at}"}}\n' for at in range(50)))
    assert written(model, tmp_path)["task"] == "custom"
    with raises_code("wrong-format", InputError):
        written(model, tmp_path, texts)
    (tmp_path / "modules.json").write_text("[]")
    found = written(model, tmp_path, texts)
    assert found["task"] == "sentence-similarity"
    # no stage trains a graph, so a tenth would be too few to score and the rest unused
    assert found["data"] == {"train": "texts.jsonl", "split": {"test": 0.8}}


def test_arrays_that_do_not_fit_a_named_batch_get_no_axes(tmp_path: Path) -> None:
    named = graphs.gru_model(["batch", "time", 4], [1, "batch", 8], [1, "batch", 8])
    arrays = graphs.gru_rows(tmp_path / "rows.npz", 40)
    arrays["state"] = arrays["state"][:, :39]
    np.savez(tmp_path / "rows.npz", allow_pickle=False, **arrays)
    assert "axes" not in written(named, tmp_path, tmp_path / "rows.npz")["data"]  # which the plan refuses


def test_a_file_alone_and_a_folder_with_one_are_divided(tmp_path: Path) -> None:
    graphs.write_rows(tmp_path / "data.npz", 50)
    (tmp_path / "rows").mkdir()
    graphs.write_rows(tmp_path / "rows/m_test.npz", 50)
    for given, name in ((tmp_path / "data.npz", "data.npz"), (tmp_path / "rows", "rows/m_test.npz")):
        found = written(graphs.two_layer_classifier(), tmp_path, given)["data"]
        assert found == {"train": name, "split": {"test": 0.8}}


def test_files_are_told_apart_by_whole_words_of_their_names(tmp_path: Path) -> None:
    for name in ("bigvals_test", "bigvals_calibration"):
        graphs.write_rows(tmp_path / f"{name}.npz")
    found = written(graphs.two_layer_classifier(), tmp_path, tmp_path)["data"]
    assert found == {"test": "bigvals_test.npz", "calibration": "bigvals_calibration.npz"}
    (tmp_path / "rows.csv").write_text("x")
    with pytest.raises(InputError):
        written(graphs.two_layer_classifier(), tmp_path, tmp_path / "rows.csv")


def test_outputs_without_rows_are_run_one_by_one(tmp_path: Path) -> None:
    model = graphs.two_layer_classifier()
    assert "batch_size" not in written(model, tmp_path)["score"]
    model.graph.output.append(graphs.value_info("w1", [8, 16]))
    assert written(model, tmp_path)["score"]["batch_size"] == 1
