from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.core.errors import RunError
from smelt.export.tensorrt.build_engine import SizeRange, input_range, past_range, profile_shapes
from smelt.export.tensorrt.preflight import TensorrtProblem, check_profile, load_graph, preflight
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

FLOAT, HALF, INT8, UINT8, INT32 = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32,
)  # fmt: skip


def graph(
    nodes: list[Any], weights: dict[str, Any], opset: int = 21, kind: int = FLOAT, domain: str = ""
) -> Any:
    x = helper.make_tensor_value_info("x", kind, ["batch", 4])
    y = helper.make_tensor_value_info("y", kind, None)
    tensors = [numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items()]
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=opsets)


def matmul(name: str = "dense", weight: str = "w") -> Any:
    return helper.make_node("MatMul", ["x", weight], ["y"], name=name)


def check(model: Any, folder: Path) -> tuple[list[TensorrtProblem], list[TensorrtProblem]]:
    """Return the errors and the warnings."""
    path = folder / "model.onnx"
    onnx.save(model, path)
    problems = preflight(load_graph(path), path)
    return [p for p in problems if p.severity == "error"], [p for p in problems if p.severity == "warning"]


W = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(("opset", "passes"), [(8, False), (9, True), (25, True), (26, False)])
def test_opset_outside_of_9_to_25_is_rejected(tmp_path: Path, opset: int, passes: bool) -> None:
    errors, _ = check(graph([matmul()], {"w": W}, opset), tmp_path)
    assert (errors == []) is passes
    if not passes:
        assert (errors[0].rule, errors[0].location) == ("opset", f"opset {opset}")


def test_quantize_without_zero_point_defaults_to_uint8(tmp_path: Path) -> None:
    def model(**attributes: int) -> Any:
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s"], ["q"], name="q", **attributes),
            helper.make_node("DequantizeLinear", ["q", "s"], ["y"], name="dq"),
        ]
        return graph(nodes, {"s": np.float32(0.1)})

    assert "unsigned-codes" in [e.rule for e in check(model(), tmp_path)[0]]
    assert check(model(output_dtype=INT8), tmp_path)[0] == []


def test_mask_with_minus_infinity_is_only_a_warning(tmp_path: Path) -> None:
    node = helper.make_node("Add", ["x", "mask"], ["y"])
    errors, warnings = check(graph([node], {"mask": np.array([0, -np.inf, 0, 0], np.float32)}), tmp_path)
    assert errors == []
    assert warnings[0].rule == "mask"
    assert "'mask'" in warnings[0].location


@pytest.mark.parametrize(("last", "is_mask"), [("ArgMax", False), ("TopK", False), ("Softmax", True)])
def test_minus_infinity_before_selection_is_no_mask(tmp_path: Path, last: str, is_mask: bool) -> None:
    nodes = [
        helper.make_node("Less", ["x", "zero"], ["negative"]),
        helper.make_node("Where", ["negative", "minus_infinity", "x"], ["allowed"]),
        helper.make_node("Reshape", ["allowed", "rows"], ["flat"]),
        helper.make_node(
            last,
            ["flat", "k"] if last == "TopK" else ["flat"],
            ["values", "y"] if last == "TopK" else ["y"],
        ),
    ]
    weights = {"zero": np.float32(0), "minus_infinity": np.float32(-np.inf), "rows": np.array([-1, 4])}
    errors, warnings = check(graph(nodes, weights | {"k": np.array([2])}), tmp_path)
    assert errors == []
    assert [problem.rule for problem in warnings] == (["mask"] if is_mask else [])


def test_classical_model_gets_no_advice_about_exporter(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Scaler", ["x"], ["scaled"], domain="ai.onnx.ml", offset=[0.0], scale=[1.0]),
        helper.make_node("QuantizeLinear", ["scaled", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    weights = {"s": np.float32(0.1), "z": np.uint8(3)}
    errors, _ = check(graph(nodes, weights, domain="ai.onnx.ml"), tmp_path)
    assert {"foreign-operator", "zero-point"} <= {problem.rule for problem in errors}
    assert not any("target: tensorrt" in problem.text for problem in errors)
    assert all(problem.hint for problem in errors)


def test_missing_external_weights_and_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        graph([matmul()], {"w": W}),
        path,
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=0,
    )
    assert preflight(load_graph(path), path) == []
    (tmp_path / "model.onnx.data").unlink()
    (problem,) = preflight(load_graph(path), path)
    assert problem.rule == "external-data"
    assert "'w'" in problem.location
    path.write_bytes(b"\xff\xff\xff")
    with raises_code("damaged-file", RunError):
        load_graph(path)


def decoder() -> Any:
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", 1]),
        helper.make_tensor_value_info(
            "encoder_attention_mask", TensorProto.INT64, ["batch", "encoder_length"]
        ),
        helper.make_tensor_value_info(
            "past_key_values.0.decoder.key", FLOAT, ["batch", 2, "past_length", 16]
        ),
        helper.make_tensor_value_info(
            "past_key_values.0.encoder.key", FLOAT, ["batch", 2, "encoder_length", 16]
        ),
    ]
    return helper.make_model(helper.make_graph([], "g", inputs, []))


RANGES = {"batch": SizeRange(1, 1, 8), "input": SizeRange(1, 14, 32), "past": SizeRange(0, 7, 127)}


def test_shapes_follow_the_names_of_dimensions() -> None:
    shapes = profile_shapes(decoder(), RANGES, "decoder")
    assert shapes["input_ids"] == ((1, 1), (1, 1), (8, 1))
    assert shapes["encoder_attention_mask"] == ((1, 1), (1, 14), (8, 32))
    assert shapes["past_key_values.0.decoder.key"] == ((1, 2, 0, 16), (1, 2, 7, 16), (8, 2, 127, 16))
    assert check_profile(decoder(), shapes, 128) == []


def test_dynamic_size_with_single_value_has_profile_entry() -> None:
    unit_ranges = {"batch": SizeRange(1, 1, 1), "input": SizeRange(1, 1, 1), "past": SizeRange(0, 7, 127)}
    shapes = profile_shapes(decoder(), unit_ranges, "decoder")
    assert shapes["encoder_attention_mask"] == ((1, 1), (1, 1), (1, 1))
    assert check_profile(decoder(), shapes, 128) == []


def test_dimension_without_known_name_is_rejected() -> None:
    model = decoder()
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "encoder_lenght"
    with raises_code("unknown-axis-size", RunError) as excinfo:
        profile_shapes(model, RANGES, "decoder")
    assert "'encoder_length'" in str(excinfo.value)


def test_invalid_profiles_accepted_by_tensorrt_are_detected() -> None:
    shapes = profile_shapes(decoder(), RANGES, "decoder")
    assert check_profile(decoder(), shapes, 128) == []
    (problem,) = check_profile(decoder(), shapes, 127)
    assert problem.rule == "profile-too-long"
    for value in ("'past_key_values.0.decoder.key'", " 128 ", " 127 ", "tensorrt: {lengths: ...}"):
        assert value in problem.text
    min_shape, opt_shape, _ = shapes["past_key_values.0.encoder.key"]
    other = shapes | {"past_key_values.0.encoder.key": (min_shape, opt_shape, (8, 2, 64, 16))}
    (problem,) = check_profile(decoder(), other, None)
    assert problem.rule == "profile-conflict"
    assert "'encoder_length'" in problem.text
    typo = {("input_idz" if n == "input_ids" else n): s for n, s in shapes.items()}
    problems = {p.rule: p.text for p in check_profile(decoder(), typo, None)}
    assert "'input_idz'" in problems["profile-unknown-input"]
    assert "'input_ids'" in problems["profile-missing-input"]


def test_ranges_are_percentiles_of_the_lengths() -> None:
    lengths = list(range(1, 101))
    assert input_range(lengths, 99, 512) == SizeRange(1, 50, 104)  # 99.01 rounded up to a multiple of 8
    assert input_range(lengths, 99, 64) == SizeRange(1, 50, 64)
    assert past_range([20] * 5, 128, 512) == SizeRange(0, 10, 127)
    assert past_range([20] * 5, 128, 16) == SizeRange(0, 10, 15)
    assert past_range([1], 1, 512) == SizeRange(0, 0, 0)
