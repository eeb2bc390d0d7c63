"""int8 with ranges that are known before: by hand, and against ONNX Runtime's operators."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from smelt.quantization.layers import QuantizedLinear
from smelt.quantization.scheme import UnpackedWeights
from tests.support import schemes
from tests.support.graphs.ort_sessions import needs_vnni, ort_session

RANGES = {"of both signs": (-1.5, 2.5), "after a GELU": (-0.17, 2.5), "after a ReLU": (0.0, 2.5)}
SYMMETRIC = {"activations_symmetric": True}


def layer(low: float = -2.5, high: float = 2.5, symmetric: bool = True) -> QuantizedLinear:
    torch.manual_seed(0)
    options = {"activations_symmetric": symmetric}
    module: QuantizedLinear = schemes.with_activation_range(
        nn.Linear(48, 40), "int8-static", options, largest=high, lowest=low
    )
    return module


def constants(quantized_layer: QuantizedLinear, zero: np.ndarray) -> list:
    matrix = quantized_layer.matrix
    values = {
        "columns": np.ascontiguousarray(matrix.codes.numpy().T), "scales": matrix.scales.numpy(),
        "scale": matrix.input_scale.numpy(), "zero": zero, "bias": quantized_layer.bias.detach().numpy(),
    }  # fmt: skip
    return [numpy_helper.from_array(value, name) for name, value in values.items()]


def test_activations_are_rounded_half_to_even_and_clipped_at_both_ends():
    matrix = schemes.rounded_matrix("int8-static", torch.eye(7), **SYMMETRIC)
    matrix.set_activation_range_(-50.0, 127.0)  # a scale of 1
    product = QuantizedLinear(7, False, matrix)
    x = torch.tensor([0.5, 1.5, -2.5, 126.6, 128.0, -127.6, -200.0])
    assert product(x).allclose(torch.tensor([0.0, 2.0, -2.0, 127.0, 127.0, -128.0, -128.0]), atol=1e-4)


def test_range_is_the_magnitude_of_the_largest_level():
    matrix = schemes.rounded_matrix("int8-static", torch.ones(2, 3), **SYMMETRIC)
    assert float(matrix.input_scale) == 1.0
    matrix.set_activation_range_(-3.0, 2.0)
    assert float(matrix.input_scale) == pytest.approx(3 / 127)
    matrix.set_activation_range_(0.0, 0.0)  # a layer that only ever got zeros
    assert float(matrix.input_scale) == 1.0
    assert not matrix.has("input_zero_point")


def test_new_weights_keep_the_calibration_range():
    matrix = layer(-1.0, 3.0, symmetric=False).matrix
    matrix.set_weight_(UnpackedWeights(matrix.unpack().q_weight * 0, matrix.unpack().qparams))
    assert float(matrix.input_scale) == pytest.approx(4 / 255)
    assert int(matrix.input_zero_point) == -64


@pytest.mark.parametrize("name", RANGES)
def test_layer_equals_quantize_linear_in_float64(name):
    """ONNX operators QuantizeLinear and DequantizeLinear around a product of float64 numbers."""
    (low, high), x = RANGES[name], 2 * torch.randn(5, 48)
    module = layer(low, high, symmetric=False)
    scale = (high - low) / 255
    zero = np.rint(-128 - low / scale)
    codes = np.clip(np.rint(x.double().numpy() / scale) + zero, -128, 127)
    weight, bias = module.matrix.dequantize().double().numpy(), module.bias.detach().double().numpy()
    expected = ((codes - zero) * scale) @ weight.T + bias
    assert {-128, 127} <= set(codes.ravel())
    assert np.abs(module(x).detach().numpy() - expected).max() < 1e-5


@pytest.mark.parametrize("target", ["ort-cpu", "openvino", "tensorrt"])
@pytest.mark.parametrize("name", RANGES)
def test_exported_layer_equals_torch(name, target):
    """In ONNX Runtime; graphs of standard operators in onnx's own evaluator.

    On CPUs uint8 activations, which their kernels multiply with int8 weights.
    """
    x = 2 * torch.randn(1, 5, 48)
    module = layer(*RANGES[name], symmetric=False)
    graph = schemes.export_layers([module], x, target)
    zero_points = {n.input[2] for n in graph.graph.node if n.op_type == "QuantizeLinear"}
    [zero_point] = [numpy_helper.to_array(t) for t in graph.graph.initializer if t.name in zero_points]
    is_unsigned = target != "tensorrt"
    assert zero_point.dtype == (np.uint8 if is_unsigned else np.int8)
    assert int(zero_point) == int(module.matrix.input_zero_point) + 128 * is_unsigned
    if target == "ort-cpu":
        [actual] = schemes.run_onnx_runtime([module], x)
    else:
        [actual] = ReferenceEvaluator(graph).run(None, {"x": x.numpy()})
    assert np.abs(module(x).detach().numpy() - actual).max() < 1e-5


@needs_vnni
@pytest.mark.parametrize("form", ["integers", "explicit"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_layer_equals_onnx_runtime(form, symmetric):
    """Codes of activations and sums of products exactly; what is scaled, to the rounding of float32."""
    module = layer(-1.5, 2.5, symmetric)
    x = 2 * torch.randn(5, 48)  # some beyond the range
    unsigned = form == "integers"
    zero_point = 0 if symmetric else int(module.matrix.input_zero_point)
    zero = np.array(128 + zero_point, np.uint8) if unsigned else np.array(zero_point, np.int8)
    nodes = [helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"])]
    if unsigned:
        inputs = ["codes", "columns", "scale", "scales", "zero", "", "bias"]
        nodes.append(helper.make_node("MatMulIntegerToFloat", inputs, ["y"], domain="com.microsoft"))
    else:
        nodes += [
            helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["left"]),
            helper.make_node("DequantizeLinear", ["columns", "scales"], ["weight"], axis=1),
            helper.make_node("MatMul", ["left", "weight"], ["product"]),
            helper.make_node("Add", ["product", "bias"], ["y"]),
        ]
    nodes.append(helper.make_node("MatMulInteger", ["codes", "columns", "zero"], ["sums"]))
    kind = TensorProto.UINT8 if unsigned else TensorProto.INT8
    outputs = [("codes", kind), ("sums", TensorProto.INT32), ("y", TensorProto.FLOAT)]
    session = ort_session(nodes, [("x", TensorProto.FLOAT)], outputs, constants(module, zero))
    codes, sums, y = session.run(None, {"x": x.numpy()})
    q_input = x.div(module.matrix.input_scale).round().add(zero_point).clamp(-128, 127).int().numpy()
    assert np.array_equal(codes.astype(np.int32) - int(zero), q_input - zero_point)
    assert {-128, 127} <= set(q_input.ravel())
    assert np.array_equal(sums, (q_input - zero_point) @ module.matrix.codes.int().numpy().T)
    assert np.abs(module(x).detach().numpy() - y).max() < 1e-5


def test_row_has_the_same_output_in_any_batch():
    """In ONNX Runtime bit for bit."""
    alone, among = products("int8-static")
    assert np.array_equal(alone, among)


@pytest.mark.parametrize("scheme", ["int4", "int8-groupwise", "binary"])
def test_schemes_with_activation_blocks_differ_only_in_summation_order(scheme):
    alone, among = products(scheme)
    assert np.abs(alone - among).max() < 1e-5


def products(scheme: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what a layer's graph gives for three rows, and for them among others, one of them huge."""
    import onnxruntime

    from smelt.export.graphs.attention import GraphSpec
    from smelt.export.graphs.export_graph import export_graph
    from smelt.export.simplify_graph import expand_placeholders
    from smelt.runtimes.onnx_session import session_options

    torch.manual_seed(1)
    module = nn.Sequential(schemes.with_activation_range(nn.Linear(256, 96), scheme))
    module.attentions = ()
    x = torch.randn(16, 256)
    x[7] *= 40
    graph = GraphSpec("model", module.eval(), (x,), ["x"], ["y"], ({0: "rows"},))
    onnx_model = export_graph(graph, "ort-cpu", 20)
    expand_placeholders(onnx_model)
    session = onnxruntime.InferenceSession(
        onnx_model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
    )
    alone = np.concatenate([session.run(None, {"x": x[index : index + 1].numpy()})[0] for index in (2, 3, 9)])
    return alone, session.run(None, {"x": x.numpy()})[0][[2, 3, 9]]
