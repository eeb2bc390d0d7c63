import numpy as np
import pytest
import schemes
import torch
from expected_errors import raises_code
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from smelt.compress.quantize.plan_layers import round_to_nearest
from smelt.core.errors import InputError
from smelt.export.simplify_graph import expand_placeholders
from smelt.quantization.emit import LOAD_TIME_DOMAIN
from smelt.quantization.layers import concat_quantized, empty_quantized
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.binary import Binary


def random_layer(inputs=100, outputs=24, group=32, level=4, bias=True):
    torch.manual_seed(0)
    groups = -(-inputs // group)
    positive = torch.rand(outputs, groups, group) < 0.5
    decided = UnpackedWeights(positive, {"scales": torch.rand(outputs, groups) + 0.5})
    options = {"group_size": group, "accuracy_level": level}
    return schemes.random_quantized_layer("binary", decided, inputs, bias, **options), positive


def spelled_out(layer):
    """A graph as the onnx stage leaves it: place-holders, then their standard operators."""
    constants = {
        "bits": layer.matrix.codes.numpy(),
        "half": layer.matrix.scales.half().numpy(),
        "bias": layer.bias.detach().numpy(),
    }
    nodes = [
        helper.make_node("TwoBitCodes", ["bits"], ["codes"], domain=LOAD_TIME_DOMAIN),
        helper.make_node("FloatScales", ["half"], ["scales"], domain=LOAD_TIME_DOMAIN),
        helper.make_node(
            "MatMulNBits", ["x", "codes", "scales", "", "", "bias"], ["y"], domain="com.microsoft",
            K=layer.in_features, N=layer.out_features, bits=2, block_size=layer.matrix.options["group_size"],
            accuracy_level=layer.matrix.options["accuracy_level"],
        ),
    ]  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, None)], [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid(n, v) for n, v in (("", 20), ("com.microsoft", 1), (LOAD_TIME_DOMAIN, 1))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    assert expand_placeholders(model) == 2
    return model


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
    with raises_code("unsupported-layer", InputError) as caught:
        empty_quantized(nn.Embedding(4, 8), "binary", options)
    assert all(part in str(caught.value) for part in ("binary", "Embedding"))
    with raises_code("wrong-value", InputError) as caught:
        empty_quantized(nn.Linear(64, 8), "binary", options | {"group_size": 16})
    assert all(part in str(caught.value) for part in ("16", "32, 64, 128"))
    assert caught.value.setting == "group_size"


def test_layers_of_one_input_are_joined():
    first, _ = random_layer(outputs=8)
    second, _ = random_layer(outputs=12, bias=False)
    x = torch.randn(2, 100)
    whole = concat_quantized([first, second])
    assert whole is not None
    assert whole(x).allclose(torch.cat([first(x), second(x)], dim=1), atol=1e-5)


def test_the_table_spreads_a_byte_into_eight_codes():
    two, four = Binary().unpacking_tables().values()
    for byte in (0, 1, 0b10010110, 255):
        codes = [int(two[byte, i // 4]) >> (2 * (i % 4)) & 3 for i in range(8)]
        assert codes == [3 if byte >> i & 1 else 1 for i in range(8)]
        codes = [int(four[byte, i // 2]) >> (4 * (i % 2)) & 15 for i in range(8)]
        assert codes == [9 if byte >> i & 1 else 7 for i in range(8)]


def test_signs_and_scales_are_those_of_binary_weight_networks():
    """arXiv:1603.05279, eq. 6: B = sign(W), alpha = ||W||_1 / n, here for each group."""
    torch.manual_seed(0)
    weight = torch.randn(5, 96)
    weight[2, :32] = 0
    matrix = schemes.rounded_matrix("binary", weight, group_size=32)
    for row in range(5):
        for start in (0, 32, 64):
            group = weight[row, start : start + 32].numpy().astype(np.float64)
            alpha = np.abs(group).sum() / 32
            expected = np.where(group >= 0, 1, -1) * np.float16(alpha)
            assert np.array_equal(matrix.dequantize()[row, start : start + 32].numpy(), expected)


def test_alpha_is_the_best_scale_for_the_signs():
    torch.manual_seed(0)
    weight = torch.randn(1, 64)
    scales = round_to_nearest(weight, Binary(), {"group_size": 64}).qparams["scales"]
    losses = [(weight - a * scales * weight.sign()).square().sum() for a in (0.98, 1.0, 1.02)]
    assert losses[1] < min(losses[0], losses[2])


def test_a_group_that_is_filled_up_averages_over_its_own_weights():
    positive, grid = round_to_nearest(torch.full((1, 40), -0.5), Binary(), {"group_size": 32})
    assert grid["scales"].tolist() == [[0.5, 0.5]]
    assert not positive.flatten()[:40].any()


def test_a_zero_among_other_weights_counts_as_positive():
    matrix = schemes.rounded_matrix("binary", torch.tensor([[0.0, -1.0] * 16]), group_size=32)
    assert matrix.dequantize().tolist() == [[0.5, -0.5] * 16]
