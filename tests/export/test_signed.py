"""Codes of 4 bits for TensorRT: what a runtime makes of the bytes, in products and in tables."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.export.graphs.attention import GraphSpec
from smelt.export.graphs.export_graph import export_graph
from smelt.export.parity.references import dequantize_graph
from smelt.export.simplify_graph import expand_placeholders
from smelt.quantization.schemes.registry import default_options, find_scheme
from smelt.runtimes.onnx_session import open_onnx_session
from tests.support import schemes


def coded(module, size=64):
    """Return the module in codes as TensorRT takes them."""
    options = default_options(find_scheme("int4")) | {
        "group_size": size,
        "symmetric": "positive",
        "accuracy_level": 0,
    }
    return quantize_module(module, "int4", options).eval()


class Both(nn.Module):
    """A table and a head that are one matrix: ids -> scores of all words."""

    attentions = ()

    def __init__(self, width):
        super().__init__()
        self.table = coded(nn.Embedding(31, width))
        self.head = coded(nn.Linear(width, 31, bias=False))
        self.head.matrix = self.table.matrix

    def forward(self, ids):
        """Look up and multiply."""
        return self.head(self.table(ids))


def product(inputs, outputs, size=64):
    """Return a module of one layer."""
    module = nn.Sequential(coded(nn.Linear(inputs, outputs), size))
    module.attentions = ()
    return module.eval()


def exported(module, example):
    """Return the graph of `module` for TensorRT, place-holders spelled out."""
    graph = GraphSpec("model", module, (example,), ["x"], ["y"], ({0: "rows"},))
    model = export_graph(graph, "tensorrt", 21)
    assert expand_placeholders(model) > 0
    onnx.checker.check_model(model)
    return model


def computed(model, folder, x):
    """Return what ONNX Runtime makes of it as smelt opens graphs, with all that it fuses."""
    onnx.save(model, folder / "layer.onnx")
    return open_onnx_session(folder / "layer.onnx", 1).run(None, {"x": x.numpy()})[0]


def dequantized(model):
    """Return of each blocked DequantizeLinear the node, its codes and its scales."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if any(a.name == "block_size" for a in node.attribute)]
    return [(node, *(tensors[name] for name in node.input)) for node in nodes]


# 100: a group that is filled up; an odd number of outputs: bytes that two rows of columns share
@pytest.mark.parametrize(("inputs", "outputs", "size"), [(128, 6, 64), (100, 5, 64), (256, 7, 128)])
def test_matmul_uses_dequantized_weights(inputs, outputs, size, tmp_path):
    torch.manual_seed(0)
    module = product(inputs, outputs, size)
    x = torch.randn(3, inputs)
    matrix = module[0].matrix
    expected = nn.functional.linear(x, matrix.dequantized(), module[0].bias).detach().numpy()
    model = exported(module, x)
    # nobody rounds the activations, also where DequantizeLinear and MatMul become one operator
    np.testing.assert_allclose(computed(model, tmp_path, x), expected, rtol=1e-5, atol=2e-6)
    with torch.no_grad():
        np.testing.assert_allclose(module(x).numpy(), expected, rtol=1e-5, atol=2e-6)


def test_graph_stores_only_quantized_weights_and_scales():
    torch.manual_seed(0)
    module = product(100, 5)
    codes, grid = module[0].matrix.unpack()
    assert (grid["scales"] > 0).all()
    model = exported(module, torch.randn(3, 100))
    [(node, stored, scales)] = dequantized(model)
    assert stored.data_type == TensorProto.INT4
    assert len(stored.raw_data) == 128 * 5 / 2
    np.testing.assert_array_equal(
        numpy_helper.to_array(stored).astype(int), codes.flatten(1).t().numpy().astype(int) - 8
    )
    np.testing.assert_array_equal(numpy_helper.to_array(scales), grid["scales"].t().numpy())
    options = {attribute.name: attribute.i for attribute in node.attribute}
    assert options == {"axis": 0, "block_size": 64}
    (multiplied,) = [other for other in model.graph.node if other.op_type == "MatMul"]
    assert multiplied.input[1] == node.output[0]
    assert {tensor.name for tensor in model.graph.initializer if len(tensor.raw_data) >= 5 * 64} == {
        stored.name
    }


@pytest.mark.parametrize("width", [128, 100])
def test_tied_table_supports_lookup_and_matmul(width, tmp_path):
    torch.manual_seed(0)
    module = Both(width)
    ids = torch.tensor([[3, 30], [0, 7]])
    model = exported(module, ids)
    values = module.table.matrix.dequantized().detach()
    expected = (values[ids] @ values.t()).numpy()
    np.testing.assert_allclose(computed(model, tmp_path, ids), expected, rtol=1e-5, atol=1e-5)
    table_by_axis = {
        next(a.i for a in node.attribute if a.name == "axis"): stored
        for node, stored, _ in dequantized(model)
    }
    row_table, columns = (numpy_helper.to_array(table_by_axis[axis]) for axis in (1, 0))
    np.testing.assert_array_equal(row_table, columns.T)
    assert row_table.shape == (31, 128)


def test_dequantized_copy_keeps_blocks_of_unrounded_layers(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(
        coded(nn.Linear(128, 64)), schemes.with_activation_range(nn.Linear(64, 6), "int8-static")
    )
    module.attentions = ()
    x = torch.randn(3, 128)
    model = exported(module.eval(), x)
    nodes_before = [node.SerializeToString() for node, *_ in dequantized(model)]
    assert dequantize_graph(model) == 1
    assert [node.SerializeToString() for node, *_ in dequantized(model)] == nodes_before
    expected_output = x
    for layer in module:
        expected_output = nn.functional.linear(expected_output, layer.matrix.dequantized(), layer.bias)
    np.testing.assert_allclose(
        computed(model, tmp_path, x), expected_output.detach().numpy(), rtol=1e-5, atol=2e-6
    )
