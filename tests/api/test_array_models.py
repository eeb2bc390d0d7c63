"""What Python gives as rows of arrays, and what comes back: our errors, or arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import smelt
from smelt.core.errors import InputError, RunError
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs


@pytest.mark.parametrize(("inputs", "code"), [
    ({"x": np.ones((0, 8), np.float32)}, "unequal-rows"), ({"x": [[1.0, 2.0], [3.0]]}, "wrong-type"),
    ({"x": np.float32(1)}, "unequal-rows"), ({}, "unequal-rows"),
    ({"x": np.array([None])}, "does-not-fit-graph"),
])  # fmt: skip
def test_invalid_arrays_are_rejected(tmp_path: Path, inputs: dict[str, Any], code: str) -> None:
    graphs.make_artifact(tmp_path / "a", graphs.two_layer_classifier())
    with smelt.load(str(tmp_path / "a")) as model, raises_code(code, InputError) as excinfo:
        model.run(inputs)
    if code == "does-not-fit-graph":
        assert "x float32" in str(excinfo.value)


def test_output_shapes_depending_on_batch_are_rejected(tmp_path: Path) -> None:
    boxes = graphs.make_model(
        [helper.make_node("NonZero", ["x"], ["boxes"])],
        [graphs.value_info("x", ["N", 8])],
        [graphs.value_info("boxes", [2, "K"], TensorProto.INT64)],
    )
    graphs.make_artifact(tmp_path / "a", boxes)
    x = np.eye(4, 8, dtype=np.float32)
    x[2:] = 1
    with smelt.load(str(tmp_path / "a")) as model:
        assert model.run({"x": x})["boxes"].shape == (2, 18)
        with raises_code("shape-mismatch", RunError) as excinfo:
            model.run({"x": x}, batch_size=2)
        assert all(value in str(excinfo.value) for value in ("'boxes'", "[2, 2]", "[2, 16]"))
