import itertools

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from smelt.core.errors import InputError
from smelt.export.load_time import spell_out
from smelt.runtime.layers.emit import LOAD_TIME
from smelt.runtime.layers.quantized import empty_quantized, joined
from smelt.runtime.layers.quantized_binary import BinaryLinear, pack_bits, unpack_bits


def random_layer(inputs=100, outputs=24, group=32, level=4, bias=True):
    torch.manual_seed(0)
    layer = BinaryLinear(inputs, outputs, bias, group_size=group, accuracy_level=level).eval()
    rows, groups, _ = layer.matrix.codes.shape
    positive = torch.rand(rows, groups, group) < 0.5
    layer.matrix.set_(positive, torch.rand(rows, groups) + 0.5)
    if bias:
        layer.bias.data = torch.randn(outputs)
    return layer, positive


def spelled_out(layer):
    """A graph as the onnx stage leaves it: place-holders, then their standard operators."""
    constants = {
        "bits": layer.matrix.codes.numpy(),
        "half": layer.matrix.scales.half().numpy(),
        "bias": layer.bias.detach().numpy(),
    }
    nodes = [
        helper.make_node("TwoBitCodes", ["bits"], ["codes"], domain=LOAD_TIME),
        helper.make_node("FloatScales", ["half"], ["scales"], domain=LOAD_TIME),
        helper.make_node(
            "MatMulNBits", ["x", "codes", "scales", "", "", "bias"], ["y"], domain="com.microsoft",
            K=layer.in_features, N=layer.out_features, bits=2, block_size=layer.matrix.group_size,
            accuracy_level=layer.accuracy_level,
        ),
    ]  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, None)], [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid(n, v) for n, v in (("", 20), ("com.microsoft", 1), (LOAD_TIME, 1))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    assert spell_out(model) == 2
    return model


def test_bit_i_of_byte_j_is_weight_8j_plus_i():
    bits = torch.zeros(1, 16, dtype=torch.bool)
    bits[0, [0, 3, 15]] = True
    assert pack_bits(bits).tolist() == [[0b00001001, 0b10000000]]


def test_all_bytes_survive_packing():
    bits = torch.tensor(list(itertools.product([False, True], repeat=8)))
    assert unpack_bits(pack_bits(bits)).equal(bits)
    assert sorted(pack_bits(bits).flatten().tolist()) == list(range(256))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("level", [0, 4])
def test_layer_equals_two_bit_matmul_nbits(group, level):
    import onnxruntime

    layer, _ = random_layer(group=group, level=level)
    x = torch.randn(3, 5, 100)
    model = spelled_out(layer)
    assert {n.domain for n in model.graph.node} == {"", "com.microsoft"}
    assert [o.domain for o in model.opset_import] == ["", "com.microsoft"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": x.numpy()})[0]
    with torch.inference_mode():
        got = layer(x).numpy()
    assert np.abs(got - expected).max() < 1e-5 * expected.std()


def test_a_session_unpacks_the_bits_once_when_it_opens(tmp_path):
    """The graph that ONNX Runtime runs has no Gather and no Cast any more."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    layer, _ = random_layer()
    onnxruntime.InferenceSession(
        spelled_out(layer).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    assert [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node] == ["MatMulNBits"]


def test_values_by_hand():
    layer, positive = random_layer(bias=False)
    row, column = 5, 77
    group, place = divmod(column, 32)
    sign = 1 if positive[row, group, place] else -1
    assert float(layer.matrix.dequantize()[row, column]) == sign * float(layer.matrix.scales[row, group])
    assert layer.matrix.dequantize().shape == (24, 100)


def test_embeddings_and_groups_without_a_kernel_are_refused():
    options = {"group_size": 64, "accuracy_level": 4}
    with pytest.raises(
        InputError, match=r"scheme binary: a Embedding cannot be quantized; expected a Linear\."
    ):
        empty_quantized(nn.Embedding(4, 8), "binary", **options)
    with pytest.raises(InputError, match="group size 16; expected one of 32, 64, 128"):
        empty_quantized(nn.Linear(64, 8), "binary", **options | {"group_size": 16})


def test_layers_of_one_input_are_joined():
    first, _ = random_layer(outputs=8)
    second, _ = random_layer(outputs=12, bias=False)
    x = torch.randn(2, 100)
    whole = joined([first, second])
    assert whole is not None
    assert whole(x).allclose(torch.cat([first(x), second(x)], dim=1), atol=1e-5)
