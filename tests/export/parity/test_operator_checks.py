"""Quantized operators alone, on inputs that int8 holds exactly."""

import numpy as np
import onnx
import pytest
import torch

from smelt.compress.quantize.plan_layers import quantize_into, quantize_module
from smelt.core.errors import ParityError
from smelt.export.graph_files import read_graph
from smelt.export.parity import operator_checks
from smelt.export.parity.operator_checks import check_operators
from smelt.quantization.scheme import QuantizedGraph
from smelt.quantization.schemes.registry import default_options, find_scheme, owner_of_operator
from tests.support.expected_errors import raises_code
from tests.support.graphs import graph_exports


def asked(scheme, graph=0):
    """Return name, onnx.ModelProto, module and path of a Marian's graph."""
    exported = graph_exports.exported_graphs("marian", scheme)
    graph_info = exported.subject.graphs[graph]
    path = exported.folder / f"{graph_info.name}.onnx"
    return graph_info.name, read_graph(path), graph_info.module, path


@pytest.mark.parametrize("scheme", ["int8", "static", "groupwise", "int4", "binary"])
def test_operators_and_layers_agree_up_to_summation_rounding(scheme, monkeypatch):
    monkeypatch.setattr(operator_checks, "_TOLERANCE", 1e-5)
    monkeypatch.setattr(operator_checks, "_WEIGHTS_AT_ONCE", 20_000)  # several sessions
    for graph in (0, 1):
        name, model, module, path = asked(scheme, graph)
        view = QuantizedGraph(model.graph)
        quantized = [n for n in model.graph.node if owner_of_operator(n, view)]
        assert check_operators(name, model, module, path, 1) == len(quantized) > 5
        assert not list(path.parent.glob(".*"))


def test_qdq_matmuls_are_checked_with_their_quantize_nodes():
    exported = graph_exports.exported_graphs("marian", "symmetric static", "tensorrt")
    for graph in exported.subject.graphs:
        path = exported.folder / f"{graph.name}.onnx"
        model = read_graph(path)
        codes = sum(n.op_type == "QuantizeLinear" for n in model.graph.node)
        assert check_operators(graph.name, model, graph.module, path, 1) == codes > 5
    scale = next(t for t in model.graph.initializer if t.name.endswith("input_scale"))
    values = onnx.numpy_helper.to_array(scale) * np.float32(2)
    scale.CopyFrom(onnx.numpy_helper.from_array(values, scale.name))
    with raises_code("operator-mismatch", ParityError) as excinfo:
        check_operators(graph.name, model, graph.module, path, 1)
    assert "(MatMul)" in str(excinfo.value)


def test_binary_inputs_and_complements_cover_all_weights():
    """So every weight is read, by half of the rows."""
    test_rows = operator_checks._binary_rows(40, 0.5)
    half = len(test_rows) // 2
    assert test_rows.dtype == np.float32
    np.testing.assert_array_equal(np.unique(test_rows), [0, 0.5])
    np.testing.assert_array_equal(test_rows[:half] + test_rows[half:], np.full((half, 40), 0.5))
    assert len(np.unique(test_rows, axis=0)) == len(test_rows)


def test_graph_without_quantized_operators_has_no_checks():
    name, model, module, path = asked("fp32")
    assert check_operators(name, model, module, path, 1) == 0


def test_operator_with_weights_of_another_layer_is_named():
    name, model, module, path = asked("int8")
    products = [n for n in model.graph.node if n.op_type == "DynamicQuantizeMatMul"]
    sizes = {t.name: list(t.dims) for t in model.graph.initializer}
    first = products[0]
    other = next(n for n in products[1:] if sizes[n.input[1]] == sizes[first.input[1]])
    scales = list(first.input)[2]
    first.input[2] = other.input[2]
    with raises_code("operator-mismatch", ParityError) as excinfo:
        check_operators(name, model, module, path, 1)
    assert excinfo.value.file == "encoder_model.onnx"
    assert "'node__symbolic' (DynamicQuantizeMatMul)" in str(excinfo.value)
    assert "encoder.layers.0.self_attn.pack.packed" in str(excinfo.value)
    first.input[2] = scales
    assert check_operators(name, model, module, path, 1)


def test_operator_without_layer_is_rejected():
    name, model, module, path = asked("int4")
    node = next(n for n in model.graph.node if n.op_type == "MatMulNBits")
    codes = next(t for t in model.graph.initializer if t.name == node.input[1])
    codes.name = node.input[1] = "val_7"
    with raises_code("unmatched-operator", ParityError) as excinfo:
        check_operators(name, model, module, path, 1)
    assert "(MatMulNBits)" in str(excinfo.value)
    assert "'val_7'" in str(excinfo.value)


def test_operators_that_cannot_run_raise_parity_error():
    name, model, module, path = asked("int4")
    node = next(n for n in model.graph.node if n.op_type == "MatMulNBits")
    next(a for a in node.attribute if a.name == "K").i = 999
    with raises_code("graph-failed", ParityError) as excinfo:
        check_operators(name, model, module, path, 1)
    assert excinfo.value.file == "encoder_model.onnx"
    assert not list(path.parent.glob(".*"))


def test_layers_with_equal_weights_are_matched_by_scales(monkeypatch):
    """W and -W have the same codes, which a graph holds once, under the name of the first."""
    name, model, module, path = asked("groupwise")
    products = [n for n in model.graph.node if n.op_type == "MatMulNBits"]
    sizes = {t.name: list(t.dims) for t in model.graph.initializer}
    first = products[0]
    other = next(n for n in products[1:] if sizes[n.input[1]] == sizes[first.input[1]])
    first_matrix, second_matrix = (
        module.get_submodule(n.input[1].rpartition(".matrix.")[0]).matrix for n in (first, other)
    )
    monkeypatch.setattr(second_matrix.codes, "data", first_matrix.codes.detach().clone())
    assert not torch.equal(first_matrix.scales, second_matrix.scales)
    other.input[1] = first.input[1]
    assert check_operators(name, model, module, path, 1) == len(products)


@pytest.mark.parametrize(("got", "passes"), [(2e-4, True), (2e-2, False), (1000.0, False)])
def test_canceling_sum_is_compared_within_rounding(got, passes):
    weight = torch.zeros(2, 32)
    weight[0, :2], weight[1, 2] = torch.tensor([1000.0, -1000.0]), 1.0
    layer = quantize_module(
        torch.nn.Linear(32, 2, bias=False),
        "ternary",
        default_options(find_scheme("ternary")) | {"group_size": 32},
    )
    quantize_into(layer.matrix, weight)
    assert layer.matrix.dequantize()[0, :2].tolist() == [1000.0, -1000.0]
    operator = operator_checks._QuantizedNode(
        onnx.NodeProto(name="n", op_type="MatMulNBits"), [], "l", layer, [], 1
    )
    x = np.ones((8, 32), dtype=np.float32)
    actual = np.tile(np.float32([got, 1.0]), (8, 1))
    if passes:
        operator_checks._compare("g", operator, x, actual)
        return
    with raises_code("operator-mismatch", ParityError) as excinfo:
        operator_checks._compare("g", operator, x, actual)
    assert " 0 " in str(excinfo.value)  # the output
