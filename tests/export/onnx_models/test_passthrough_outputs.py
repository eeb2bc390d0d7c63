"""An output that is an input is quantized around: it stays where it was, and what it was."""

from pathlib import Path

import numpy as np
import pytest

from smelt.export.onnx_models.output_comparison import remove_passthrough_outputs
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.export.onnx_models.settings import QuantizeOnnxSettings
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_passthrough_output_is_restored(scheme: str, tmp_path: Path) -> None:
    model = graphs.two_layer_classifier(width=64)
    model.graph.output.insert(0, graphs.value_info("x", ["N", 8]))
    source = graphs.make_artifact(tmp_path / "src", model)
    data = {"calibration": graphs.make_split()}
    ctx = harness.run_stage(
        QuantizeOnnx(), QuantizeOnnxSettings(scheme=scheme), source, tmp_path / "out", data=data
    )
    x = np.ones((3, 8), np.float32)
    outputs = graphs.run_directly(ctx.out / "model.onnx", {"x": x})
    assert list(outputs) == ["x", "logits"]
    np.testing.assert_array_equal(outputs["x"], x)
    expected = graphs.run_directly(tmp_path / "src/model.onnx", {"x": x})["logits"]
    np.testing.assert_allclose(outputs["logits"], expected, rtol=0.1, atol=0.5)
    assert "MatMul" not in ctx.details["operators"] or scheme == "int8-static"


def test_graph_without_passthrough_outputs_is_unchanged(tmp_path: Path) -> None:
    path = graphs.save_model(graphs.two_layer_classifier(), tmp_path / "m.onnx")
    assert remove_passthrough_outputs(path, tmp_path / "new") == (path, [])
    assert not (tmp_path / "new").exists()
