"""additive against the published formula of its values, brute force, and ONNX Runtime."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.quantization.schemes.registry import find_scheme
from tests.support import schemes

FORMS = [(2, 8), (1, 8), (4, 4), (3, 4)]


@pytest.mark.parametrize(("count", "bits"), FORMS)
def test_values_equal_published_formula(count, bits):
    """`_dequantize_weight` of the published code, with one output and eight inputs per group."""
    torch.manual_seed(0)
    matrix = schemes.rounded_matrix(
        "additive", torch.randn(12, 44), num_codebooks=count, nbits_per_codebook=bits
    )
    (codes, grid), size = matrix.unpack(), 2**bits
    assert codes.shape == (12, 6, count)  # the last group is padded
    offsets = torch.arange(0, count * size, size)
    vectors = F.embedding_bag(
        codes.flatten(0, 1).long() + offsets, grid["codebooks"].flatten(0, 1), mode="sum"
    )
    expected = (vectors.view(12, 6, 1, 8) * grid["scales"].view(12, 1, 1, 1)).swapaxes(1, 2).reshape(12, 48)
    assert matrix.dequantize().allclose(expected[:, :44], atol=1e-7)


def test_scales_are_norms_of_rows():
    torch.manual_seed(0)
    weight = torch.randn(4, 64)
    assert schemes.rounded_matrix("additive", weight).scales[:, 0].allclose(weight.norm(dim=1), rtol=1e-3)


def test_codes_give_least_error_of_all_sums():
    """Brute force over the 256 sums of two codebooks of 16 vectors."""
    torch.manual_seed(0)
    scheme, groups = find_scheme("additive"), torch.randn(6, 20, 8)
    grid = {"scales": torch.ones(6, 1), "codebooks": torch.randn(2, 16, 8)}
    values = scheme.dequantize(scheme.quantize(groups, grid, {}), grid, {})
    sums = torch.stack([a + b for a, b in itertools.product(*grid["codebooks"])])
    least = torch.cdist(groups.flatten(0, 1), sums).square().amin(dim=1)
    errors = (values - groups).square().sum(dim=-1).flatten()
    assert bool((errors >= least - 1e-4).all())
    assert float((errors < least + 1e-4).float().mean()) > 0.9
    nearest_only = torch.cdist(groups.flatten(0, 1), grid["codebooks"][0]).argmin(dim=1)
    rest = groups.flatten(0, 1) - grid["codebooks"][0][nearest_only]
    greedy = torch.cdist(rest, grid["codebooks"][1]).square().amin(dim=1)
    assert float((greedy < least + 1e-4).float().mean()) < 0.8  # a search of one hypothesis


def test_codebooks_are_no_worse_than_scikit_learn_ones():
    """One codebook is k-means of the groups divided by the norms of their rows."""
    from sklearn.cluster import KMeans

    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    matrix = schemes.rounded_matrix("additive", weight, num_codebooks=1, nbits_per_codebook=4)
    points = (weight / weight.norm(dim=1, keepdim=True)).reshape(-1, 8)
    rows = (matrix.dequantize() / weight.norm(dim=1, keepdim=True)).reshape(-1, 8)
    error = float((rows - points).square().sum())
    inertia = KMeans(16, n_init=1, init="random", random_state=0, tol=0).fit(points.numpy()).inertia_
    assert error == pytest.approx(inertia, rel=0.02)


@pytest.mark.parametrize(("count", "bits"), FORMS)
def test_onnx_runtime_equals_torch_with_weights_looked_up_at_load(count, bits, tmp_path):
    import onnx

    options = {"num_codebooks": count, "nbits_per_codebook": bits}
    torch.manual_seed(0)
    layer, x = quantize_module(nn.Linear(100, 24), "additive", options).eval(), torch.randn(2, 3, 100)
    path = tmp_path / "optimized.onnx"
    (actual,) = schemes.run_onnx_runtime([layer], x, str(path))
    with torch.inference_mode():
        expected = layer(x).numpy()
    assert np.abs(actual - expected).max() < 1e-5 * expected.std()
    assert {"Gather", "ReduceSum", "Mul"}.isdisjoint(node.op_type for node in onnx.load(path).graph.node)
    stored = schemes.export_layers([layer], x).graph
    names = [("codes", onnx.TensorProto.UINT8), ("vectors", onnx.TensorProto.FLOAT16)]
    for name, kind in (*names, ("half_scales", onnx.TensorProto.FLOAT16)):
        assert any(t.name.endswith(name) and t.data_type == kind for t in stored.initializer)
    assert not any(list(t.dims) in ([24, 100], [104, 24]) for t in stored.initializer)
