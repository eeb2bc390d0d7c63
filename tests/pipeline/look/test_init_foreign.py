"""A first recipe of a graph, whatever its author called things."""

from pathlib import Path
from typing import Any

import foreign_graphs as graphs
import numpy as np
import pytest
import yaml
from onnx import helper, numpy_helper

from smelt.core.errors import InputError
from smelt.look.init_foreign import graph_recipe


def test_names_that_yaml_does_not_allow_are_written_as_escapes(tmp_path: Path) -> None:
    model = graphs.two_layers()
    model.producer_name = "by\x1b[31m\nme"
    path = graphs.save(model, tmp_path / "m.onnx")
    text = graph_recipe(str(path), [], None, Path("m.yaml"), tmp_path)
    assert "by\\x1b[31m" in text
    assert text.replace("\n", "").isprintable()
    assert all(line.startswith("#") for line in text.splitlines()[:4])


def layers(*operators: str) -> Any:
    """Return a graph with a node of each of these operators, some of which share their weight."""
    weights = {
        "conv": np.ones((3, 3, 1, 1), np.float32),
        "matrix": np.ones((4, 4), np.float32),
    }
    nodes, last = [], "x"
    for at, operator in enumerate(operators):
        more = {"Conv": ["conv"], "MatMul": ["matrix"]}.get(operator, [])
        nodes.append(helper.make_node(operator, [last, *more], [f"v{at}"], f"n{at}"))
        last = f"v{at}"
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    sizes = ["N", 3, 4, 4]
    return graphs.model_of(nodes, [graphs.value("x", sizes)], [graphs.value(last, sizes)], tensors)


def written(model: Any, folder: Path, *data: Path) -> Any:
    path = graphs.save(model, folder / "m.onnx")
    return yaml.safe_load(graph_recipe(str(path), data, None, Path("m.yaml"), folder))


def scheme(recipe: Any) -> str | None:
    found = [stage["quantize-graph"]["scheme"] for stage in recipe["stages"] if "quantize-graph" in stage]
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


def test_a_file_alone_and_a_folder_with_one_are_divided(tmp_path: Path) -> None:
    graphs.rows(tmp_path / "data.npz", 50)
    (tmp_path / "rows").mkdir()
    graphs.rows(tmp_path / "rows/m_test.npz", 50)
    for given, name in ((tmp_path / "data.npz", "data.npz"), (tmp_path / "rows", "rows/m_test.npz")):
        found = written(graphs.two_layers(), tmp_path, given)["data"]
        assert found == {"train": name, "split": {"test": 0.8}}


def test_files_are_told_apart_by_whole_words_of_their_names(tmp_path: Path) -> None:
    for name in ("bigvals_test", "bigvals_calibration"):
        graphs.rows(tmp_path / f"{name}.npz")
    found = written(graphs.two_layers(), tmp_path, tmp_path)["data"]
    assert found == {"test": "bigvals_test.npz", "calibration": "bigvals_calibration.npz"}
    (tmp_path / "rows.csv").write_text("x")
    with pytest.raises(InputError):
        written(graphs.two_layers(), tmp_path, tmp_path / "rows.csv")


def test_outputs_without_rows_are_run_one_by_one(tmp_path: Path) -> None:
    model = graphs.two_layers()
    assert "batch_size" not in written(model, tmp_path)["score"]
    model.graph.output.append(graphs.value("w1", [8, 16]))
    assert written(model, tmp_path)["score"]["batch_size"] == 1
