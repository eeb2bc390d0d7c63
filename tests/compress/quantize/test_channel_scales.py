"""AWQ's two searches against the loops of its published code, on inputs instead of second moments."""

import numpy as np
import pytest
import torch

from smelt.compress.quantize.awq import (
    LayerToScale,
    clip_and_quantize,
    relative_weight_magnitudes,
    scales_from_magnitudes,
    search_scales,
)
from smelt.compress.quantize.plan_layers import round_to_nearest
from smelt.quantization.schemes.registry import default_options, find_scheme

SCHEMES = {
    "int4": {"group_size": 16}, "int8-groupwise": {"group_size": 32, "symmetric": False}, "int8-dynamic": {},
    "bnb-nf4": {},
}  # fmt: skip


def drawn(inputs=40, tokens=200, outputs=(6, 5)):
    """Inputs of which a few channels are large, and matrices that read them."""
    draw = torch.Generator().manual_seed(0)
    large = torch.where(torch.rand(inputs, generator=draw) < 0.1, 30.0, 1.0)
    x = torch.randn(tokens, inputs, generator=draw) * large
    return x, [torch.randn(n, inputs, generator=draw) for n in outputs]


def pseudo_quantize(weight, bits=4, group=16):
    """pseudo_quantize_tensor of llm-awq's quantizer.py, with zero points."""
    w = weight.reshape(-1, group)
    high, low = w.max(1, keepdims=True), w.min(1, keepdims=True)
    most = 2**bits - 1
    scales = np.maximum(high - low, 1e-5) / most
    zeros = np.clip(-np.round(low / scales), 0, most)
    return ((np.clip(np.round(w / scales) + zeros, 0, most) - zeros) * scales).reshape(weight.shape)


def values(weight, scheme, options):
    codes = round_to_nearest(weight, scheme, options)
    return scheme.dequantize(codes.q_weight, codes.qparams, options).flatten(1)[:, : weight.shape[1]]


def duo_weight_means(weights, size):
    """w_mean of AutoAWQ's quantizer.py: the mean over rows of weights that are relative to their group."""
    means = []
    for w in weights:
        rows = w.double().numpy()
        relative = np.zeros_like(rows)
        for start in range(0, rows.shape[1], size):
            part = np.abs(rows[:, start : start + size])
            relative[:, start : start + size] = part / (part.max(axis=1, keepdims=True) + 1e-6)
        means.append(relative)
    return np.concatenate(means).mean(axis=0)


@pytest.mark.parametrize("duo", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_scale_search_equals_awq_auto_scale(name, duo):
    """_search_module_scale: twenty ratios, the mean squared error of the outputs, the first of the least."""
    x, weights = drawn()
    scheme = find_scheme(name)
    options = default_options(scheme) | SCHEMES[name]
    best = (np.inf, 0.0, None)
    products = [LayerToScale(w, scheme, options) for w in weights]
    weight_means = duo_weight_means(weights, scheme.group_size(40, options)) if duo else None
    errors = []
    for ratio in range(-1, 20):  # the first: no scales
        scales = x.abs().double().mean(0).numpy() ** (max(0, ratio) / 20)
        if duo and ratio >= 0:
            scales = scales / (weight_means ** (1 - ratio / 20) + 1e-4)
        scales = np.clip(scales, 1e-4, None)
        scales = scales / np.sqrt(scales.max() * scales.min())
        error = 0.0
        for w in weights:
            rounded = values(w * torch.tensor(scales).float(), scheme, options).numpy() / scales
            error += float(((x.numpy() @ (rounded - w.numpy()).T) ** 2).sum())
        errors.append(error)
        if error < best[0]:
            best = (error, ratio / 20, scales)
    weight_magnitudes = relative_weight_magnitudes(products) if duo else None
    if duo:
        np.testing.assert_allclose(weight_magnitudes.numpy(), weight_means, rtol=1e-5)
    search = search_scales(products, x.abs().mean(0), x.T @ x, weight_magnitudes)
    assert search.alpha == best[1] >= 0
    np.testing.assert_allclose(search.scales.numpy(), best[2], rtol=1e-5)
    assert search.error_ratio == pytest.approx(best[0] / errors[0], rel=1e-3)
    assert search.error_ratio < 0.9


def test_int4_with_zero_points_equals_awq_quantizer():
    """pseudo_quantize_tensor on groups with values on both sides of zero; scales are float16 in smelt."""
    _, (w, _) = drawn(inputs=32)
    options = default_options(find_scheme("int4")) | {"group_size": 16, "symmetric": False}
    near = np.isclose(values(w, find_scheme("int4"), options), pseudo_quantize(w.numpy()), atol=4e-3)
    assert near.mean() > 0.98  # a weight in the middle of two codes may become either


def test_channels_without_activations_get_minimum_scale():
    scales = scales_from_magnitudes(torch.tensor([4.0, 1.0, 0.0]), 0.5)
    expected = torch.tensor([2.0, 1.0, 1e-4]) / (2.0 * 1e-4) ** 0.5
    torch.testing.assert_close(scales, expected)
    assert scales_from_magnitudes(torch.tensor([4.0, 0.0]), 0.0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("duo", [False, True])
def test_scales_that_gain_nothing_are_not_used(duo):
    """Weights on the grid are rounded without error: any scale would only add some."""
    x, _ = drawn()
    weight = torch.randint(-7, 8, (6, 40), generator=torch.Generator().manual_seed(0)).float()
    weight[:, ::16] = -8.0  # each group has the range of int4 with a scale of 1
    scheme = find_scheme("int4")
    products = [LayerToScale(weight, scheme, default_options(scheme) | SCHEMES["int4"])]
    means = relative_weight_magnitudes(products) if duo else None
    search = search_scales(products, x.abs().mean(0), x.T @ x, means)
    assert search.alpha is None
    assert bool((search.scales == 1).all())


@pytest.mark.parametrize("name", ["int4", "int8-dynamic"])
def test_clip_search_equals_awq_auto_clip(name):
    """auto_clip_layer: of each group, ten ends down to 0.55 of the largest magnitude, by its own output."""
    x, (w, _) = drawn()
    scheme = find_scheme(name)
    options = default_options(scheme) | SCHEMES[name]
    size = scheme.group_size(40, options)
    quantized = clip_and_quantize(LayerToScale(w, scheme, options), x.T @ x)
    result = scheme.dequantize(quantized.q_weight, quantized.qparams, options).flatten(1)[:, :40]
    cut = 0
    for row in range(len(w)):
        for start in range(0, 40, size):
            inside = slice(start, start + size)
            part = torch.nn.functional.pad(w[row : row + 1, inside], (0, max(0, start + size - 40)))[None]
            best, least, best_step = None, np.inf, 0
            for step in range(10):
                end = part.abs().max() * (1 - step / 20)
                grid = scheme.compute_qparams(part[0, None].clamp(-end, end), min(size, 40 - start), options)
                tried = scheme.dequantize(scheme.quantize(part[0, None], grid, options), grid, options)[0, 0]
                tried = tried[: 40 - start]
                error = float(((x[:, inside] @ (tried - w[row, inside])) ** 2).mean())
                if error < least:
                    best, least, best_step = tried, error, step
            cut += best_step > 0
            torch.testing.assert_close(result[row, inside], best, rtol=1e-4, atol=1e-5)
    assert cut  # where nothing was cut off, nothing was compared


def test_per_tensor_clip_minimizes_output_error_of_all_rows():
    x, (w, _) = drawn()
    options = {"granularity": "tensor"}
    best, least, best_step = 0.0, np.inf, 0
    for step in range(10):
        scale = float(w.abs().max()) * (1 - step / 20) / 127
        tried = (w / scale).round().clamp(-127, 127) * scale
        error = float(((x.double() @ (tried - w).T.double()) ** 2).sum())
        if error < least:
            best, least, best_step = scale, error, step
    scales = clip_and_quantize(LayerToScale(w, find_scheme("int8-dynamic"), options), x.T @ x).qparams[
        "scales"
    ]
    assert scales.unique().numel() == 1
    assert float(scales[0]) == pytest.approx(best, rel=1e-5)
    assert best_step
