"""What every scheme promises, whatever its codes are: a new one is tested by its line in the registry."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smelt.compress.quantize.plan_layers import quantize_module, round_to_nearest
from smelt.export.graphs.attention import GraphSpec
from smelt.export.graphs.export_graph import export_graph
from smelt.export.parity.references import dequantize_graph
from smelt.export.simplify_graph import expand_placeholders
from smelt.quantization.layers import concat_quantized
from smelt.quantization.scheme import GRAPH_TARGETS
from smelt.quantization.schemes.registry import (
    SCHEMES,
    bits_per_weight,
    default_options,
    supported_targets,
)
from smelt.runtimes.openvino_backend import ACTIVATION_BLOCKS
from tests.support import schemes

EACH = pytest.mark.parametrize(("scheme", "options"), schemes.SCHEME_CASES, ids=schemes.SCHEME_IDS)
TABLES = [case for case in schemes.SCHEME_CASES if SCHEMES[case[0]].supports_embeddings]


def weights(rows=6, width=200):
    torch.manual_seed(0)
    weight = torch.randn(rows, width)
    weight[2] = 0
    return weight


@EACH
def test_code_range_is_the_outermost_values_in_scales(scheme, options):
    """Where a scheme has them, and so can learn its scales: values far out become them, and no others do."""
    matrix = schemes.rounded_matrix(scheme, weights(), **options)
    definition, grid = matrix.scheme, matrix.unpack().qparams
    code_range = definition.code_range(grid, matrix.options)
    assert definition.learnable_scales == (code_range is not None)
    if code_range is None:
        return
    scales = grid["scales"][..., None]
    size = definition.group_size(matrix.width, matrix.options)
    outliers = 1000 * scales.sign() * torch.tensor([-1.0, 1.0]).repeat(size // 2)
    values = definition.dequantize(definition.quantize(outliers, grid, matrix.options), grid, matrix.options)
    low, high = (torch.as_tensor(bound).expand(*scales.shape[:2], 1) for bound in code_range)
    nonzero = (scales != 0).expand_as(values)
    expected = torch.cat([low, high], dim=-1).repeat(1, 1, size // 2) * scales
    assert values[nonzero].allclose(expected[nonzero])


@EACH
def test_tensors_match_the_declared_storage(scheme, options):
    matrix = schemes.rounded_matrix(scheme, weights(), **options)
    storage = SCHEMES[scheme].stored_tensors(6, 200, options)
    assert {n: (tuple(p.shape), str(p.dtype)) for n, p in matrix.named_parameters()} == {
        n: (stored.shape, f"torch.{stored.dtype}") for n, stored in storage.items()
    }
    by_row = [stored for stored in storage.values() if stored.per_row and not stored.calibrated]
    assert {len(stored.shape) and stored.shape[0] for stored in by_row} == {6}


@EACH
def test_quantized_weights_and_parameters_survive_packing(scheme, options):
    decided = round_to_nearest(weights(), SCHEMES[scheme], options)
    unpacked = schemes.rounded_matrix(scheme, weights(), **options).unpack()
    assert unpacked.q_weight.equal(decided.q_weight)
    assert unpacked.q_weight.dtype == decided.q_weight.dtype
    stored = SCHEMES[scheme].stored_qparams(decided.qparams, options)
    # what a grid has besides (a threshold) decided codes, and their values can do without it
    assert {n: t.tolist() for n, t in unpacked.qparams.items()} == {
        n: stored[n].tolist() for n in unpacked.qparams
    }
    values = [
        SCHEMES[scheme].dequantize(unpacked.q_weight, grid, options) for grid in (unpacked.qparams, stored)
    ]
    assert values[0].equal(values[1])


@EACH
def test_storing_in_the_file_dtypes_is_lossless(scheme, options):
    matrix = schemes.rounded_matrix(scheme, weights(), **options)
    for name, stored in SCHEMES[scheme].stored_tensors(6, 200, options).items():
        tensor = matrix.tensor(name)
        filed = tensor.to(getattr(torch, stored.file_dtype or stored.dtype))
        assert filed.to(tensor.dtype).equal(tensor)


@EACH
def test_dequantized_values_are_quantized_to_themselves(scheme, options):
    """Rounding what codes stand for, on the grid that they stand on, gives the same codes.

    Of sums of vectors a search may miss the exact one: its own tests compare it with brute force.
    """
    if SCHEMES[scheme].own_method:
        return
    definition, matrix = SCHEMES[scheme], schemes.rounded_matrix(scheme, weights(), **options)
    codes, grid = matrix.unpack()
    again = definition.quantize(definition.dequantize(codes, grid, options), grid, options)
    assert definition.dequantize(again, grid, options).equal(definition.dequantize(codes, grid, options))


@EACH
def test_group_is_quantized_independently_of_the_others(scheme, options):
    """What methods that go through the columns rely on."""
    if SCHEMES[scheme].own_method:
        return
    definition, weight = SCHEMES[scheme], weights()
    size = definition.group_size(200, options)
    full_parameters = round_to_nearest(weight, definition, options).qparams
    for group, start in enumerate(range(0, 200, size)):
        group_parameters = round_to_nearest(weight[:, start : start + size], definition, options).qparams
        for name, tensor in group_parameters.items():
            assert tensor.equal(full_parameters[name][:, group : group + 1])


@EACH
def test_matmul_equals_that_of_dequantized_weights_up_to_activation_rounding(scheme, options):
    layer = schemes.with_activation_range(nn.Linear(200, 6), scheme, options)
    x = torch.randn(3, 5, 200)
    with torch.inference_mode():
        actual, exact = layer(x), F.linear(x, layer.matrix.dequantize(), layer.bias)
    off = (actual - exact).abs().mean() / exact.std()
    limit = 0.15 if options.get("activation_bits") == 4 else 0.05  # instead of 8
    assert off < (limit if SCHEMES[scheme].quantizes_activations(options) else 1e-6)
    assert actual.shape == (3, 5, 6)


@pytest.mark.parametrize(("scheme", "options"), TABLES)
def test_embedding_lookups_are_rows_of_the_dequantized_weights(scheme, options):
    table = nn.Embedding(12, 40, padding_idx=3)
    layer = quantize_module(table, scheme, options)
    ids = torch.tensor([[3, 0, 11], [7, 7, 1]])
    assert layer(ids).equal(layer.matrix.dequantize()[ids])
    assert layer(ids)[0, 0].eq(0).all()


@EACH
def test_file_has_the_documented_bits_per_weight(scheme, options):
    from smelt.models.empty_model import quantized_bytes

    width = 1024
    matrix = nn.ModuleList([schemes.rounded_matrix(scheme, weights(4, width), **options)])
    storage = SCHEMES[scheme].stored_tensors(4, width, options).values()
    constant_bytes = sum(stored.size_bytes for stored in storage if stored.calibrated)
    bits = 8 * (quantized_bytes(matrix) - constant_bytes)
    assert bits == bits_per_weight(SCHEMES[scheme], options, width, rows=4) * 4 * width


@EACH
def test_layers_with_the_same_input_become_one_matmul(scheme, options):
    parts = [schemes.with_activation_range(nn.Linear(64, n, bias=n != 8), scheme, options) for n in (8, 12)]
    x = torch.randn(2, 64)
    storage = SCHEMES[scheme].stored_tensors(8, 64, options)
    of_matrix = [name for name, stored in storage.items() if not (stored.per_row or stored.calibrated)]
    first, second = (part.matrix for part in parts)
    if not all(first.tensor(name).equal(second.tensor(name)) for name in of_matrix):  # none serves both
        assert concat_quantized(parts) is None
        return
    with torch.inference_mode():
        assert concat_quantized(parts)(x).allclose(torch.cat([m(x) for m in parts], dim=1), atol=1e-5)


class Both(nn.Module):
    """A lookup and a product; of one matrix, where the scheme codes tables."""

    def __init__(self, scheme, options=None):
        super().__init__()
        self.attentions = ()  # a graph of a model has some
        self.words = nn.Embedding(12, 64)
        self.head = schemes.with_activation_range(nn.Linear(64, 12), scheme, options, largest=0.1)
        if SCHEMES[scheme].supports_embeddings:
            self.words = quantize_module(self.words, scheme, options)
            self.words.matrix = self.head.matrix

    def forward(self, ids):
        return self.head(self.words(ids))


@pytest.mark.parametrize(
    ("scheme", "target"),
    [
        (s, t)
        for s in SCHEMES
        for t in supported_targets([SCHEMES[s]])
        if t not in ("ort-cuda", *GRAPH_TARGETS)
    ],
)
def test_graph_equals_torch_and_its_dequantized_copy_the_dequantized_weights(scheme, target, tmp_path):
    torch.manual_seed(0)
    only = SCHEMES[scheme].required_options.get(target, {})
    options = default_options(SCHEMES[scheme]) | {name: values[0] for name, values in only.items()}
    model, ids = Both(scheme, options).eval(), torch.tensor([[1, 3, 7]])
    graph = GraphSpec("model", model, (ids,), ["ids"], ["out"], ({1: "length"},))
    with torch.inference_mode():
        rows = model.words(ids)
        expected = model.head(rows).numpy()
        exact = F.linear(rows, model.head.matrix.dequantize(), model.head.bias).numpy()
    onnx_model = export_graph(graph, target, max(20, SCHEMES[scheme].min_opset.get(target, 0)))
    expand_placeholders(onnx_model)
    explicit = {"QuantizeLinear", "DequantizeLinear"} if target != "ort-cpu" else set()
    assert {n.op_type for n in onnx_model.graph.node} & (explicit or set(SCHEMES[scheme].operators))
    # where the runtime rounds activations, as OpenVINO does, its own test shows that it does
    by_runtime = any(entry.key == ACTIVATION_BLOCKS for entry in onnx_model.metadata_props)
    reference = exact if by_runtime else expected
    assert np.abs(run(onnx_model, ids, tmp_path) - reference).max() < 1e-5 * reference.std()
    assert dequantize_graph(onnx_model) == (0 if by_runtime or "accuracy_level" in only else 1)
    assert np.abs(run(onnx_model, ids, tmp_path) - exact).max() < 1e-5 * exact.std()


def run(model, ids, folder):
    from smelt.runtimes.onnx_session import open_onnx_session

    onnx.save(model, folder / "model.onnx")
    return open_onnx_session(folder / "model.onnx").run(None, {"ids": ids.numpy()})[0]
