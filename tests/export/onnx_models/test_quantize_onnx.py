"""ONNX Runtime's quantizers behind our settings, against its own result and against the untouched graph."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from pydantic import ValidationError

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.npz_arrays import SampleArrays
from smelt.data.splits import split_from_arrays
from smelt.export.graph_files import share_weights
from smelt.export.onnx_models import quantize_onnx
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.export.onnx_models.settings import QuantizeOnnxSettings
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs


def run(folder: Path, model: Any, **settings: Any) -> Any:
    source = graphs.make_artifact(folder / "src", model)
    data = {"calibration": graphs.make_split()}
    return harness.run_stage(
        QuantizeOnnx(), QuantizeOnnxSettings(**settings), source, folder / "out", data=data
    )


def operators(folder: Path) -> list[str]:
    return [node.op_type for node in onnx.load(folder / "out/model.onnx").graph.node]


@pytest.mark.parametrize(("settings", "operator"), [
    ({"scheme": "int8-dynamic"}, "MatMulInteger"), ({"scheme": "int8-static"}, "QuantizeLinear"),
    ({"scheme": "int8-static", "calibration_method": "entropy"}, "QuantizeLinear"),
    ({"scheme": "int8-static", "calibration_method": "percentile"}, "QuantizeLinear"),
])  # fmt: skip
def test_quantized_graph_is_close_to_float_graph(
    tmp_path: Path, settings: dict[str, Any], operator: str
) -> None:
    ctx = run(tmp_path, graphs.two_layer_classifier(width=64), **settings)
    assert operator in operators(tmp_path)
    split = graphs.make_split(seed=9)
    actual, expected = (graphs.class_logits(tmp_path / side / "model.onnx", split) for side in ("out", "src"))
    assert 0 < np.abs(actual - expected).mean() / expected.std() < 0.05
    assert (ctx.details["scheme"], ctx.details["foreign"]) == (settings["scheme"], True)
    assert 0 < ctx.details["parity"]["relative"] < 0.4
    assert ctx.details["depends_on_batch"] is (settings["scheme"] == "int8-dynamic")


def test_static_ranges_equal_calibration_ranges(tmp_path: Path) -> None:
    """The scale of uint8 is the range of what was seen, with 0 inside, over 255 (ONNX Runtime's formula)."""
    run(tmp_path, graphs.two_layer_classifier(), scheme="int8-static", calibration_samples=24)
    samples = graphs.make_split().arrays.values["x"]
    model = onnx.load(tmp_path / "out/model.onnx")
    scales = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    expected_scale = (max(0, samples.max()) - min(0, samples.min())) / 255
    assert float(scales["x_scale"]) == pytest.approx(expected_scale, rel=1e-5)


def test_tensorrt_quantization_is_symmetric_int8(tmp_path: Path) -> None:
    ctx = run(tmp_path, graphs.two_layer_classifier(), scheme="int8-static", target="tensorrt")
    model = onnx.load(tmp_path / "out/model.onnx")
    points = [numpy_helper.to_array(t) for t in model.graph.initializer if t.name.endswith("zero_point")]
    assert points
    assert all(not p.any() for p in points)
    assert ctx.details["target"] == "tensorrt"


@pytest.mark.parametrize("pattern", ["second", "sec*"])
def test_excluded_nodes_are_kept_float(tmp_path: Path, pattern: str) -> None:
    run(tmp_path, graphs.two_layer_classifier(), exclude=[pattern])
    assert operators(tmp_path).count("MatMulInteger") == 1
    assert "MatMul" in operators(tmp_path)
    with raises_code("unknown-node", InputError):
        run(tmp_path / "other", graphs.two_layer_classifier(), exclude=["secnod"])


def test_graph_without_products_is_unchanged_with_warning(tmp_path: Path) -> None:
    ctx = run(tmp_path, graphs.one_node_model())
    assert message_codes(ctx.warnings) == ["nothing-quantized"]


def test_conv_requires_static_quantization(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((2, 1, 1, 1), np.float32), "w")
    nodes = [helper.make_node("Unsqueeze", ["x", "axes"], ["u"]), helper.make_node("Conv", ["u", "w"], ["y"])]
    axes = numpy_helper.from_array(np.array([1, 2]), "axes")
    values = [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 2, 1, 8])]
    ctx = run(tmp_path, graphs.make_model(nodes, *values, [weight, axes]))
    assert message_codes(ctx.warnings)[0] == "nothing-quantized"
    assert "int8-static" in ctx.warnings[0].message


@pytest.mark.parametrize("settings", [
    {"calibration_method": "entropy"}, {"target": "tensorrt"}, {"calibration_samples": 0},
])  # fmt: skip
def test_ineffective_settings_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        QuantizeOnnxSettings(**settings)


def test_calibration_data_is_required_only_for_static_ranges() -> None:
    needs = QuantizeOnnx.needs_with
    assert needs(QuantizeOnnxSettings(), ()) == frozenset()
    assert needs(QuantizeOnnxSettings(scheme="int8-static"), ()) == {"calibration"}
    assert needs(QuantizeOnnxSettings(scheme="int8-static"), ("train",)) == frozenset()


def test_changed_integer_outputs_are_reported_as_json_details(tmp_path: Path) -> None:
    ctx = run(tmp_path, graphs.classifier_with_integer_output())
    json.dumps(ctx.details, allow_nan=False)
    assert 0 < ctx.details["parity"]["relative"] < 0.4
    assert "outputs-changed" in message_codes(ctx.warnings)


@pytest.mark.parametrize(("opset", "converts"), [(11, True), (11, False), (13, True)])
def test_old_opset_is_converted_or_quantized_per_tensor_with_warning(
    tmp_path: Path, opset: int, converts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to opset 12 DequantizeLinear takes one scale: ONNX Runtime's quantizer writes more nevertheless."""

    def fails(model: Any, version: int) -> Any:
        raise RuntimeError("no adapter")

    if not converts:
        monkeypatch.setattr(onnx.version_converter, "convert_version", fails)
    model = graphs.two_layer_classifier(width=64)
    model.opset_import[0].version = opset
    ctx = run(tmp_path, model, scheme="int8-static")
    assert "QuantizeLinear" in operators(tmp_path)
    assert ctx.details["parity"]["relative"] < 0.4
    sizes = {t.name: list(t.dims) for t in onnx.load(tmp_path / "out/model.onnx").graph.initializer}
    assert sizes["w1_scale"] == ([64] if converts else [])
    assert bool(ctx.warnings) == (not converts)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_quantizer_names_do_not_collide_with_graph_names(tmp_path: Path, scheme: str) -> None:
    """onnxruntime.quantization makes x_scale, h_quantized, w1_quantized and nodes of such names."""
    model = graphs.two_layer_classifier(width=64)
    new = {"h0": "x_scale", "h1": "x_scale_quantized", "b1": "w1_quantized", "b2": "x_zero_point"}
    new |= {"o": "w1_DequantizeLinear_Output"}
    for node in model.graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
        node.name = {"relu": "x_QuantizeLinear", "nothing": "first_quant"}.get(node.name, node.name)
    for tensor in model.graph.initializer:
        tensor.name = new.get(tensor.name, tensor.name)
    ctx = run(tmp_path, model, scheme=scheme)
    assert ctx.details["parity"]["relative"] < 0.4
    quantized = onnx.load(tmp_path / "out/model.onnx")
    onnx.checker.check_model(quantized)
    names = {name for node in quantized.graph.node for name in (*node.input, *node.output)}
    assert {"x", "logits", "x_scale", "x_zero_point"} <= names  # those of the graph are as they were


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO, logging.CRITICAL])
def test_disabled_log_level_is_restored(tmp_path: Path, level: int) -> None:
    previous_level = logging.root.manager.disable
    logging.disable(level)
    try:
        run(tmp_path, graphs.two_layer_classifier())
        assert logging.root.manager.disable == level
    finally:
        logging.disable(previous_level)


@pytest.mark.parametrize("inside", [False, True])
def test_dynamic_product_with_vector_is_kept_float(tmp_path: Path, inside: bool) -> None:
    """ONNX Runtime's int8 operators reject a vector, which stopped the whole graph."""
    product = helper.make_node("MatMul", ["h", "v"], ["z"], "scores")
    last = product
    if inside:
        branch = helper.make_graph([product], "branch", [], [graphs.value_info("z", ["N"])])
        last = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "first"), last]
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=size).astype(np.float32) for name, size in (("w", (8, 8)), ("v", 8))}
    arrays |= {"yes": np.array(True)} if inside else {}
    weights = [numpy_helper.from_array(value, name) for name, value in arrays.items()]
    ends = [graphs.value_info("x", ["N", 8])], [graphs.value_info("y" if inside else "z", ["N"])]
    ctx = run(tmp_path, graphs.make_model(nodes, *ends, weights))
    assert set(message_codes(ctx.warnings)) == {"nodes-kept-float"}
    assert inside or "scores" in ctx.warnings[0].message  # in a branch names are made unique
    assert "MatMulInteger" in operators(tmp_path)
    assert ctx.details["parity"]["error"] < 0.05


@pytest.mark.parametrize(("group", "bias"), [(2, True), (2, False), (1, True)])
def test_grouped_conv_transpose_with_bias_has_one_weight_scale(
    tmp_path: Path, group: int, bias: bool
) -> None:
    """Its scales per channel are those of one group, and did not fit to the bias of all groups."""
    random = np.random.default_rng(0)
    arrays = {"w": random.normal(size=(4, 6 // group, 3, 3)), "b": random.normal(size=6)}
    names = ["w", "b"] if bias else ["w"]
    weights = [numpy_helper.from_array(arrays[name].astype(np.float32), name) for name in names]
    node = helper.make_node("ConvTranspose", ["x", *names], ["y"], "up", group=group, strides=[2, 2])
    signature = [graphs.value_info("x", ["N", 4, 5, 5])], [graphs.value_info("y", ["N", 6, 11, 11])]
    source = graphs.make_artifact(tmp_path / "src", graphs.make_model([node], *signature, weights))
    x = random.normal(size=(24, 4, 5, 5)).astype(np.float32)
    data = {"calibration": split_from_arrays("x.npz", SampleArrays({"x": x}, len(x)))}
    settings = QuantizeOnnxSettings(scheme="int8-static", op_types=("ConvTranspose",))
    ctx = harness.run_stage(QuantizeOnnx(), settings, source, tmp_path / "out", data=data)
    assert message_codes(ctx.warnings) == (["per-tensor-weights"] if group > 1 and bias else [])
    assert ctx.details["parity"]["error"] < 0.05
    scales = {t.name: t for t in onnx.load(tmp_path / "out/model.onnx").graph.initializer}["w_scale"]
    assert np.prod(scales.dims) == (1 if group > 1 and bias else 6 // group)


def unrolled_model(steps: int = 6, width: int = 64) -> Any:
    """A recurrent layer, unrolled: one weight and one bias of several Gemm nodes."""
    rng = np.random.default_rng(3)
    weights = [
        numpy_helper.from_array((rng.normal(size=size) * 0.1).astype(np.float32), name)
        for name, size in (("w", (width, width)), ("b", (width,)), ("w0", (width, 8)))
    ]
    nodes = [helper.make_node("Gemm", ["x", "w0"], ["t0"], "first", transB=1)]
    for step in range(steps):
        gemm = helper.make_node("Gemm", [f"t{step}", "w", "b"], [f"g{step}"], f"gemm{step}", transB=1)
        nodes += [gemm, helper.make_node("Tanh", [f"g{step}"], [f"t{step + 1}"], f"tanh{step}")]
    nodes.append(helper.make_node("Identity", [f"t{steps}"], ["y"], "last"))
    ends = [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", width])]
    return graphs.make_model(nodes, *ends, weights)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_weight_of_several_nodes_is_stored_once(tmp_path: Path, scheme: str) -> None:
    ctx = run(tmp_path, unrolled_model(), scheme=scheme)
    bare = onnx.load(tmp_path / "out/model.onnx", load_external_data=False)
    copies = [
        {field.key: field.value for field in tensor.external_data}
        for tensor in bare.graph.initializer
        if sorted(tensor.dims) == [64, 64]
    ]
    assert len(copies) == 6
    assert {(fields["location"], fields["offset"]) for fields in copies} == {
        ("model.onnx_data", copies[0]["offset"])
    }
    weights = 64 * 64 + 64 * 8  # bytes of int8
    assert (tmp_path / "out/model.onnx_data").stat().st_size < 1.3 * weights + 4096
    assert "larger-file" not in message_codes(ctx.warnings)
    x = graphs.make_split(seed=9).arrays.values["x"]
    actual, expected = (
        graphs.run_directly(tmp_path / side / "model.onnx", {"x": x})["y"] for side in ("out", "src")
    )
    assert 0 < np.abs(actual - expected).mean() / expected.std() < 0.05


def test_weight_of_float_and_int8_nodes_is_stored_once(tmp_path: Path) -> None:
    """The quantizer dequantizes the int8 matrix for the Mul; without VNNI both may not read one tensor."""
    weight = numpy_helper.from_array(np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "product"),
        helper.make_node("ReduceSum", ["x"], ["total"], "sum", keepdims=0),
        helper.make_node("Mul", ["w", "total"], ["scaled"], "scale"),
        helper.make_node("ReduceMean", ["scaled"], ["row"], "mean", axes=[0], keepdims=0),
        helper.make_node("Add", ["h", "row"], ["y"], "add"),
    ]
    ends = [graphs.value_info("x", ["N", 512])], [graphs.value_info("y", ["N", 512])]
    source = graphs.make_artifact(tmp_path / "src", graphs.make_model(nodes, *ends, [weight]))
    x = np.random.default_rng(1).normal(size=(8, 512)).astype(np.float32)
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": x}, 8))}
    harness.run_stage(QuantizeOnnx(), QuantizeOnnxSettings(), source, tmp_path / "out", data=data)
    readers = [node.op_type for node in onnx.load(tmp_path / "out/model.onnx").graph.node]
    assert {"DequantizeLinear", "MatMulInteger"} <= set(readers)
    size = sum(file.stat().st_size for file in (tmp_path / "out").glob("model.onnx*"))
    assert size < 0.27 * (tmp_path / "src/model.onnx").stat().st_size


def test_file_that_grows_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = message_codes(run(tmp_path / "slack", graphs.two_layer_classifier()).warnings)
    assert "larger-file" not in codes
    monkeypatch.setattr(quantize_onnx, "_SLACK_BYTES", 0)
    warnings = run(tmp_path, graphs.two_layer_classifier()).warnings
    [larger] = [warning for warning in warnings if warning.code == "larger-file"]
    model = onnx.load(tmp_path / "out/model.onnx")
    weights = [
        t for t in model.graph.initializer if len(t.dims) == 2 and t.data_type == onnx.TensorProto.INT8
    ]
    assert f" +{sum(tensor.ByteSize() for tensor in weights):,}" in larger.message


def test_stored_bytes_count_integers_floats_and_copies(tmp_path: Path) -> None:
    """A file grows by copies of a weight, by floats next to the integers, or by nodes with their scales."""
    random = np.random.default_rng(0)
    matrix, codes = random.normal(size=(64, 32)).astype(np.float32), np.eye(64, 32, dtype=np.int8)
    tensors = {"w": matrix, "same": matrix, "other": -matrix, "codes": codes, "scale": matrix[:1]}
    weights = [numpy_helper.from_array(values, name) for name, values in tensors.items()]
    ends = [graphs.value_info("x", ["N", 64])], [graphs.value_info("y", ["N", 32])]
    model = graphs.make_model([helper.make_node("MatMul", ["x", "w"], ["y"])], *ends, weights)
    graphs.save_model(model, tmp_path / "model.onnx")
    total = (tmp_path / "model.onnx").stat().st_size
    sizes = quantize_onnx.stored_bytes([onnx.load(tmp_path / "model.onnx")], total)
    weight_bytes = np.array([codes.nbytes, 2 * matrix.nbytes, matrix.nbytes])
    parts = np.array(
        [sizes[name] for name in ("integer weights", "float weights", "copies of equal weights")]
    )
    assert (np.abs(parts - weight_bytes) < 100).all()  # names and shapes
    assert sizes.total() == total
    # copies in one data file are stored once
    share_weights([tmp_path / "model.onnx"])
    external = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    sizes = quantize_onnx.stored_bytes([external], total)
    assert sizes["copies of equal weights"] == 0
    assert sizes["float weights"] == 2 * matrix.nbytes


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_float16_and_float64_weights_are_quantized_from_float32(
    tmp_path: Path, scheme: str, dtype: Any
) -> None:
    model = graphs.two_layer_classifier(width=64)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor).astype(np.float16)  # equal in all types
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))
    run(tmp_path / "wide", model, scheme=scheme)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = kind
    run(tmp_path, model, scheme=scheme)
    converted, wide = (onnx.load(folder / "out/model.onnx") for folder in (tmp_path, tmp_path / "wide"))
    ends = [v.type.tensor_type.elem_type for v in (*converted.graph.input, *converted.graph.output)]
    assert set(ends) == {kind}
    codes, expected = (
        {
            t.name: numpy_helper.to_array(t)
            for t in m.graph.initializer
            if t.data_type == 3 and len(t.dims) == 2
        }
        for m in (converted, wide)
    )
    assert len(codes) == 2
    for name, values in expected.items():
        np.testing.assert_array_equal(codes[name], values)
    x = graphs.make_split(seed=9).arrays.values["x"].astype(dtype)
    outputs = graphs.run_directly(tmp_path / "out/model.onnx", {"x": x})["logits"]
    reference = graphs.run_directly(tmp_path / "wide/out/model.onnx", {"x": x.astype(np.float32)})["logits"]
    assert outputs.dtype == dtype
    assert np.abs(outputs - reference).max() < 0.02 * reference.std()
