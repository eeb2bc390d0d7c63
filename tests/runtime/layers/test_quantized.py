import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from smelt.compress.quantize.int8_dynamic import fill_
from smelt.compress.quantize.schemes import quantize_module
from smelt.core.errors import InputError
from smelt.runtime.layers import quantized
from smelt.runtime.layers.quantized import (
    Int8Matrix,
    QuantizedEmbedding,
    QuantizedLinear,
    dynamic_quantize_linear,
    empty_quantized,
    multiplies_exactly,
)
from smelt.runtime.models.structure import apply_edits


def ort_session(nodes, inputs, outputs, initializers=()):
    import onnxruntime

    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, t, None) for n, t in inputs],
        [helper.make_tensor_value_info(n, t, None) for n, t in outputs],
        list(initializers),
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


CASES = {
    "both signs": torch.linspace(-3.7, 2.2, 97),
    "positive only": torch.linspace(0.5, 9.0, 33),
    "negative only": torch.linspace(-4.0, -0.25, 41),
    "zeros": torch.zeros(5),
    "halves round to even": torch.arange(0, 256, dtype=torch.float32) / 2,
}


@pytest.mark.parametrize("x", CASES.values(), ids=CASES.keys())
def test_dynamic_quantize_linear_equals_the_onnx_operator(x):
    session = ort_session(
        [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])],
        [("x", TensorProto.FLOAT)],
        [("y", TensorProto.UINT8), ("s", TensorProto.FLOAT), ("z", TensorProto.UINT8)],
    )
    y, s, z = session.run(None, {"x": x.numpy()})
    codes, scale, zero = dynamic_quantize_linear(x)
    assert np.array_equal(codes.numpy(), y)
    assert int(zero) == int(z)
    if x.any():  # of zeros ONNX Runtime gives scale 1 in some versions and 0 in others
        assert float(scale) == pytest.approx(float(s), rel=1e-7)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_dynamic_quantize_matmul(bias):
    torch.manual_seed(0)
    layer = quantize_module(nn.Linear(48, 40, bias=bias), "int8-dynamic")
    x = torch.randn(3, 5, 48)
    from onnx import numpy_helper

    constants = [
        numpy_helper.from_array(np.ascontiguousarray(layer.matrix.codes.numpy().T), "b"),
        numpy_helper.from_array(layer.matrix.scales.numpy(), "s"),
    ]
    names = ["x", "b", "s"]
    if bias:
        constants.append(numpy_helper.from_array(layer.bias.detach().numpy(), "c"))
        names += ["", "c"]
    node = helper.make_node("DynamicQuantizeMatMul", names, ["y"], domain="com.microsoft")
    session = ort_session([node], [("x", TensorProto.FLOAT)], [("y", TensorProto.FLOAT)], constants)
    expected = session.run(None, {"x": x.numpy()})[0]
    assert np.abs(layer(x).detach().numpy() - expected).max() < 1e-6


def test_weight_codes_are_symmetric_per_row_by_hand():
    matrix = Int8Matrix(3, 2)
    fill_(matrix, torch.tensor([[1.27, -0.50], [0.0, 0.0], [-254.0, 127.0]]))
    assert matrix.codes.tolist() == [[127, -50], [0, 0], [-127, 64]]  # 63.5 rounds to the even 64
    assert torch.allclose(matrix.scales, torch.tensor([0.01, 1.0, 2.0]))


def test_embedding_looks_up_rows_and_keeps_the_zero_row():
    torch.manual_seed(1)
    table = nn.Embedding(10, 8, padding_idx=9)
    layer = quantize_module(table, "int8-dynamic")
    ids = torch.tensor([[0, 9], [3, 4]])
    assert (layer(ids)[0, 1] == 0).all()
    step = table.weight.abs().amax(1)[ids][..., None] / 127
    assert ((layer(ids) - table(ids)).abs() <= step / 2 + 1e-7).all()


def test_codes_sums_follow_new_codes():
    torch.manual_seed(2)
    layer = quantize_module(nn.Linear(16, 4), "int8-dynamic")
    x = torch.rand(2, 16)
    layer(x)
    other = nn.Linear(16, 4)
    fill_(layer.matrix, other.weight)
    layer.bias.data = other.bias.detach()
    assert torch.allclose(layer(x), other(x), atol=0.05)


def test_edits_make_room_on_the_meta_device_and_share_codes():
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"words": nn.Embedding(10, 8, padding_idx=0), "head": nn.Linear(8, 10, bias=False)}
        )
    edits = [{"op": "quantize", "module": n, "scheme": "int8-dynamic"} for n in ("words", "head")]
    apply_edits(model, [*edits, {"op": "share", "module": "head.matrix", "with": "words.matrix"}])
    assert isinstance(model["words"], QuantizedEmbedding)
    assert isinstance(model["head"], QuantizedLinear)
    state = {"words.matrix.codes": torch.ones(10, 8, dtype=torch.int8), "words.matrix.scales": torch.ones(10)}
    model.load_state_dict(state, strict=False, assign=True)
    assert model["head"].matrix.codes is model["words"].matrix.codes
    assert model["head"](torch.eye(8)).shape == (8, 10)


def test_unknown_scheme_and_module_are_refused():
    with pytest.raises(InputError, match="unknown quantization scheme 'int3'"):
        empty_quantized(nn.Linear(2, 2), "int3")
    with pytest.raises(InputError, match="LayerNorm cannot be quantized"):
        empty_quantized(nn.LayerNorm(2), "int8-dynamic")


CODES = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (5, 1024), (33, 3000)])
@pytest.mark.parametrize("exactly", [True, False])
def test_sums_of_products_are_exact_for_any_codes(rows, inputs, exactly, monkeypatch):
    if not exactly or not multiplies_exactly():
        monkeypatch.setattr(quantized, "multiplies_exactly", lambda: False)
    x = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8, generator=CODES)
    codes = torch.randint(-127, 128, (40, inputs), dtype=torch.int8, generator=CODES)
    x[0], codes[0] = -128, -127  # the largest sum there can be
    found = quantized.int8_product(x, codes)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), x.long() @ codes.long().t())


def test_sums_are_exact_where_torch_has_no_instructions_for_them():
    """What torch's library does on x86 without VNNI, where it adds pairs of products in 16 bits."""
    code = """
import torch
from smelt.runtime.layers.quantized import int8_product, multiplies_exactly
for rows in (1, 40):
    x = torch.randint(-128, 128, (rows, 300), dtype=torch.int8)
    codes = torch.randint(-127, 128, (50, 300), dtype=torch.int8)
    assert torch.equal(int8_product(x, codes).long(), x.long() @ codes.long().t()), multiplies_exactly()
"""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
