"""Gemm with factors: folded, the float graph gives the same; quantized, it is near."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from smelt.export.onnx_models.prepare_for_quantizer import fold_gemm_factors
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.export.onnx_models.settings import QuantizeOnnxSettings
from smelt.runtimes.onnx_session import open_onnx_session
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs


def model(constant: tuple[str, ...], alpha: float, beta: float) -> Any:
    """x [N, 8] -> y [N, 4] by one Gemm; what is not `constant` of matrix w and bias b is computed."""
    random = np.random.default_rng(0)
    w, b = random.normal(size=(4, 8)).astype(np.float32), random.normal(size=4).astype(np.float32)
    tensors = [numpy_helper.from_array(w, "w_"), numpy_helper.from_array(b, "b_")]
    for tensor in tensors:
        tensor.name = tensor.name[0] if tensor.name[0] in constant else tensor.name
    nodes = [helper.make_node("Neg", [f"{name}_"], [name]) for name in "wb" if name not in constant]
    nodes.append(
        helper.make_node(
            "Gemm", ["x", "w", "b"], ["y"], "gemm", alpha=float(alpha), beta=float(beta), transB=1
        )
    )
    return graphs.make_model(
        nodes, [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 4])], tensors
    )


@pytest.mark.parametrize("constant", [("w", "b"), ("w",), ("b",), ()])
@pytest.mark.parametrize(("alpha", "beta"), [(1, 2), (0.5, 1), (0.25, -3), (2, 0)])
def test_gemm_with_folded_factors_has_equal_outputs(
    constant: tuple[str, ...], alpha: float, beta: float, tmp_path: Path
) -> None:
    source_model = model(constant, alpha, beta)
    path_before = graphs.save_model(source_model, tmp_path / "before.onnx")
    fold_gemm_factors(source_model.graph)
    gemm = source_model.graph.node[-1]
    assert [attribute.name for attribute in gemm.attribute] == ["transB"]
    path_after = graphs.save_model(source_model, tmp_path / "after.onnx")
    split = graphs.make_split()
    expected = graphs.class_logits(path_before, split)
    assert graphs.class_logits(path_after, split) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_int8_gemm_with_factors_is_close_to_float(scheme: str, tmp_path: Path) -> None:
    source = graphs.make_artifact(tmp_path / "src", model(("w", "b"), 0.5, 2))
    data = {"calibration": graphs.make_split()}
    harness.run_stage(
        QuantizeOnnx(), QuantizeOnnxSettings(scheme=scheme), source, tmp_path / "out", data=data
    )
    split = graphs.make_split(seed=9)
    actual, expected = (
        graphs.class_logits(folder / "model.onnx", split) for folder in (tmp_path / "out", source.path)
    )
    assert np.abs(actual - expected).mean() < 0.03 * expected.std()


def test_matrix_that_is_graph_output_is_unchanged(tmp_path: Path) -> None:
    source_model = model(("w", "b"), 0.5, 1)
    source_model.graph.output.append(graphs.value_info("w", [4, 8]))
    path_before = graphs.save_model(source_model, tmp_path / "before.onnx")
    fold_gemm_factors(source_model.graph)
    path_after = graphs.save_model(source_model, tmp_path / "after.onnx")
    inputs = dict(graphs.make_split().arrays.values)
    for actual, expected in zip(
        *(open_onnx_session(path, 1).run(None, inputs) for path in (path_after, path_before)), strict=True
    ):
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-5)
