import pytest
import torch
from torch import nn

from smelt.compress.quantize import plan_layers
from smelt.core.errors import InputError
from smelt.models.edits import apply_edits
from smelt.models.empty_model import quantized_bytes, quantized_dtypes
from smelt.quantization import layers
from smelt.quantization.layers import QuantizedEmbedding, QuantizedLinear, concat_quantized, empty_quantized
from smelt.quantization.schemes.registry import SCHEMES, default_options, find_scheme
from tests.support import schemes
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def test_edits_create_layers_on_the_meta_device_and_share_weights():
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"words": nn.Embedding(10, 8, padding_idx=0), "head": nn.Linear(8, 10, bias=False)}
        )
    coding = {"op": "quantize", "scheme": "int8-dynamic", "granularity": "channel", "symmetric": True}
    edits = [{**coding, "module": n} for n in ("words", "head")]
    apply_edits(model, [*edits, {"op": "share", "module": "head.matrix", "with": "words.matrix"}])
    assert isinstance(model["words"], QuantizedEmbedding)
    assert isinstance(model["head"], QuantizedLinear)
    state = {"words.matrix.codes": torch.ones(10, 8, dtype=torch.int8), "words.matrix.scales": torch.ones(10)}
    model.load_state_dict(state, strict=False, assign=True)
    assert model["head"].matrix.codes is model["words"].matrix.codes
    assert model["head"](torch.eye(8)).shape == (8, 10)


def test_unknown_scheme_and_module_are_refused():
    with raises_code("unknown-scheme", InputError) as caught:
        empty_quantized(nn.Linear(2, 2), "int7", {})
    assert "'int7'" in str(caught.value)
    with raises_code("unsupported-layer", InputError) as caught:
        empty_quantized(nn.LayerNorm(2), "int8-dynamic", {})
    assert "LayerNorm" in str(caught.value)


def test_cached_values_are_cleared_when_weights_are_set():
    matrix = schemes.rounded_matrix("int8-dynamic", torch.rand(3, 4))
    first = matrix.dequantized()
    assert matrix.dequantized() is first
    matrix.prepare_export("product")
    assert matrix.has("columns")
    matrix.set_weight_(schemes.rounded_matrix("int8-dynamic", -torch.rand(3, 4)).unpack())
    assert (matrix.dequantized() <= 0).all()
    assert not matrix.has("columns")


def test_weights_changed_in_place_and_set_again_are_detected():
    matrix = schemes.rounded_matrix("int8-dynamic", torch.rand(3, 4))
    before, decided = matrix.dequantized(), matrix.unpack()
    decided.q_weight.neg_()
    matrix.set_weight_(decided)
    assert matrix.dequantized().equal(-before)


def test_loaded_weights_replace_cached_values():
    matrix, other = (schemes.rounded_matrix("int4", torch.randn(3, 64)) for _ in range(2))
    matrix.dequantized()
    matrix.load_state_dict(other.state_dict(), assign=True)
    assert matrix.dequantized().equal(other.dequantized())


@pytest.mark.parametrize("first", ["product", "lookup"])
def test_graph_constants_are_in_a_fixed_order(first):
    matrix = schemes.rounded_matrix("int8-dynamic", torch.rand(3, 4))
    for use in (first, "product", "lookup"):
        matrix.prepare_export(use)
    assert [name for name, _ in matrix.named_buffers()] == ["columns", "lookup"]


def test_file_dtypes_equal_scheme_dtypes():
    model = nn.ModuleDict(
        {name: schemes.rounded_matrix(name, torch.randn(4, 128)) for name in ("int8-dynamic", "int4")}
    )
    assert quantized_dtypes(model) == {
        "int8-dynamic.codes": torch.int8,
        "int8-dynamic.scales": torch.float32,
        "int4.codes": torch.uint8,
        "int4.scales": torch.float16,
    }
    assert quantized_bytes(model) == 4 * 128 + 4 * 4 + 4 * 64 + 4 * 2 * 2


def test_matrices_with_per_tensor_values_are_joined_only_if_these_are_equal():
    weight = torch.randn(4, 8)
    first, equal, other = (schemes.per_tensor(w) for w in (weight, weight.flip(0), 2 * weight))
    assert not first.matrix.is_row_independent()
    x = torch.randn(3, 8)
    joined = concat_quantized([first, equal])
    assert joined(x).allclose(torch.cat([first(x), equal(x)], dim=1), atol=1e-5)
    assert concat_quantized([first, other]) is None


def test_layers_of_different_options_or_schemes_are_not_joined():
    def layer(scheme, **options):
        return empty_quantized(nn.Linear(64, 8), scheme, default_options(find_scheme(scheme)) | options)

    assert concat_quantized([layer("int4"), layer("int4")]) is not None
    assert concat_quantized([layer("int4"), layer("int4", symmetric=False)]) is None
    assert concat_quantized([layer("int4"), layer("binary")]) is None
    assert concat_quantized([layer("int4"), nn.Linear(64, 8)]) is None


@pytest.mark.parametrize(("scheme", "options"), schemes.SCHEME_CASES, ids=schemes.SCHEME_IDS)
def test_matmul_gradient_equals_that_of_the_dequantized_layer(scheme, options):
    torch.manual_seed(0)
    layer = schemes.with_activation_range(nn.Linear(200, 24), scheme, options)
    linear = nn.Linear(200, 24)
    linear.weight.data, linear.bias.data = layer.matrix.dequantize(), layer.bias.data.clone()
    layer.bias.requires_grad_(True)
    x, gradient = torch.randn(3, 5, 200), torch.randn(3, 5, 24)
    quantized_input, reference_input = (x.clone().requires_grad_(True) for _ in range(2))
    out = layer(quantized_input)
    out.backward(gradient)
    linear(reference_input).backward(gradient)
    torch.testing.assert_close(quantized_input.grad, reference_input.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, linear.bias.grad, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        assert layer(x).equal(out)  # forwards it computes what it always does


@pytest.mark.parametrize("scheme", ["int4", "int8-dynamic", "bnb-nf4", "bnb-int8"])
def test_gradient_under_autocast_has_the_input_dtype(scheme):
    torch.manual_seed(0)
    layer = schemes.with_activation_range(nn.Linear(128, 24), scheme)
    x = torch.randn(4, 128, dtype=torch.bfloat16).requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    out.float().sum().backward()
    expected = layer.matrix.dequantize().sum(dim=0).expand(4, 128)
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scheme", [name for name, one in SCHEMES.items() if not one.packages])
def test_large_matrices_processed_in_row_chunks_equal_one_pass(scheme, monkeypatch):
    weight = torch.randn(21, 128, generator=torch.Generator().manual_seed(0))
    full = schemes.rounded_matrix(scheme, weight)
    for module, name in ((plan_layers, "_ROUNDED_AT_ONCE"), (layers, "_WEIGHTS_AT_ONCE")):
        monkeypatch.setattr(module, name, 4 * 128)
    chunked = schemes.rounded_matrix(scheme, weight)
    stored = dict(chunked.named_parameters())
    assert all(torch.equal(tensor, stored[name]) for name, tensor in full.named_parameters())
    assert torch.equal(chunked.dequantize(), layers._values(full.scheme, full, 128))


@pytest.mark.parametrize("limit", [0, 4 * 3 * 4])
def test_values_are_cached_up_to_a_limit(limit):
    layer = torch.nn.ModuleList([schemes.rounded_matrix("int8-dynamic", torch.rand(3, 4))])
    layers.limit_weight_cache(layer, limit)
    first, second = layer[0].dequantized(), layer[0].dequantized()
    assert (first is second) == (limit > 0)
    assert torch.equal(first, second)
