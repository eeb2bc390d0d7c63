import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smelt.compress.quantize.plan_layers import quantize_module, round_to_nearest
from smelt.core.errors import InputError
from smelt.export.parity.references import dequantize_graph
from smelt.quantization.layers import empty_quantized
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.registry import SCHEMES, default_options
from smelt.quantization.schemes.ternary import Binary
from smelt.runtimes.onnx_session import session_options
from tests.support import schemes
from tests.support.expected_errors import raises_code


def random_layer(group, level):
    torch.manual_seed(0)
    positive = torch.rand(24, -(-100 // group), group) < 0.5
    decided = UnpackedWeights(positive, {"scales": torch.rand(positive.shape[:2]) + 0.5})
    return schemes.random_quantized_layer("binary", decided, group_size=group, accuracy_level=level)


def test_every_layout_is_exported_as_torch_computes_and_bits_are_unpacked_once(tmp_path):
    layers = [random_layer(group, level) for group in (32, 64, 128) for level in (0, 4)]
    attributes = schemes.fused_matmul_attributes(layers, tmp_path / "optimized.onnx")
    assert {(a["accuracy_level"], a["bits"]) for a in attributes} == {(0, 4), (4, 2)}


@pytest.mark.parametrize("scheme", ["binary", "ternary"])
def test_four_bit_activations_are_rounded_before_a_float_operator(scheme):
    """The graph rounds as torch does; its dequantized copy does not round, for the exact comparison."""
    torch.manual_seed(0)
    options = default_options(SCHEMES[scheme]) | {"group_size": 32, "activation_bits": 4}
    layer = quantize_module(nn.Linear(100, 24), scheme, options).eval()
    x = torch.randn(2, 3, 100)
    x[0, 0, :32] = 0
    graph = schemes.export_layers([layer], x)
    levels = [a.i for node in graph.graph.node for a in node.attribute if a.name == "accuracy_level"]
    assert levels == [0]
    with torch.inference_mode():
        expected = layer(x).numpy()
        exact = F.linear(x, layer.matrix.dequantize(), layer.bias).numpy()
    assert np.abs(run_graph(graph, x) - expected).max() < 1e-5 * expected.std()
    assert np.abs(expected - exact).max() > 0.05 * exact.std()
    assert dequantize_graph(graph) == 1
    assert np.abs(run_graph(graph, x) - exact).max() < 1e-5 * exact.std()


def run_graph(graph, x):
    """What ONNX Runtime computes."""
    session = onnxruntime.InferenceSession(
        graph.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x.numpy()})[0]


def test_groups_without_a_kernel_are_refused():
    with raises_code("wrong-value", InputError) as caught:
        empty_quantized(
            nn.Linear(64, 8), "binary", {"group_size": 16, "accuracy_level": 4, "activation_bits": 8}
        )
    assert all(part in str(caught.value) for part in ("16", "32, 64, 128"))
    assert caught.value.setting == "group_size"


def test_table_expands_a_byte_into_eight_values():
    two, four = Binary().unpacking_tables().values()
    for byte in (0, 1, 0b10010110, 255):
        codes = [int(two[byte, i // 4]) >> (2 * (i % 4)) & 3 for i in range(8)]
        assert codes == [3 if byte >> i & 1 else 1 for i in range(8)]
        codes = [int(four[byte, i // 2]) >> (4 * (i % 2)) & 15 for i in range(8)]
        assert codes == [9 if byte >> i & 1 else 7 for i in range(8)]


def test_signs_and_scales_equal_binary_weight_networks():
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


def test_padding_of_a_group_is_excluded_from_its_mean():
    positive, grid = round_to_nearest(torch.full((1, 40), -0.5), Binary(), {"group_size": 32})
    assert grid["scales"].tolist() == [[0.5, 0.5]]
    assert not positive.flatten()[:40].any()


def test_zero_counts_as_positive():
    matrix = schemes.rounded_matrix("binary", torch.tensor([[0.0, -1.0] * 16]), group_size=32)
    assert matrix.dequantize().tolist() == [[0.5, -0.5] * 16]
