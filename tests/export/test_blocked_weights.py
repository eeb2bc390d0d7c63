"""Codes in groups as a blocked DequantizeLinear: what a runtime makes of the bytes, and what a graph says."""

import io

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.core.errors import InputError
from smelt.export.simplify_graph import expand_placeholders
from smelt.quantization.emit import exporting_to
from smelt.quantization.schemes.registry import default_options, find_scheme
from smelt.runtimes.openvino_backend import ACTIVATION_BLOCKS, compile_graph
from tests.support.expected_errors import raises_code
from tests.support.graphs.ort_sessions import needs_vnni


def coded(inputs, outputs, scheme="int4", **options):
    """Return a layer in groups of 32."""
    kind = find_scheme(scheme)
    layer = quantize_module(
        nn.Linear(inputs, outputs), scheme, default_options(kind) | {"group_size": 32} | options
    )
    return layer.eval()


def exported(module, width):
    """Return the graph of `module` for OpenVINO, and its model."""
    for layer in module.modules():
        if hasattr(layer, "matrix"):
            layer.matrix.prepare_export("product")
    file = io.BytesIO()
    with exporting_to("openvino"), torch.no_grad():
        torch.onnx.export(
            module, (torch.randn(3, width),), file, dynamo=True, opset_version=21, verbose=False,
            input_names=["x"], output_names=["y"],
        )  # fmt: skip
    model = onnx.load_from_string(file.getvalue())
    assert expand_placeholders(model) > 0
    onnx.checker.check_model(model)
    return model


def run(model, x):
    """Return what ONNX Runtime computes as the graph stands, without operators that round activations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers).run(
        None, {"x": x}
    )[0]


# 96: three groups of 32, whose zero points do not fill their bytes; 100: a group that is filled up
@pytest.mark.parametrize(("scheme", "symmetric", "inputs"), [
    ("int4", True, 64), ("int4", False, 96), ("int4", False, 100), ("int8-groupwise", True, 100),
    ("int8-groupwise", False, 96),
])  # fmt: skip
def test_graph_multiplies_by_dequantized_weights(scheme, symmetric, inputs):
    torch.manual_seed(0)
    layer = coded(inputs, 5, scheme, symmetric=symmetric)
    x = torch.randn(3, inputs)
    expected = nn.functional.linear(x, layer.matrix.dequantized(), layer.bias).detach().numpy()
    model = exported(layer, inputs)
    np.testing.assert_allclose(run(model, x.numpy()), expected, rtol=1e-5, atol=1e-5)
    (node,) = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    bits = {onnx.TensorProto.UINT4: 4, onnx.TensorProto.UINT8: 8}[tensors[node.input[0]].data_type]
    assert bits == layer.matrix.scheme.bits
    groups = -(-inputs // 32)
    assert len(tensors[node.input[0]].raw_data) == 5 * groups * 32 * bits // 8
    assert sum(len(t.raw_data) == 5 * groups * 32 * bits // 8 for t in tensors.values()) == 1  # once


@pytest.mark.parametrize(("level", "blocks"), [(4, "32"), (0, "0")])
def test_graph_metadata_has_activation_block_size(level, blocks):
    options = {
        prop.key: prop.value for prop in exported(coded(64, 8, accuracy_level=level), 64).metadata_props
    }
    assert options[ACTIVATION_BLOCKS] == blocks


def test_mixed_activation_group_sizes_are_rejected():
    layers = nn.Sequential(coded(64, 64), coded(64, 8, group_size=64))
    with raises_code("mixed-group-sizes", InputError) as excinfo:
        exported(layers.eval(), 64)
    assert "32" in str(excinfo.value)
    assert "64" in str(excinfo.value)


@needs_vnni
@pytest.mark.parametrize(("level", "exact"), [(4, False), (0, True)])
def test_openvino_activation_rounding_equals_scheme(level, exact, tmp_path):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    layer = coded(256, 64, accuracy_level=level)
    x = torch.randn(3, 256)
    onnx.save(exported(layer, 256), tmp_path / "layer.onnx")
    openvino_output = compile_graph(tmp_path / "layer.onnx", "fp32", 1)({"x": x.numpy()})["y"]
    with torch.no_grad():
        rounded = layer(x).numpy()
        exact_output = nn.functional.linear(x, layer.matrix.dequantized(), layer.bias).numpy()
    np.testing.assert_allclose(openvino_output, rounded, atol=1e-5)
    assert np.allclose(openvino_output, exact_output, atol=1e-4) == exact


def test_int4_and_int8_groups_of_equal_size_share_block_size():
    layers = nn.Sequential(coded(64, 64), coded(64, 8, "int8-groupwise"))
    options = {prop.key: prop.value for prop in exported(layers.eval(), 64).metadata_props}
    assert options[ACTIVATION_BLOCKS] == "32"
