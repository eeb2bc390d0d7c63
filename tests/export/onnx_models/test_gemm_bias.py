"""Biases of Gemm of every shape that ONNX allows, against the graph itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.export.onnx_models.settings import QuantizeOnnxSettings
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs


def gemm(bias: Any, turned: int) -> Any:
    """Return x [2, 8] -> logits [2, 4] with a bias that another Gemm reads too."""
    random = np.random.default_rng(0)
    weights = [random.normal(size=(4, 8) if turned else (8, 4)).astype(np.float32) for _ in range(2)]
    nodes = [
        helper.make_node("Gemm", ["x", "w0", "c"], ["a"], "first", transB=turned),
        helper.make_node("Gemm", ["x", "w1", "c"], ["b"], "second", transB=turned),
        helper.make_node("Add", ["a", "b"], ["logits"], "sum"),
    ]
    tensors = [numpy_helper.from_array(w, f"w{index}") for index, w in enumerate(weights)]
    tensors.append(numpy_helper.from_array(np.asarray(bias, np.float32), "c"))
    return graphs.make_model(
        nodes, [graphs.value_info("x", [2, 8])], [graphs.value_info("logits", [2, 4])], tensors
    )


@pytest.mark.parametrize(
    ("bias", "turned"),
    [
        (5.0, 0), ([5.0], 1), ([[5.0]], 0), ([[1.0, -2.0, 3.0, -4.0]], 1), ([[5.0], [-5.0]], 0),
        ([[1.0, 2.0, 3.0, 4.0], [-4.0, -3.0, -2.0, -1.0]], 1),
    ],
)  # fmt: skip
def test_gemm_bias_of_any_valid_shape_is_quantized_correctly(tmp_path: Path, bias: Any, turned: int) -> None:
    source = graphs.make_artifact(tmp_path / "src", gemm(bias, turned))
    stage_settings = QuantizeOnnxSettings(scheme="int8-static")
    data = {"calibration": graphs.make_split()}
    ctx = harness.run_stage(QuantizeOnnx(), stage_settings, source, tmp_path / "out", data=data)
    assert ctx.details["parity"]["relative"] < 0.1
    split = graphs.make_split(count=2)
    actual, expected = (graphs.class_logits(tmp_path / side / "model.onnx", split) for side in ("out", "src"))
    assert np.abs(actual - expected).max() < 0.3
