import numpy as np
import pytest
import schemes
import torch
from expected_errors import raises_code, raises_setting_codes
from torch import nn

from smelt.compress.quantize.plan_layers import round_to_nearest
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.errors import InputError
from smelt.models.edits import apply_edits
from smelt.quantization.layers import QuantizedEmbedding, concat_quantized, empty_quantized, layer_scheme
from smelt.quantization.packing import unpack_nibbles
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.affine import Int4
from smelt.quantization.schemes.registry import default_options, find_scheme

LAYOUTS = [
    (group, symmetric, level)
    for group in (16, 32, 64, 128)
    for symmetric in (True, False)
    for level in (0, 4)
]


def random_layer(inputs=100, outputs=24, group=32, symmetric=True, level=4, bias=True):
    torch.manual_seed(0)
    groups = -(-inputs // group)
    codes = torch.randint(0, 16, (outputs, groups, group), dtype=torch.uint8)
    zeros = None if symmetric else torch.randint(0, 16, (outputs, groups), dtype=torch.uint8)
    grid = {"scales": torch.rand(outputs, groups) + 0.5} | ({} if symmetric else {"zeros": zeros})
    options = {"group_size": group, "symmetric": symmetric, "accuracy_level": level}
    return (
        schemes.random_quantized_layer("int4", UnpackedWeights(codes, grid), inputs, bias, **options),
        codes,
        zeros,
    )


def decide(weight, group, symmetric):
    decided = round_to_nearest(weight, Int4(), {"group_size": group, "symmetric": symmetric})
    return decided.q_weight, decided.qparams["scales"], decided.qparams.get("zeros")


@pytest.mark.parametrize(("group", "symmetric", "level"), LAYOUTS)
def test_layer_equals_matmul_nbits(group, symmetric, level):
    layer, _, _ = random_layer(group=group, symmetric=symmetric, level=level)
    x = torch.randn(3, 5, 100)
    x[0, 0] = 0
    expected = schemes.matmul_nbits(layer, x)
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


@pytest.mark.parametrize("symmetric", [True, False])
def test_embedding_looks_up_the_rows_of_its_matrix(symmetric):
    layer, _, _ = random_layer(symmetric=symmetric, inputs=40)
    options = {"group_size": 32, "symmetric": symmetric, "accuracy_level": 4}
    table = empty_quantized(nn.Embedding(24, 40, padding_idx=2), "int4", options)
    assert isinstance(table, QuantizedEmbedding)
    assert layer_scheme(table) == "int4"
    table.matrix = layer.matrix
    ids = torch.tensor([[3, 0, 23], [7, 7, 1]])
    assert table(ids).equal(layer.matrix.dequantize()[ids])


def test_new_codes_are_seen_after_the_first_forward():
    layer, codes, _ = random_layer(bias=False, level=0)
    before = layer(torch.eye(100))
    layer.matrix.set_weight_(UnpackedWeights(codes, {"scales": 2 * layer.matrix.scales}))
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
    ("options", "code", "setting"),
    [
        ({"group_size": 48, "symmetric": True, "accuracy_level": 4}, "wrong-value", "group_size"),
        ({"group_size": 64, "symmetric": True, "accuracy_level": 2}, "wrong-value", "accuracy_level"),
        ({"group_size": True, "symmetric": True, "accuracy_level": 0}, "wrong-value", "group_size"),
        ({"group_size": 64}, "unsupported-scheme-options", None),
        (
            {"group_size": 64, "symmetric": True, "accuracy_level": 4, "device": 1},
            "unsupported-scheme-options",
            None,
        ),
    ],
)
def test_structure_that_no_layer_has_is_refused(options, code, setting):
    with raises_code(code, InputError) as caught:
        apply_edits(
            nn.Sequential(nn.Linear(8, 8)), [{"op": "quantize", "module": "0", "scheme": "int4"} | options]
        )
    assert caught.value.setting == setting


def test_layers_of_one_input_are_joined_only_when_of_one_kind():
    first, _, _ = random_layer(symmetric=False, outputs=8)
    second, _, _ = random_layer(symmetric=False, outputs=12, bias=False)
    x = torch.randn(2, 100)
    whole = concat_quantized([first, second])
    assert whole is not None
    assert whole(x).allclose(torch.cat([first(x), second(x)], dim=1), atol=1e-5)
    assert concat_quantized([first, random_layer(group=64)[0]]) is None
    assert concat_quantized([first, nn.Linear(100, 8)]) is None


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_and_scales_are_those_of_onnx_runtimes_quantizer(symmetric):
    from onnxruntime.capi._pybind_state import quantize_matmul_4bits

    rows, columns, group = 24, 100, 32
    groups = -(-columns // group)
    weight = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    codes = np.zeros((rows, groups, group // 2), np.uint8)
    scales, zeros = np.zeros(rows * groups, np.float32), np.zeros(rows * groups // 2, np.uint8)
    transposed = np.ascontiguousarray(weight.T)
    quantize_matmul_4bits(codes, transposed, scales, zeros, group, rows, columns, symmetric)

    found = decide(torch.from_numpy(weight), group, symmetric)
    expected = unpack_nibbles(torch.from_numpy(codes)).flatten(1)[:, :columns]
    # a scale rounded to float16 may move a value that lies halfway between two codes
    assert (found[0].flatten(1)[:, :columns] == expected).float().mean() > 0.995
    assert np.allclose(found[1].flatten(), scales, rtol=2**-11)
    if symmetric:
        assert found[2] is None
    else:
        assert found[2].equal(unpack_nibbles(torch.from_numpy(zeros).view(rows, -1)))


def test_symmetric_codes_by_hand():
    # the largest magnitude, -4, becomes -8: scale 0.5; 3.7 is 7.4 -> 7; 4.0 would be 8 and is cut to 7
    codes, scales, zeros = decide(torch.tensor([[-4.0, 3.7, 0.0, 0.26] + 12 * [0.0]]), 16, symmetric=True)
    assert scales.tolist() == [[0.5]]
    assert zeros is None
    assert codes[0, 0, :4].tolist() == [0, 15, 8, 9]


def test_asymmetric_codes_by_hand():
    # from 0 (it must be exact) to 3: scale 0.2, zero point 0
    codes, scales, zeros = decide(torch.tensor([[1.0, 3.0] + 14 * [2.0]]), 16, symmetric=False)
    assert scales[0, 0] == pytest.approx(0.2, rel=1e-3)
    assert zeros.tolist() == [[0]]
    assert codes[0, 0, :3].tolist() == [5, 15, 10]


@pytest.mark.parametrize("symmetric", [True, False])
def test_values_are_half_a_step_off_and_what_is_cut_a_step_at_most(symmetric):
    torch.manual_seed(0)
    weight = torch.randn(20, 72)
    weight[3] = 0
    weight[5, 32:64] = torch.tensor([-2.0, 2.0] * 16)  # the ends of a range are equally far
    matrix = schemes.rounded_matrix("int4", weight, group_size=32, symmetric=symmetric)
    steps = matrix.scales.float().abs().repeat_interleave(32, dim=1)[:, :72]
    off = (matrix.dequantize() - weight).abs()
    signed = weight / matrix.scales.float().repeat_interleave(32, dim=1)[:, :72]
    cut = signed > 7.5 if symmetric else torch.zeros_like(weight, dtype=torch.bool)
    assert (off <= torch.where(cut, 1.01, 0.51) * steps).all()
    # of a symmetric range one end has 8 steps, the other 7
    assert (off[cut] > 0.49 * steps[cut]).all()
    assert int((off > 0.9 * steps).sum()) >= (16 if symmetric else 0)
    assert matrix.dequantize()[3].eq(0).all()
    assert torch.isfinite(matrix.scales).all()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_cutting_one_end_errs_less_than_a_scale_that_cuts_nothing(group):
    torch.manual_seed(0)
    weight = torch.randn(200, 1024)
    matrix = schemes.rounded_matrix("int4", weight, group_size=group)
    groups = weight.unflatten(1, (-1, group))
    scale = groups.abs().amax(dim=-1, keepdim=True) / 7
    whole = torch.round(groups / scale) * scale
    ours, other = ((w - weight).square().mean() for w in (matrix.dequantize(), whole.flatten(1)))
    assert 1.25 < other / ours < 1.32


def test_positive_scales_are_the_largest_magnitude_whatever_its_sign():
    groups = torch.tensor([[[-4.0, 1.0, 2.0, 0.5], [4.0, -3.9, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    options = default_options(find_scheme("int4")) | {"symmetric": "positive"}
    grid = find_scheme("int4").compute_qparams(groups, 12, options)
    assert grid["scales"].tolist() == [[0.5, 0.5, 1.0]]
    values = find_scheme("int4").dequantize(
        find_scheme("int4").quantize(groups, grid, options), grid, options
    )
    assert values.tolist() == [[[-4.0, 1.0, 2.0, 0.5], [3.5, -4.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]


def test_only_four_bits_have_positive_scales():
    assert QuantizeSettings(scheme="int4", symmetric="positive").symmetric == "positive"
    assert QuantizeSettings(scheme="int4", symmetric=False).symmetric is False
    with raises_setting_codes("wrong-value") as caught:
        QuantizeSettings(scheme="int2", symmetric="positive", embedding_scheme="int3")
    assert all(part in str(caught.value) for part in ("symmetric", "positive", "int2"))
