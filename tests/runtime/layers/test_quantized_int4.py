import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from smelt.core.errors import InputError
from smelt.runtime.layers.quantized import empty_quantized, joined
from smelt.runtime.layers.quantized_groups import blocks_as_int8
from smelt.runtime.layers.quantized_int4 import Int4Embedding, Int4Linear, pack_nibbles, unpack_nibbles
from smelt.runtime.models.structure import apply_edits

LAYOUTS = [
    (group, symmetric, level)
    for group in (16, 32, 64, 128)
    for symmetric in (True, False)
    for level in (0, 4)
]


def random_layer(inputs=100, outputs=24, group=32, symmetric=True, level=4, bias=True):
    torch.manual_seed(0)
    layer = Int4Linear(
        inputs, outputs, bias, group_size=group, symmetric=symmetric, accuracy_level=level
    ).eval()
    rows, groups, _ = layer.matrix.codes.shape
    codes = torch.randint(0, 16, (rows, groups, group), dtype=torch.uint8)
    zeros = None if symmetric else torch.randint(0, 16, (rows, groups), dtype=torch.uint8)
    layer.matrix.set_(codes, torch.rand(rows, groups) + 0.5, zeros)
    if bias:
        layer.bias.data = torch.randn(outputs)
    return layer, codes, zeros


def run_matmul_nbits(layer, x):
    """What onnxruntime computes for the very tensors of the layer."""
    import onnxruntime

    constants = {"b": layer.matrix.codes.numpy(), "s": layer.matrix.scales.float().numpy()}
    names = ["x", "b", "s", "", "", "bias" if layer.bias is not None else ""]
    if layer.matrix.zeros is not None:
        names[3], constants["z"] = "z", layer.matrix.zeros.numpy()
    if layer.bias is not None:
        constants["bias"] = layer.bias.detach().numpy()
    node = helper.make_node(
        "MatMulNBits", names, ["y"], domain="com.microsoft", bits=4, K=layer.in_features,
        N=layer.out_features, block_size=layer.matrix.group_size, accuracy_level=layer.accuracy_level,
    )  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "g", [value("x", TensorProto.FLOAT, None)], [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x.numpy()})[0]


def test_two_codes_lie_in_a_byte_the_first_in_the_low_half():
    codes = torch.tensor([[1, 2, 15, 0, 7]], dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x0F, 0x07]]
    assert unpack_nibbles(packed)[:, :5].equal(codes)


def test_all_codes_survive_packing():
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16) % 16
    assert unpack_nibbles(pack_nibbles(codes)).equal(codes)


@pytest.mark.parametrize(("group", "symmetric", "level"), LAYOUTS)
def test_layer_equals_matmul_nbits(group, symmetric, level):
    layer, _, _ = random_layer(group=group, symmetric=symmetric, level=level)
    x = torch.randn(3, 5, 100)
    x[0, 0] = 0
    expected = run_matmul_nbits(layer, x)
    with torch.inference_mode():
        got = layer(x).numpy()
    assert np.abs(got - expected).max() < 1e-5 * expected.std()


def test_values_by_hand():
    layer, codes, zeros = random_layer(symmetric=False, bias=False)
    matrix = layer.matrix
    row, column = 5, 77
    group, place = divmod(column, 32)
    expected = (int(codes[row, group, place]) - int(zeros[row, group])) * float(matrix.scales[row, group])
    assert float(matrix.dequantize()[row, column]) == pytest.approx(expected)
    assert matrix.dequantize().shape == (24, 100)


def test_blocks_as_int8_by_hand():
    x = torch.tensor([[1.27, -0.633, 0.0, 254.0, 1.0, 0.0]])
    # blocks of 3: scales 0.01 and 2; 0.633 rounds to 63, 0.5 to the even 0
    assert blocks_as_int8(x, 3).allclose(torch.tensor([[1.27, -0.63, 0.0, 254.0, 0.0, 0.0]]))
    assert blocks_as_int8(torch.zeros(2, 5), 3).equal(torch.zeros(2, 5))


@pytest.mark.parametrize("symmetric", [True, False])
def test_embedding_looks_up_the_rows_of_its_matrix(symmetric):
    layer, _, _ = random_layer(symmetric=symmetric, inputs=40)
    options = {"group_size": 32, "symmetric": symmetric, "accuracy_level": 4}
    table = empty_quantized(nn.Embedding(24, 40, padding_idx=2), "int4", **options)
    assert isinstance(table, Int4Embedding)
    table.matrix = layer.matrix
    ids = torch.tensor([[3, 0, 23], [7, 7, 1]])
    assert table(ids).equal(layer.matrix.dequantize()[ids])


def test_new_codes_are_seen_after_the_first_forward():
    layer, codes, _ = random_layer(bias=False, level=0)
    before = layer(torch.eye(100))
    layer.matrix.set_(codes, 2 * layer.matrix.scales.float(), None)
    assert layer(torch.eye(100)).allclose(2 * before)


def test_edits_make_room_on_the_meta_device():
    with torch.device("meta"):
        model = nn.ModuleDict({"words": nn.Embedding(10, 40), "head": nn.Linear(40, 10, bias=False)})
    options = {"scheme": "int4", "group_size": 16, "symmetric": False, "accuracy_level": 0}
    edits = [{"op": "quantize", "module": n, **options} for n in ("words", "head")]
    apply_edits(model, [*edits, {"op": "share", "module": "head.matrix", "with": "words.matrix"}])
    assert model["head"].matrix is model["words"].matrix
    assert {n: (tuple(p.shape), p.dtype, p.is_meta) for n, p in model["head"].matrix.named_parameters()} == {
        "codes": ((10, 3, 8), torch.uint8, True),
        "scales": ((10, 3), torch.float32, True),
        "zeros": ((10, 2), torch.uint8, True),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 48, "symmetric": True, "accuracy_level": 4}, "group size 48; expected one of 16"),
        ({"group_size": 64, "symmetric": True, "accuracy_level": 2}, "accuracy level 2; expected 0"),
        ({"group_size": True, "symmetric": True, "accuracy_level": 0}, "group size True"),
        ({"group_size": 64}, "scheme int4 cannot be made with"),
        ({"group_size": 64, "symmetric": True, "accuracy_level": 4, "device": 1}, "cannot be made with"),
    ],
)
def test_structure_that_no_layer_has_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        apply_edits(
            nn.Sequential(nn.Linear(8, 8)), [{"op": "quantize", "module": "0", "scheme": "int4"} | options]
        )


def test_layers_of_one_input_are_joined_only_when_of_one_kind():
    first, _, _ = random_layer(symmetric=False, outputs=8)
    second, _, _ = random_layer(symmetric=False, outputs=12, bias=False)
    x = torch.randn(2, 100)
    whole = joined([first, second])
    assert whole is not None
    assert whole(x).allclose(torch.cat([first(x), second(x)], dim=1), atol=1e-5)
    assert joined([first, random_layer(group=64)[0]]) is None
    assert joined([first, nn.Linear(100, 8)]) is None
