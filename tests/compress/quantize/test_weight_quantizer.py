import pytest
import torch
from torch import nn

from smelt.compress.quantize.plan_layers import (
    fake_quantize,
    fake_quantize_activations,
    quantize_module,
    round_to_nearest,
)
from smelt.core.errors import InputError
from smelt.quantization.schemes.int8 import fake_quantize_dynamic
from tests.support import schemes
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("scheme", "options"), schemes.SCHEME_CASES, ids=schemes.SCHEME_IDS)
def test_fake_quantized_weights_equal_dequantized_and_gradient_passes_through(scheme, options):
    torch.manual_seed(0)
    weight = torch.randn(6, 40)
    weight[0, :4] = torch.tensor([1.5, -1.5, 0.0, 100.0])  # whatever the size of a weight
    weight.requires_grad_(True)
    matrix = schemes.rounded_matrix(scheme, weight, **options)
    values = fake_quantize(weight, matrix)
    assert values.equal(matrix.dequantize())
    slope = torch.randn(6, 40)
    (values * slope).sum().backward()
    assert weight.grad.equal(slope)


def test_fake_quantized_activations_equal_operator_and_gradient_passes_through():
    x = torch.linspace(-3.7, 2.2, 97, requires_grad=True)
    got = fake_quantize_activations(x, schemes.rounded_matrix("int8-dynamic", torch.ones(2, 97)))
    assert got.equal(fake_quantize_dynamic(x.detach()))
    got.mul(torch.arange(97.0)).sum().backward()
    assert x.grad.equal(torch.arange(97.0))
    assert (
        fake_quantize_activations(x, schemes.rounded_matrix("int4", torch.ones(2, 97), accuracy_level=0)) is x
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 7e4])
def test_unrepresentable_weights_are_rejected(wrong):
    layer = nn.Linear(32, 4)
    layer.weight.data[0, 0] = wrong
    with raises_code("non-finite-weights", InputError) as caught:
        quantize_module(layer, "int4")
    assert f"{wrong:g}" in str(caught.value)


def test_custom_quantizer_is_used():
    def halved(weight, scheme, options):
        return round_to_nearest(weight / 2, scheme, options)

    layer = nn.Linear(64, 4)
    custom = quantize_module(layer, "int4", quantizer=halved)
    expected = quantize_module(layer, "int4")
    assert custom.matrix.codes.equal(expected.matrix.codes)
    assert custom.matrix.dequantize().allclose(expected.matrix.dequantize() / 2)
    assert custom.bias.equal(layer.bias)
