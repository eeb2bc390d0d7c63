"""Gemm with factors: folded, the float graph gives the same; quantized, it is near."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from smelt.export.onnx_models.prepare_for_quantizer import fold_gemm_factors
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx, QuantizeOnnxSettings
from smelt.runtimes.onnx_backend import open_onnx_session
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
def test_a_gemm_without_its_factors_gives_the_same(
    constant: tuple[str, ...], alpha: float, beta: float, tmp_path: Path
) -> None:
    made = model(constant, alpha, beta)
    before = graphs.save_model(made, tmp_path / "before.onnx")
    fold_gemm_factors(made.graph)
    gemm = made.graph.node[-1]
    assert [one.name for one in gemm.attribute] == ["transB"]
    after = graphs.save_model(made, tmp_path / "after.onnx")
    rows = graphs.make_split()
    wanted = graphs.class_logits(before, rows)
    assert graphs.class_logits(after, rows) == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_a_gemm_with_factors_is_near_in_int8(scheme: str, tmp_path: Path) -> None:
    source = graphs.make_artifact(tmp_path / "src", model(("w", "b"), 0.5, 2))
    data = {"calibration": graphs.make_split()}
    harness.run_stage(
        QuantizeOnnx(), QuantizeOnnxSettings(scheme=scheme), source, tmp_path / "out", data=data
    )
    rows = graphs.make_split(seed=9)
    got, wanted = (
        graphs.class_logits(folder / "model.onnx", rows) for folder in (tmp_path / "out", source.path)
    )
    assert np.abs(got - wanted).mean() < 0.03 * wanted.std()


def test_a_matrix_that_is_an_output_too_stays_as_it_is(tmp_path: Path) -> None:
    made = model(("w", "b"), 0.5, 1)
    made.graph.output.append(graphs.value_info("w", [4, 8]))
    before = graphs.save_model(made, tmp_path / "before.onnx")
    fold_gemm_factors(made.graph)
    after = graphs.save_model(made, tmp_path / "after.onnx")
    rows = dict(graphs.make_split().arrays.values)
    for got, wanted in zip(
        *(open_onnx_session(path, 1).run(None, rows) for path in (after, before)), strict=True
    ):
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-5)
