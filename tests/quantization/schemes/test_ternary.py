import itertools

import numpy as np
import pytest
import torch

from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.ternary import Ternary
from tests.support import schemes

LAYOUTS = list(itertools.product((32, 64, 128), ("group", "channel"), (0, 4)))


def random_layer(inputs=100, outputs=24, group=32, granularity="group", level=4):
    torch.manual_seed(0)
    options = {"group_size": group, "granularity": granularity, "accuracy_level": level}
    options |= {"activation_bits": 8}
    size = Ternary().group_size(inputs, options)
    codes = torch.randint(0, 3, (outputs, -(-inputs // size), size), dtype=torch.uint8)
    grid = {"scales": torch.rand(outputs, codes.shape[1]) + 0.5}
    return schemes.random_quantized_layer("ternary", UnpackedWeights(codes, grid), inputs, **options)


def test_every_layout_is_exported_as_torch_computes_and_unpacked_once(tmp_path):
    layers = [random_layer(group=g, granularity=by, level=level) for g, by, level in LAYOUTS]
    attributes = schemes.fused_matmul_attributes(layers, tmp_path / "optimized.onnx")
    assert {(a["accuracy_level"], a["bits"]) for a in attributes} == {(0, 4), (4, 2)}


@pytest.mark.parametrize("granularity", ["group", "channel"])
def test_weights_and_scales_equal_ternary_weight_networks(granularity):
    """arXiv:1605.04711, D = 0.7 E|W|; +1 above D, -1 below -D, else 0; a = E(|W| beyond D)."""
    torch.manual_seed(0)
    weight = torch.randn(5, 96)
    weight[2, :32] = 0
    values = (
        schemes.rounded_matrix("ternary", weight, group_size=32, granularity=granularity).dequantize().numpy()
    )
    for row in range(5):
        for start in range(0, 96, 96 if granularity == "channel" else 32):
            group = weight[row, start : start + (96 if granularity == "channel" else 32)].double().numpy()
            size = np.abs(group)
            beyond = size > 0.7 * size.mean()
            alpha = size[beyond].mean() if beyond.any() else 0.0
            expected = np.where(beyond, np.sign(group), 0) * float(np.float16(alpha))
            np.testing.assert_allclose(values[row, start : start + len(group)], expected, rtol=2**-10)


def test_threshold_is_half_of_a_learned_scale():
    weight = torch.tensor([[[0.4, 0.6, -0.4, -0.6]]])
    assert Ternary().quantize(weight, {"scales": torch.ones(1, 1)}, {}).tolist() == [[[1, 2, 1, 0]]]


def test_padding_of_the_last_group_is_no_weight():
    """Mean 0.55, so that 0.1 lies within 0.7 of it; of 32 weights the mean would be 0.1375."""
    last = torch.tensor([[1.0, -1, 1, -1, 0.1, -0.1, 0.1, -0.1]])
    weight = torch.cat([torch.ones(1, 32), last], dim=1)
    values = schemes.rounded_matrix("ternary", weight, group_size=32).dequantized()
    assert values[0, 32:].tolist() == [1, -1, 1, -1, 0, 0, 0, 0]
