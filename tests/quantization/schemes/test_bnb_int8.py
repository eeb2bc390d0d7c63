"""LLM.int8 against bitsandbytes itself and against the paper's formula."""

import logging

import pytest
import torch
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.core.errors import InputError
from smelt.quantization.emit import exporting_to
from smelt.quantization.schemes.bitsandbytes import OUTLIER_THRESHOLD
from tests.support import schemes
from tests.support.expected_errors import raises_code

bitsandbytes = pytest.importorskip("bitsandbytes", reason="the extra bitsandbytes is not installed")
functional = bitsandbytes.functional


def activations():
    torch.manual_seed(1)
    x = torch.randn(3, 5, 192)
    x[1, 2, 7], x[0, 0, 100], x[2, 4] = 9.0, -6.5, 0.0
    return x


def test_weights_and_scales_equal_bitsandbytes_bitwise():
    torch.manual_seed(0)
    weight = torch.randn(24, 192) * 0.02
    weight[2] = 0
    matrix = schemes.rounded_matrix("bnb-int8", weight)
    codes, scales, _ = functional.int8_vectorwise_quant(weight.clone())
    assert matrix.codes.equal(codes)
    assert matrix.scales.equal(scales)
    assert matrix.dequantize().equal(functional.int8_vectorwise_dequant(codes, scales))


def test_layer_equals_bitsandbytes_linear8bitlt(caplog):
    """Both have the same codes: bitsandbytes itself would round the weights to float16 first."""
    torch.manual_seed(0)
    layer, x = quantize_module(nn.Linear(192, 24), "bnb-int8"), activations()
    state = bitsandbytes.MatmulLtState()
    state.CB, state.SCB = layer.matrix.codes.data, layer.matrix.scales.data
    state.has_fp16_weights, state.is_training = False, False
    with torch.inference_mode(), caplog.at_level(logging.ERROR):
        expected = bitsandbytes.matmul(x, state.CB, state=state, threshold=OUTLIER_THRESHOLD, bias=layer.bias)
        assert layer(x).equal(expected)


def test_activations_without_outliers_are_unchanged():
    layer, x = quantize_module(nn.Linear(192, 24), "bnb-int8"), activations()
    before = x.clone()
    with torch.inference_mode():
        layer(x)
    assert x.equal(before)


def test_export_to_a_graph_is_refused():
    layer = quantize_module(nn.Linear(64, 8), "bnb-int8")
    with (
        exporting_to("ort-cpu"),
        raises_code("unsupported-target", InputError) as caught,
    ):
        layer(torch.randn(2, 64))
    assert all(part in str(caught.value) for part in ("bnb-int8", "ort-cpu"))
