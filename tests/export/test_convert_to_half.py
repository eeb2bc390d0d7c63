"""Graphs in float16 and bfloat16, some of whose nodes stay float32, with Casts between."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.core.errors import RunError
from smelt.export.convert_to_half import convert_to_half
from smelt.export.parity.references import widen_to_float32
from smelt.export.tensorrt.preflight import preflight
from smelt.export.value_types import values_of_type
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

KINDS = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


def a_chain(scale=1.0):
    """Return x -> a -> b -> logits, each a product, b multiplied with `scale`; `b` leaves as a cache too."""
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("MatMul", ["past_key_values.0", "wa"], ["a"], "first"),
        helper.make_node("MatMul", ["a", "wb"], ["b"], "second"),
        helper.make_node("MatMul", ["b", "wa"], ["c"], "third"),
        helper.make_node("Mul", ["c", "small"], ["logits"], "fourth"),
        helper.make_node("Identity", ["b"], ["present.0"], "fifth"),
    ]
    random = np.random.default_rng(0)  # the same weights in every order of the tests
    weights = {name: random.normal(size=(4, 4)).astype(np.float32) for name in ("wa", "wb")}
    weights["wb"] *= scale
    weights["small"] = np.array(1e-4, np.float32)
    graph = helper.make_graph(
        nodes, "g", [value("past_key_values.0", 1, [2, 4])],
        [value("logits", 1, [2, 4]), value("present.0", 1, [2, 4])],
        [numpy_helper.from_array(v, n) for n, v in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def run(model, x):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"past_key_values.0": x})


def types(model):
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    typed_values = (*inferred.input, *inferred.value_info, *inferred.output)
    type_by_name = {value.name: value.type.tensor_type.elem_type for value in typed_values}
    return type_by_name | {tensor.name: tensor.data_type for tensor in inferred.initializer}


@pytest.mark.parametrize("dtype", KINDS)
def test_every_value_has_one_type_with_casts_between(dtype, tmp_path):
    model, half = a_chain(), KINDS[dtype]
    convert_to_half(model, "model", dtype, {"b"})
    type_by_name = types(model)
    assert {type_by_name[name] for name in ("wa", "a", "c", "past_key_values.0", "present.0")} == {half}
    assert {type_by_name[name] for name in ("wb", "b", "logits")} == {TensorProto.FLOAT}
    assert [n.op_type for n in model.graph.node] == [
        "MatMul", "Cast", "MatMul", "Cast", "MatMul", "Mul", "Cast", "Identity"
    ]  # fmt: skip
    assert preflight(model, tmp_path / "model.onnx") == []


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("wide", [set(), {"b"}, {"a", "b", "c", "logits", "present.0"}])
@pytest.mark.parametrize("outside", [set(), {"present.0", "past_key_values.0"}])
def test_converted_graph_equals_float32_within_precision(dtype, wide, outside):
    model, x = a_chain(), np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    expected = run(model, x)
    convert_to_half(model, "model", dtype, wide, outside)
    assert types(model)["present.0"] == (TensorProto.FLOAT if outside else KINDS[dtype])
    widen_to_float32(model, rounding=True)
    for actual, expected_output in zip(run(model, x), expected, strict=True):
        np.testing.assert_allclose(
            actual, expected_output, atol=abs(expected_output).max() * (0.003 if dtype == "fp16" else 0.03)
        )


def test_overflow_is_infinite_in_half_and_finite_in_float32():
    x = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    expected = run(a := a_chain(30000.0), x)[0]
    half_model, mixed_model = onnx.ModelProto(), onnx.ModelProto()
    half_model.CopyFrom(a)
    mixed_model.CopyFrom(a)
    convert_to_half(half_model, "model", "fp16")
    convert_to_half(mixed_model, "model", "fp16", {"b", "c", "logits", "present.0"}, {"present.0"})
    for model in (half_model, mixed_model):
        widen_to_float32(model, rounding=True)
    assert not np.isfinite(run(half_model, x)[0]).all()
    np.testing.assert_allclose(run(mixed_model, x)[0], expected, atol=0.003 * abs(expected).max())


def test_weight_read_in_both_precisions_is_kept_float32_and_cast():
    model = a_chain()
    convert_to_half(model, "model", "fp16", {"a"})
    type_by_name = types(model)
    assert type_by_name["wa"] == TensorProto.FLOAT  # `c` reads it too
    assert type_by_name["wa.float16"] == TensorProto.FLOAT16


def test_weight_above_float16_range_raises_error_only_if_read_in_half():
    weight = a_chain(1e6)
    with raises_code("beyond-16-bits", RunError):
        convert_to_half(weight, "encoder_model")
    model = a_chain(1e6)
    convert_to_half(model, "encoder_model", "fp16", {"b"})
    assert types(model)["wb"] == TensorProto.FLOAT


def test_values_of_type_works_without_weights():
    assert values_of_type(a_chain()) == {
        "past_key_values.0", "wa", "wb", "small", "a", "b", "c", "logits", "present.0"
    }  # fmt: skip
    assert values_of_type(a_chain(), TensorProto.INT64) == set()


@pytest.mark.parametrize("kind", [TensorProto.INT64, TensorProto.BOOL, TensorProto.DOUBLE])
@pytest.mark.parametrize("value", [4097.0, 1e6, 1e-9])
@pytest.mark.parametrize("storage", ["initializer", "node"])
def test_constant_cast_to_other_type_keeps_value(kind, value, storage):
    """float16 rounds 4097 to 4096, has no 1e6, and makes 1e-9 false."""
    constant = numpy_helper.from_array(np.array([value], np.float32), "c")
    nodes = [helper.make_node("Cast", ["c"], ["y"], "cast", to=kind)]
    nodes += [helper.make_node("Mul", ["c", "small"], ["z"], "mul")]
    if storage == "node":
        nodes.insert(0, helper.make_node("Constant", [], ["c"], "constant", value=constant))
    weights = [numpy_helper.from_array(np.array([1e-4], np.float32), "small")]
    graph = helper.make_graph(
        nodes, "g", [], [helper.make_tensor_value_info("y", kind, [1])],
        [*weights, constant] if storage == "initializer" else weights,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    convert_to_half(model, "model")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = np.array([value], np.float32).astype(helper.tensor_dtype_to_np_dtype(kind))
    np.testing.assert_array_equal(session.run(["y"], {})[0], expected)
