"""Grids whose ranges are shrunk where that has the smaller error, against a plain loop."""

from functools import partial

import numpy as np
import pytest
import torch

from smelt.compress.quantize.awq import mse_grid, percentile_grid
from smelt.compress.quantize.plan_layers import round_on_grid, scheme_grid
from smelt.quantization.schemes.registry import SCHEMES, default_options, find_scheme

pytestmark = pytest.mark.quick

HEAVY = torch.distributions.StudentT(3.0)


def drawn(*shape):
    torch.manual_seed(0)
    return HEAVY.sample(shape)


def with_far_ends(rows, count, size):
    """Return groups whose two outliers are best left to less than two fifths of their range."""
    groups = torch.rand(rows, count, size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    groups[..., 0], groups[..., 1] = 4.0, -4.0
    return groups


@pytest.mark.parametrize(
    ("scheme", "last", "groups"), [("int4", 15, drawn(3, 2, 32)), ("int2", 3, with_far_ends(3, 2, 128))]
)
def test_mse_search_equals_gptq_quantizer(scheme, last, groups):
    """For p = 1, 0.99, ... 0.21: scale and zero of (p min, p max), sum of |error|^2.4, the least wins."""
    size, scheme_object = groups.shape[2], find_scheme(scheme)
    options = default_options(scheme_object) | {"group_size": size, "symmetric": False}
    fitted_grid = mse_grid(groups, 2 * size, scheme_object, options)
    for row in range(3):
        for group in range(2):
            w = groups[row, group].double().numpy()
            best = (np.inf, 0.0, 0.0)
            for i in range(80):
                low, high = min(0.0, w.min() * (1 - i / 100)), max(0.0, w.max() * (1 - i / 100))
                scale = float(np.float16((high - low) / last))  # as smelt stores it
                zero = float(np.clip(np.round(-low / scale), 0, last))
                codes = np.clip(np.round(w / scale) + zero, 0, last)
                error = (np.abs((codes - zero) * scale - w) ** 2.4).sum()
                best = min(best, (error, scale, zero))
            assert float(fitted_grid["scales"][row, group]) == pytest.approx(best[1], rel=1e-3)
            assert float(fitted_grid["zeros"][row, group]) == best[2]


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if not scheme.own_method])
def test_mse_grid_error_is_not_above_default_grid(name):
    scheme, weight = find_scheme(name), drawn(8, 256)
    options = default_options(scheme)

    def errors(find_grid):
        codes = round_on_grid(find_grid, weight, scheme, options)
        size = scheme.group_size(256, options)
        values = scheme.dequantize(codes.q_weight, codes.qparams, options)
        return (values - weight.unflatten(1, (-1, size))).abs().pow(2.4).sum(dim=-1)

    plain = errors(lambda groups, width, scheme, options: scheme.compute_qparams(groups, width, options))
    searched = errors(mse_grid)
    assert bool((searched <= plain * (1 + 1e-6)).all())
    if name == "int4":  # of heavy tails most groups gain
        assert float((searched < 0.999 * plain).float().mean()) > 0.5


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if not scheme.own_method])
def test_percentile_equals_numpy_and_ignores_padding_of_last_group(name):
    scheme, weight = find_scheme(name), drawn(4, 200)
    options = default_options(scheme)
    size = scheme.group_size(200, options)
    rounded = round_on_grid(partial(percentile_grid, 97.0), weight, scheme, options)
    assert len(rounded.q_weight[0]) == -(-200 // size)
    for start in range(0, 200, size):
        part = weight[:, start : start + size]
        ends = torch.tensor(np.percentile(part.abs().numpy(), 97.0, axis=1))[:, None].float()
        alone = torch.nn.functional.pad(part.clamp(-ends, ends), (0, size - part.shape[1]))[:, None]
        expected = scheme.compute_qparams(alone, part.shape[1], options)["scales"]
        torch.testing.assert_close(
            rounded.qparams["scales"][:, start // size], expected[:, 0], rtol=1e-3, atol=1e-6
        )


def test_percentile_100_clips_nothing():
    weight, options = drawn(4, 256), default_options(find_scheme("int4"))
    plain = round_on_grid(scheme_grid, weight, find_scheme("int4"), options)
    unclipped = round_on_grid(partial(percentile_grid, 100.0), weight, find_scheme("int4"), options)
    assert unclipped.q_weight.equal(plain.q_weight)


def test_per_tensor_mse_scale_minimizes_error_of_all_weights():
    torch.manual_seed(0)
    weight, scheme, options = torch.randn(40, 400), find_scheme("int8-dynamic"), {"granularity": "tensor"}
    w, best = weight.double().numpy(), (np.inf, 0.0)
    for i in range(80):
        scale = np.abs(w).max() * (1 - i / 100) / 127
        error = (np.abs(np.clip(np.round(w / scale), -127, 127) * scale - w) ** 2.4).sum()
        best = min(best, (error, scale))
    scales = round_on_grid(mse_grid, weight, scheme, options).qparams["scales"]
    assert scales.unique().numel() == 1
    assert float(scales[0]) == pytest.approx(best[1], rel=1e-5)
    assert best[1] < 0.999 * np.abs(w).max() / 127  # else nothing was compared


def test_per_tensor_percentile_is_of_all_values():
    weight, scheme, options = drawn(6, 40), find_scheme("int8-dynamic"), {"granularity": "tensor"}
    scales = round_on_grid(partial(percentile_grid, 97.0), weight, scheme, options).qparams["scales"]
    assert scales.unique().numel() == 1
    assert float(scales[0]) == pytest.approx(np.percentile(weight.abs().numpy(), 97.0) / 127, rel=1e-3)
