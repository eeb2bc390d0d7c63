"""An output that is an input is quantized around: it stays where it was, and what it was."""

from pathlib import Path

import foreign_graphs as graphs
import harness
import numpy as np
import pytest

from smelt.export.foreign.passed_through import take_out
from smelt.export.foreign.quantize import QuantizeOnnx, QuantizeOnnxSettings


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_an_output_that_is_an_input_is_given_as_before(scheme: str, tmp_path: Path) -> None:
    model = graphs.two_layers(width=64)
    model.graph.output.insert(0, graphs.value("x", ["N", 8]))
    source = graphs.artifact(tmp_path / "src", model)
    data = {"calibration": graphs.split()}
    ctx = harness.run(
        QuantizeOnnx(), QuantizeOnnxSettings(scheme=scheme), source, tmp_path / "out", data=data
    )
    x = np.ones((3, 8), np.float32)
    found = graphs.by_hand(ctx.out / "model.onnx", {"x": x})
    assert list(found) == ["x", "logits"]
    np.testing.assert_array_equal(found["x"], x)
    wanted = graphs.by_hand(tmp_path / "src/model.onnx", {"x": x})["logits"]
    np.testing.assert_allclose(found["logits"], wanted, rtol=0.1, atol=0.5)
    assert "MatMul" not in ctx.details["operators"] or scheme == "int8-static"


def test_other_graphs_are_left_where_they_are(tmp_path: Path) -> None:
    path = graphs.save(graphs.two_layers(), tmp_path / "m.onnx")
    assert take_out(path, tmp_path / "new") == (path, [])
    assert not (tmp_path / "new").exists()
