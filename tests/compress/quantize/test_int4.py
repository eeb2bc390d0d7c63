import numpy as np
import onnx
import pytest
import tiny
import torch

from smelt.compress.quantize.int4 import decide, fake, fill_
from smelt.compress.quantize.schemes import quantize_module
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.data import Example, Split
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.export.onnx_stage import Onnx, OnnxSettings
from smelt.runtime.layers.quantized import QuantizedEmbedding
from smelt.runtime.layers.quantized_int4 import Int4Embedding, Int4Linear, Int4Matrix, unpack_nibbles
from smelt.runtime.models.checkpoint import count_parameters, load_model

ROWS = Split("x", tuple(Example(s) for s in tiny.SENTENCES))


def context(out, task="translation"):
    out.mkdir()
    return Context(out=out, task=task, data={"validation": ROWS}, seed=0, ancestors={}, score=lambda a: {})


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    return tiny.marian(tmp_path_factory.mktemp("int4") / "model")


def quantized(src, out, task="translation", **settings):
    ctx = context(out, task)
    Quantize()(tiny.artifact(src, task), QuantizeSettings(scheme="int4", **settings), ctx)
    return ctx


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
    assert (found.codes.flatten(1)[:, :columns] == expected).float().mean() > 0.995
    assert np.allclose(found.scales.flatten(), scales, rtol=2**-11)
    if symmetric:
        assert found.zeros is None
    else:
        assert found.zeros.equal(unpack_nibbles(torch.from_numpy(zeros).view(rows, -1)))


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
    matrix = Int4Matrix(20, 72, 32, symmetric)
    fill_(matrix, weight)
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
    matrix = Int4Matrix(200, 1024, group, True)
    fill_(matrix, weight)
    groups = weight.unflatten(1, (-1, group))
    scale = groups.abs().amax(dim=-1, keepdim=True) / 7
    whole = torch.round(groups / scale) * scale
    ours, other = ((w - weight).square().mean() for w in (matrix.dequantize(), whole.flatten(1)))
    assert 1.25 < other / ours < 1.32


def test_fake_weights_are_the_codes_values_and_their_gradient_passes_straight():
    torch.manual_seed(0)
    weight = torch.randn(6, 40, requires_grad=True)
    matrix = Int4Matrix(6, 40, 16, symmetric=False)
    fill_(matrix, weight)
    values = fake(weight, matrix)
    assert values.equal(matrix.dequantize())
    slope = torch.randn(6, 40)
    (values * slope).sum().backward()
    assert weight.grad.equal(slope)


def test_weights_that_are_not_finite_are_refused(marian, tmp_path):
    layer = torch.nn.Linear(32, 4)
    layer.weight.data[0, 0] = float("nan")
    with pytest.raises(InputError, match="its largest weight is nan"):
        quantize_module(layer, "int4", group_size=32, symmetric=True, accuracy_level=4)


def test_stage_covers_linears_embeddings_and_head_and_says_what_it_left(marian, tmp_path):
    ctx = quantized(marian, tmp_path / "out", group_size=64, symmetric=False)
    model, edits = load_model(tmp_path / "out")
    assert ctx.facts["linear_layers"] == 2 * 6 + 2 * 10 + 1
    assert ctx.facts["float_linear_layers"] == []
    # d_model is 32: all but the second FFN matrix (64 inputs) have groups that are filled up
    assert "model.encoder.layers.0.fc1" in ctx.facts["padded_layers"]
    assert "model.encoder.layers.0.fc2" not in ctx.facts["padded_layers"]
    assert isinstance(model.model.shared, Int4Embedding)
    assert model.lm_head.matrix is model.model.shared.matrix
    assert edits[0]["scheme"] == "int4"
    assert (edits[0]["group_size"], edits[0]["symmetric"], edits[0]["accuracy_level"]) == (64, False, 4)


def test_vocabulary_may_take_another_scheme(marian, tmp_path):
    quantized(marian, tmp_path / "out", vocabulary="int8-dynamic")
    model, _ = load_model(tmp_path / "out")
    assert isinstance(model.model.shared, QuantizedEmbedding)
    assert model.lm_head.matrix is model.model.shared.matrix
    assert isinstance(model.model.encoder.layers[0].fc1, Int4Linear)


def test_bytes_on_disk_are_what_the_bits_per_weight_predict(tmp_path):
    sizes = {"d_model": 256, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
    src = tiny.marian(tmp_path / "model", **sizes)
    ctx = quantized(src, tmp_path / "out", group_size=32)
    assert ctx.facts["bits_per_weight"] == 4 + 16 / 32
    model, _ = load_model(tmp_path / "out")
    weights = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, Int4Linear))
    rest = [p for n, p in model.named_parameters() if ".matrix." not in n and "position" not in n]
    floats = sum(p.numel() for p in rest)
    predicted = weights * ctx.facts["bits_per_weight"] / 8 + 4 * floats
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == pytest.approx(predicted, rel=0.05)
    assert count_parameters(tmp_path / "out") == pytest.approx(weights * (1 + 1 / 32) + floats, rel=0.001)


def test_exported_graph_computes_what_torch_computes(tmp_path):
    """A classifier with zero points; symmetric codes are exported in test_binary.py."""
    src = tiny.bert(tmp_path / "model")
    task = "text-classification"
    quantized(src, tmp_path / "int4", task, symmetric=False, accuracy_level=0, group_size=16)
    ctx = context(tmp_path / "onnx", task)
    Onnx()(tiny.artifact(tmp_path / "int4", task), OnnxSettings(), ctx)
    assert ctx.facts["parity"]["model"]["largest"] < 1e-4
    found = ctx.facts["graphs"]["model"]["operators"]
    # per layer packed queries, keys and values, out, two of the FFN; pooler and classifier
    assert found["MatMulNBits"] == 2 * 4 + 2
    assert "MatMul" not in found
    stored = [t for t in onnx.load(tmp_path / "onnx" / "model.onnx").graph.initializer if len(t.dims) == 3]
    assert {t.data_type for t in stored} == {onnx.TensorProto.UINT8}


def test_targets_without_matmul_nbits_are_refused(marian, tmp_path):
    quantized(marian, tmp_path / "out")
    message = r"target tensorrt cannot run .* scheme int4: .*MatMulNBits.*`from: NAME`"
    with pytest.raises(InputError, match=message):
        Onnx()(tiny.artifact(tmp_path / "out"), OnnxSettings(target="tensorrt"), context(tmp_path / "onnx"))
