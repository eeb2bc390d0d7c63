"""NF4 against bitsandbytes itself and against ONNX Runtime's MatMulBnb4."""

import numpy as np
import pytest
import schemes
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.quantization.schemes.bitsandbytes import NF4_BLOCK_SIZE, NF4_QUANT_TYPE, NF4_TABLE

bitsandbytes = pytest.importorskip("bitsandbytes", reason="the extra bitsandbytes is not installed")
functional = bitsandbytes.functional


def weights(rows=24, width=192, scale=0.02):
    torch.manual_seed(0)
    weight = torch.randn(rows, width) * scale
    weight[2] = 0
    weight[3, :64] = 0
    return weight


def test_the_table_is_bitsandbytes_own():
    assert torch.tensor(NF4_TABLE).equal(functional.get_4bit_type(NF4_QUANT_TYPE, device="cpu"))


def test_codes_scales_and_values_are_bitsandbytes_own_to_the_bit():
    weight = weights()
    matrix = schemes.rounded_matrix("bnb-nf4", weight)
    codes, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK_SIZE, quant_type=NF4_QUANT_TYPE)
    assert matrix.codes.flatten().equal(codes.flatten())
    assert matrix.scales.flatten().equal(state.absmax)
    assert matrix.dequantize().equal(functional.dequantize_4bit(codes, state))


def test_a_midpoint_goes_to_the_lower_entry():
    table = torch.tensor(NF4_TABLE)
    row = torch.cat([(table[1:] + table[:-1]) / 2, torch.tensor([1.0])])
    weight = torch.cat([row, torch.zeros(48)])[None]
    codes, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK_SIZE, quant_type=NF4_QUANT_TYPE)
    decided = schemes.rounded_matrix("bnb-nf4", weight).unpack().q_weight.flatten()
    assert decided[:16].tolist() == [*range(15), 15]
    assert functional.dequantize_4bit(codes, state)[0, :16].equal(table)


def test_the_last_block_of_a_row_is_filled_up_as_if_the_matrix_were_wider():
    weight = weights(width=200)
    wider = torch.cat([weight, torch.zeros(24, 56)], dim=1)
    codes, state = functional.quantize_4bit(wider, blocksize=NF4_BLOCK_SIZE, quant_type=NF4_QUANT_TYPE)
    matrix = schemes.rounded_matrix("bnb-nf4", weight)
    assert matrix.codes.flatten().equal(codes.flatten())
    assert matrix.dequantize().equal(functional.dequantize_4bit(codes, state)[:, :200])


@pytest.mark.parametrize("shape", [(192,), (1, 192), (3, 5, 192)])
def test_a_layer_computes_what_bitsandbytes_linear4bit_does(shape):
    torch.manual_seed(0)
    whole = nn.Linear(192, 24)
    theirs = bitsandbytes.nn.Linear4bit(192, 24, compress_statistics=False, quant_type=NF4_QUANT_TYPE)
    theirs.load_state_dict(whole.state_dict())
    theirs = theirs.to("cpu")
    theirs.weight.data, theirs.weight.quant_state = functional.quantize_4bit(
        whole.weight.detach(), blocksize=NF4_BLOCK_SIZE, quant_type=NF4_QUANT_TYPE
    )
    theirs.weight.bnb_quantized = True
    theirs.train()  # it then keeps the layout of its weights
    x = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(quantize_module(whole, "bnb-nf4")(x), theirs(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [64, 200, 256])
def test_a_layer_computes_what_matmulbnb4_does(width):
    torch.manual_seed(0)
    layer = quantize_module(nn.Linear(width, 24, bias=False), "bnb-nf4")
    count = -(-width // NF4_BLOCK_SIZE)
    x = torch.nn.functional.pad(torch.randn(3, 5, width), (0, count * NF4_BLOCK_SIZE - width))
    node = helper.make_node(
        "MatMulBnb4", ["x", "b", "s"], ["y"], domain="com.microsoft", K=count * NF4_BLOCK_SIZE, N=24,
        block_size=NF4_BLOCK_SIZE, quant_type=1,
    )  # fmt: skip
    constants = {"b": layer.matrix.codes.flatten().numpy(), "s": layer.matrix.scales.flatten().numpy()}
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "g", [value("x", TensorProto.FLOAT, None)], [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    import onnxruntime

    session = onnxruntime.InferenceSession(
        helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    expected = session.run(None, {"x": x.numpy()})[0]
    with torch.inference_mode():
        got = layer(x[..., :width]).numpy()
    assert np.abs(got - expected).max() < 1e-5 * expected.std()


def test_float_weights_are_not_kept():
    layer = quantize_module(nn.Linear(64, 8), "bnb-nf4")
    with torch.inference_mode():
        layer(torch.randn(2, 64))
    assert layer.matrix._kept == {}
