"""NF4 against bitsandbytes itself and against ONNX Runtime."""

import numpy as np
import pytest
import torch
from torch import nn

from smelt.compress.quantize.plan_layers import plan_layers, quantize_module
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.models.checkpoint import load_model
from smelt.quantization.schemes.bitsandbytes import NF4_BLOCK_SIZE, NF4_QUANT_TYPE, NF4_TABLE
from smelt.quantization.schemes.registry import SCHEMES, bits_per_weight
from tests.support import harness, schemes
from tests.support.models import tiny

bitsandbytes = pytest.importorskip("bitsandbytes", reason="the extra bitsandbytes is not installed")
functional = bitsandbytes.functional


def weights(rows=24, width=192, scale=0.02):
    torch.manual_seed(0)
    weight = torch.randn(rows, width) * scale
    weight[2] = 0
    weight[3, :64] = 0
    return weight


def test_weights_and_scales_equal_bitsandbytes_bitwise():
    weight = weights()
    matrix = schemes.rounded_matrix("bnb-nf4", weight)
    codes, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK_SIZE, quant_type=NF4_QUANT_TYPE)
    assert matrix.codes.flatten().equal(codes.flatten())
    assert matrix.scales.flatten().equal(state.absmax)
    assert matrix.dequantize().equal(functional.dequantize_4bit(codes, state))


def double_quantized(weight):
    """Codes and state of bitsandbytes, whose scales are quantized as well."""
    return functional.quantize_4bit(
        weight, blocksize=NF4_BLOCK_SIZE, quant_type=NF4_QUANT_TYPE, compress_statistics=True
    )


@pytest.mark.parametrize("rows", [24, 400])
def test_double_quantization_equals_bitsandbytes_bitwise(rows):
    """24 rows have one block of scales, 400 have four and a part."""
    weight = weights(rows=rows)
    matrix = schemes.rounded_matrix("bnb-nf4", weight, use_double_quant=True)
    codes, state = double_quantized(weight)
    assert matrix.codes.flatten().equal(codes.flatten())
    assert matrix.scale_codes.flatten().equal(state.absmax)
    assert matrix.scale_absmax.equal(state.state2.absmax)
    assert matrix.scale_offset.item() == state.offset.item()
    assert matrix.dequantize().equal(functional.dequantize_4bit(codes, state))
    assert not matrix.dequantize().equal(schemes.rounded_matrix("bnb-nf4", weight).dequantize())


def test_double_quantization_takes_the_bits_of_qlora():
    """Section 3 of the paper: 8 / 64 + 32 / (64 * 256) = 0.127 bits for the constants of a parameter."""
    scheme = SCHEMES["bnb-nf4"]
    bits = [bits_per_weight(scheme, {"use_double_quant": flag}) for flag in (False, True)]
    assert bits == [4.5, pytest.approx(4.127, abs=5e-4)]


def test_double_quantization_is_stored_loaded_and_exported(tmp_path):
    source, options = tiny.write_bert(tmp_path / "model"), {"scheme": "bnb-nf4", "use_double_quant": True}
    ctx = harness.run_stage(
        Quantize(), QuantizeSettings(**options), source, tmp_path / "out", "text-classification"
    )
    name = "bert.encoder.layer.0.output.dense"
    codes, state = double_quantized(load_model(source)[0].get_submodule(name).weight.detach())
    layer = load_model(ctx.out)[0].get_submodule(name)
    assert layer.matrix.dequantize().equal(functional.dequantize_4bit(codes, state))
    x = torch.randn(3, 5, 64)
    (actual,) = schemes.run_onnx_runtime([layer], x)
    with torch.inference_mode():
        assert np.abs(layer(x).numpy() - actual).max() < 1e-5 * actual.std()


def test_midpoint_is_rounded_to_the_lower_entry():
    table = torch.tensor(NF4_TABLE)
    row = torch.cat([(table[1:] + table[:-1]) / 2, torch.tensor([1.0])])
    weight = torch.cat([row, torch.zeros(48)])[None]
    codes, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK_SIZE, quant_type=NF4_QUANT_TYPE)
    decided = schemes.rounded_matrix("bnb-nf4", weight).unpack().q_weight.flatten()
    assert decided[:16].tolist() == [*range(15), 15]
    assert functional.dequantize_4bit(codes, state)[0, :16].equal(table)


def test_last_block_of_a_row_is_padded():
    weight = weights(width=200)
    wider = torch.cat([weight, torch.zeros(24, 56)], dim=1)
    codes, state = functional.quantize_4bit(wider, blocksize=NF4_BLOCK_SIZE, quant_type=NF4_QUANT_TYPE)
    matrix = schemes.rounded_matrix("bnb-nf4", weight)
    assert matrix.codes.flatten().equal(codes.flatten())
    assert matrix.dequantize().equal(functional.dequantize_4bit(codes, state)[:, :200])


def test_layer_with_a_padded_block_is_exported_as_it_computes():
    layer, x = quantize_module(nn.Linear(200, 24), "bnb-nf4").eval(), torch.randn(3, 5, 200)
    (actual,) = schemes.run_onnx_runtime([layer], x)
    with torch.inference_mode():
        assert np.abs(layer(x).numpy() - actual).max() < 1e-5 * actual.std()


@pytest.mark.parametrize("shape", [(192,), (1, 192), (3, 5, 192)])
def test_layer_equals_bitsandbytes_linear4bit(shape):
    torch.manual_seed(0)
    linear = nn.Linear(192, 24)
    reference = bitsandbytes.nn.Linear4bit(192, 24, compress_statistics=False, quant_type=NF4_QUANT_TYPE)
    reference.load_state_dict(linear.state_dict())
    reference = reference.to("cpu")
    reference.weight.data, reference.weight.quant_state = functional.quantize_4bit(
        linear.weight.detach(), blocksize=NF4_BLOCK_SIZE, quant_type=NF4_QUANT_TYPE
    )
    reference.weight.bnb_quantized = True
    reference.train()  # it then keeps the layout of its weights
    x = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(quantize_module(linear, "bnb-nf4")(x), reference(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scheme", ["bnb-nf4", "bnb-int8"])
def test_layers_in_float_equal_transformers(tmp_path, scheme):
    from transformers.quantizers.base import get_keys_to_not_convert

    model, _ = load_model(tiny.write_marian(tmp_path / "model"))
    float_names = get_keys_to_not_convert(model)
    float_weights = {id(module.weight) for name, module in model.named_modules() if name in float_names}
    for settings, tables in (
        ({}, False),
        ({"embedding_scheme": scheme}, True),
        ({"output_layer": True}, True),
    ):
        planned = plan_layers(model, QuantizeSettings(scheme=scheme, **settings))
        planned_weights = {id(layer.module.weight) for layer in planned}
        assert bool(planned_weights & float_weights) == tables
    linears = {id(m.weight) for m in model.modules() if type(m) is nn.Linear}
    default = plan_layers(model, QuantizeSettings(scheme=scheme))
    assert {id(layer.module.weight) for layer in default} == linears - float_weights
