"""HQQ against the loop of its published code, with the least squares for scale or zero point written out."""

import numpy as np
import pytest
import torch

from smelt.compress.quantize.hqq import hqq_grid, shrink, zero_point_shift
from smelt.compress.quantize.plan_layers import round_on_grid, scheme_grid
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.near_ties import NEAR_TIE
from smelt.quantization.schemes.registry import SCHEMES, default_options, find_scheme
from tests.support.models import every_family
from tests.support.processes import peer_tools

HEAVY = torch.distributions.StudentT(3.0)


def drawn(*shape):
    torch.manual_seed(0)
    return HEAVY.sample(shape)


def test_shrink_equals_published_operator():
    """shrink_lp_op: sign(x) relu(|x| - |x|^(p - 1) / beta)."""
    x = drawn(50).numpy()
    expected = np.sign(x) * np.maximum(np.abs(x) - np.abs(x) ** (0.7 - 1) / 2.0, 0)
    np.testing.assert_allclose(shrink(torch.tensor(x), 2.0).numpy(), expected, rtol=1e-5)
    assert float(shrink(torch.zeros(1), 2.0)) == 0.0
    assert (expected != 0).any()


@pytest.mark.peers
@pytest.mark.parametrize("name", ["int4", "int2"])
@pytest.mark.parametrize("large", [0.02, 40.0])  # as weights are, and where the norm lets errors go
def test_zero_point_shift_equals_published_code(name, large):
    """Turn by turn, the scale held, as it holds it."""
    scheme, groups, mask = find_scheme(name), drawn(6, 3, 64) * large, torch.ones(3, 64)
    options = default_options(scheme) | {"symmetric": False, "group_size": 64}
    grid = scheme.compute_qparams(groups, 192, options)
    scales, zeros, reference_zeros = grid["scales"], grid["zeros"].float(), grid["zeros"].float()[..., None]
    published, beta, let_go = peer_tools.hqq_module(), 10.0, 0
    for _ in range(20):
        now = grid | {"zeros": zeros}
        values = scheme.dequantize(
            (groups / scales[..., None] + zeros[..., None]).round().clamp(0, scheme.max_code), now, options
        )
        errors = shrink(groups - values, beta)
        let_go += int((errors != 0).sum())
        zeros = zeros + zero_point_shift(groups - errors, values / scales[..., None], scales, mask)
        step = published.optimize_weights_proximal_legacy_step
        reference_zeros = step(
            groups, 1 / scales[..., None], reference_zeros, [0, scheme.max_code], beta, 0.7, -1
        )[2]
        torch.testing.assert_close(zeros, reference_zeros[..., 0], rtol=1e-5, atol=1e-5)
        beta *= 1.01
    assert bool(let_go) == (large > 1)
    assert float((zeros - grid["zeros"]).abs().max()) > (1e-3 if large > 1 else 0.1)


def test_hqq_with_two_bits_warns(tmp_path):
    def warned(**settings):
        quantize_settings = QuantizeSettings(method="hqq", **settings)
        ctx = every_family.run_stage(
            Quantize(),
            quantize_settings,
            every_family.model_with_layers("bert", 1),
            "bert",
            tmp_path / str(settings),
        )
        return [message for message in ctx.warnings if message.code == "hqq-two-bits"]

    assert len(warned(scheme="int2")) == 1
    assert warned(scheme="int3") == []
    # one matrix of a mixture, which gets four bits
    skip = ["*attention*", "*intermediate*", "*pooler*", "*embeddings*", "classifier"]
    assert (
        warned(
            mixed_precision={"target_bits": 8.0}, calibration_samples=4, sensitivity_samples=4, exclude=skip
        )
        == []
    )


def test_hqq_grid_equals_published_loop_with_fitted_scale():
    """int4, symmetric, a group at a time; of all iterations the least mean |error| wins."""
    groups = drawn(3, 2, 32) * 4  # large enough that the norm lets a part of the error go
    options = default_options(find_scheme("int4")) | {"group_size": 32}
    fitted_grid = hqq_grid(groups, 64, find_scheme("int4"), options)
    moved = 0
    for row in range(3):
        for group in range(2):
            w = groups[row, group].double().numpy()
            end = w[np.abs(w).argmax()]
            scale = start = float(np.float16(end / -8))
            best, beta = (np.inf, 0.0), 10.0
            for _ in range(21):
                codes = np.clip(np.round(w / scale), -8, 7)
                error = w - codes * scale
                best = min(best, (np.abs(error).mean(), scale))
                part = np.sign(error) * np.maximum(np.abs(error) - np.abs(error) ** -0.3 / beta, 0)
                scale = float(np.float16(((w - part) * codes).sum() / (codes * codes).sum()))
                beta *= 1.01
            assert float(fitted_grid["scales"][row, group]) == pytest.approx(best[1], rel=1e-3)
            moved += best[1] != start
    assert moved


def test_zero_points_follow_published_update_and_are_integers():
    """mean(codes - (W - E) / scale), rounded; then the scale that fits best."""
    groups = drawn(1, 1, 64).abs() * torch.linspace(0.01, 6, 64)  # crowded at one end
    scheme, options = (
        find_scheme("int4"),
        default_options(find_scheme("int4")) | {"group_size": 64, "symmetric": False},
    )
    fitted_grid = hqq_grid(groups, 64, scheme, options)
    assert fitted_grid["zeros"].dtype == torch.uint8
    w, grid = groups[0, 0].double().numpy(), scheme.compute_qparams(groups, 64, options)
    scale, zero = float(grid["scales"]), float(grid["zeros"])
    best, beta = (np.inf, 0.0, 0.0), 10.0
    for _ in range(21):
        codes = np.clip(np.round(w / scale) + zero, 0, 15)
        error = w - (codes - zero) * scale
        best = min(best, (np.abs(error).mean(), scale, zero))
        target = w - np.sign(error) * np.maximum(
            np.abs(error) - np.maximum(np.abs(error), 1e-30) ** -0.3 / beta, 0
        )
        zero = float(np.clip(np.round(np.mean(codes - target / scale)), 0, 15))
        steps = codes - zero
        scale = float(np.float16((target * steps).sum() / (steps * steps).sum()))
        beta *= 1.01
    assert float(fitted_grid["scales"]) == pytest.approx(best[1], rel=1e-3)
    assert float(fitted_grid["zeros"]) == best[2]


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if not scheme.own_method])
def test_hqq_error_is_not_above_default_grid(name):
    scheme, weight = find_scheme(name), drawn(8, 200)  # the last group is filled up
    options = default_options(scheme)

    def errors(find_grid):
        codes = round_on_grid(find_grid, weight, scheme, options)
        values = scheme.dequantize(codes.q_weight, codes.qparams, options).flatten(1)[:, :200]
        return (values - weight).abs().sum(dim=1)

    plain, searched = errors(scheme_grid), errors(hqq_grid)
    assert bool((searched <= plain * (1 + 1e-5)).all())
    if name == "int4":
        assert float(searched.sum()) < 0.99 * float(plain.sum())


def test_zero_group_is_quantized_to_zeros():
    scheme, options = find_scheme("int4"), default_options(find_scheme("int4"))
    zeros = torch.zeros(2, 1, 64)
    fitted_grid = hqq_grid(zeros, 64, scheme, options)
    assert scheme.dequantize(scheme.quantize(zeros, fitted_grid, options), fitted_grid, options).equal(zeros)


def test_per_tensor_hqq_scale_fits_all_weights():
    weight, scheme, options = drawn(6, 40) * 40, find_scheme("int8-dynamic"), {"granularity": "tensor"}
    w = weight.double().numpy()
    scale = start = np.abs(w).max() / 127
    best, beta = (np.inf, 0.0), 10.0
    for _ in range(21):
        codes = np.clip(np.round(w / scale), -127, 127)
        error = w - codes * scale
        if np.abs(error).sum() * (1 + NEAR_TIE) < best[0]:
            best = (np.abs(error).sum(), scale)
        part = np.sign(error) * np.maximum(np.abs(error) - np.maximum(np.abs(error), 1e-30) ** -0.3 / beta, 0)
        scale = ((w - part) * codes).sum() / (codes * codes).sum()
        beta *= 1.01
    scales = round_on_grid(hqq_grid, weight, scheme, options).qparams["scales"]
    assert scales.unique().numel() == 1
    assert float(scales[0]) == pytest.approx(best[1], rel=1e-5)
    assert best[1] != start


@pytest.mark.parametrize("name", ["int2", "int3", "int4", "int8-groupwise"])
def test_hqq_scales_are_stored_as_float16(name):
    scheme, groups = find_scheme(name), drawn(64, 4, 32)
    options = default_options(scheme) | {"symmetric": False, "group_size": 32}
    fitted_grid, default_grid = (
        hqq_grid(groups, 128, scheme, options),
        scheme.compute_qparams(groups, 128, options),
    )
    assert fitted_grid["scales"].equal(fitted_grid["scales"].half().float())
    assert (fitted_grid["scales"] != default_grid["scales"]).float().mean() > 0.5
    assert int(fitted_grid["zeros"].max()) <= scheme.max_code
