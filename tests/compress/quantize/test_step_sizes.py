"""Learned step sizes against LSQ's equations, computed here in numpy."""

import numpy as np
import pytest
import torch

from smelt.compress.quantize.plan_layers import quantize_into
from smelt.compress.quantize.step_sizes import ActivationStepSize, StepSizes
from tests.support import schemes

pytestmark = pytest.mark.quick

# scheme -> (options, Q_N, Q_P); inputs of a row that share a step: 32, or all of them
ENDS = {
    "int8-dynamic": ({}, 127, 127), "int8-groupwise": ({"group_size": 32}, 128, 127),
    "int4": ({"group_size": 32}, 8, 7), "int3": ({"group_size": 32}, 4, 3),
    "int2": ({"group_size": 32}, 2, 1), "ternary": ({"group_size": 32}, 1, 1),
}  # fmt: skip


def lsq(v, s, low, high, upstream):
    """Equations 1 to 3 and 5 for groups that share s: v^, dL/dv, dL/ds without its factor."""
    q = v.astype(np.float64) / s.astype(np.float64)[..., None]
    level = np.clip(np.rint(q), low, high)
    of_s = np.where(q <= low, low, np.where(q >= high, high, level - q))
    inside = (q > low) & (q < high)
    return level * s[..., None], upstream * inside, (upstream * of_s).sum(-1)


def with_exact_scales(matrix):
    """Steps whose first values are powers of two, so that a value can lie at an end exactly."""
    steps = StepSizes(matrix)
    steps.first.copy_(2.0 ** torch.randint(-7, -3, steps.first.shape))
    return steps


def points(scales, low, high, size):
    """For each group values inside, at and beyond its ends, exact multiples of its step among them."""
    levels = [low - 3.3, low - 0.6, low, low + 0.3, -0.4, 0.0, 0.26, high - 0.3, high, high + 0.7, high + 5]
    row = np.resize(np.array(levels, np.float32), size)
    return (row * scales[..., None]).astype(np.float32)


@pytest.mark.parametrize("scheme", ENDS)
def test_step_size_gradients_equal_lsq_paper(scheme):
    options, below, above = ENDS[scheme]
    torch.manual_seed(0)
    matrix = schemes.rounded_matrix(scheme, torch.randn(3, 64) * 0.05, **options)
    steps = with_exact_scales(matrix)
    scales = steps.first.numpy()
    size = 64 // scales.shape[1]
    v = points(scales, -below, above, size)
    upstream = np.random.default_rng(0).normal(size=v.shape)
    weight = torch.tensor(v.reshape(3, 64), requires_grad=True)
    out = steps.fake_quantize(weight)
    out.backward(torch.tensor(upstream.reshape(3, 64), dtype=torch.float32))
    values, of_v, of_s = lsq(v, scales, -below, above, upstream)
    # a value in the middle of two codes may go to either; those here do not lie there
    assert out.detach().numpy() == pytest.approx(values.reshape(3, 64), rel=1e-5, abs=1e-7)
    assert weight.grad.numpy() == pytest.approx(of_v.reshape(3, 64), abs=1e-6)
    factor = 1 / np.sqrt(size * above)
    # what trains is log s: dL/dlog s = s dL/ds
    assert steps.log.grad.numpy() == pytest.approx(scales * of_s * factor, rel=2e-4, abs=1e-5)
    assert np.abs(of_s).min() > 1e-3


def test_zero_point_gradients_equal_lsq_plus_paper():
    """LSQ+, equations 4 and 5, with beta = -z s: dv^/dz is -s beyond an end and 0 between them."""
    torch.manual_seed(0)
    matrix = schemes.rounded_matrix("int4", torch.randn(3, 64) * 0.05 + 0.03, group_size=32, symmetric=False)
    steps = with_exact_scales(matrix)
    scales, zeros = steps.first.numpy(), matrix.unpack().qparams["zeros"].numpy().astype(np.float64)
    assert len(np.unique(zeros)) > 1
    ends = np.stack([-zeros, 15 - zeros], axis=-1)
    v = np.stack([points(s, *end, 32) for s, end in zip(scales.flat, ends.reshape(6, 2), strict=True)])
    v = v.reshape(3, 2, 32)
    upstream = np.random.default_rng(1).normal(size=v.shape)
    weight = torch.tensor(v.reshape(3, 64), dtype=torch.float32, requires_grad=True)
    out = steps.fake_quantize(weight)
    out.backward(torch.tensor(upstream.reshape(3, 64), dtype=torch.float32))
    low, high = -zeros[..., None], 15 - zeros[..., None]
    values, of_v, of_s = lsq(v, scales, low, high, upstream)
    q = v / scales[..., None]
    beyond = (q <= low) | (q >= high)
    factor = 1 / np.sqrt(32 * 15)  # codes from 0 to 15: Q_P = 15
    assert out.detach().numpy() == pytest.approx(values.reshape(3, 64), rel=1e-5, abs=1e-7)
    assert weight.grad.numpy() == pytest.approx(of_v.reshape(3, 64), abs=1e-6)
    assert steps.log.grad.numpy() == pytest.approx(scales * of_s * factor, rel=2e-4, abs=1e-5)
    of_z = -(upstream * beyond * scales[..., None]).sum(-1) * factor
    assert steps.offset.grad.numpy() == pytest.approx(15 * of_z, rel=2e-4, abs=1e-6)


def test_activation_step_size_gradients_equal_lsq_paper():
    first = torch.tensor(0.0625)
    step = ActivationStepSize(first, -128, 127)
    x = points(np.float32([0.0625]), -128, 127, 24).reshape(2, 12)
    upstream = np.random.default_rng(2).normal(size=x.shape)
    inputs = torch.tensor(x, requires_grad=True)
    out = step(inputs)
    out.backward(torch.tensor(upstream, dtype=torch.float32))
    values, of_x, of_s = lsq(x.reshape(1, 24), np.float32([0.0625]), -128, 127, upstream.reshape(1, 24))
    assert out.detach().numpy() == pytest.approx(values.reshape(2, 12), rel=1e-5, abs=1e-6)
    assert inputs.grad.numpy() == pytest.approx(of_x.reshape(2, 12), abs=1e-6)
    assert float(step.log.grad) == pytest.approx(0.0625 * of_s[0] / np.sqrt(12 * 127), rel=1e-3)


@pytest.mark.parametrize("scheme", ENDS)
@pytest.mark.parametrize("width", [64, 40])
def test_initial_step_sizes_reproduce_stored_model(scheme, width):
    """And whatever the steps become: what it computes with is what will be stored, to the bit."""
    torch.manual_seed(0)
    weight = torch.randn(5, width) * 0.05
    matrix = schemes.rounded_matrix(scheme, weight, **ENDS[scheme][0])
    steps = StepSizes(matrix)
    started = steps.fake_quantize(matrix.dequantize())
    assert started.allclose(matrix.dequantize(), atol=1e-6)
    with torch.no_grad():
        steps.log.copy_(torch.randn_like(steps.log) * 0.2)
    fake_quantized = steps.fake_quantize(weight).detach()
    before = matrix.unpack().qparams["scales"].clone()
    quantize_into(matrix, weight, steps.quantizer())
    assert matrix.dequantize().equal(fake_quantized)
    after = matrix.unpack().qparams["scales"]
    assert (after / before).numpy() == pytest.approx(steps.scale_changes().numpy(), rel=1e-3)
    ids = torch.tensor([3, 0, 3])
    assert steps.fake_quantize(weight[ids], ids).detach().equal(fake_quantized[ids])


def test_learned_zero_points_are_stored():
    torch.manual_seed(0)
    weight = torch.randn(5, 64)
    matrix = schemes.rounded_matrix("int3", weight, group_size=32, symmetric=False)
    steps = StepSizes(matrix)
    with torch.no_grad():
        steps.offset.copy_(torch.rand(5, 2) * 2 - 0.5)  # some beyond what a zero point can be
    fake_quantized = steps.fake_quantize(weight).detach()
    quantize_into(matrix, weight, steps.quantizer())
    assert matrix.dequantize().equal(fake_quantized)
    zeros = matrix.unpack().qparams["zeros"].numpy()
    assert zeros.tolist() == np.clip(np.rint(steps.offset.detach().numpy() * 7), 0, 7).tolist()


def test_zero_row_is_kept_and_gradients_are_finite():
    weight = torch.randn(3, 32)
    weight[1] = 0
    steps = StepSizes(schemes.rounded_matrix("int4", weight, group_size=32))
    leaf = weight.clone().requires_grad_(True)
    out = steps.fake_quantize(leaf)
    out.sum().backward()
    assert out[1].eq(0).all()
    assert bool(torch.isfinite(steps.log.grad).all())
    assert bool(torch.isfinite(leaf.grad).all())


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_per_tensor_matrix_learns_one_step_size(scheme):
    """Equation 3 summed over all weights, times 1 / sqrt(N Q_P), N being their number."""
    torch.manual_seed(0)
    matrix = schemes.rounded_matrix(scheme, torch.randn(3, 64) * 0.05, granularity="tensor")
    steps = StepSizes(matrix)
    steps.first.fill_(2.0**-5)
    v = points(steps.first.numpy(), -127, 127, 64)
    upstream = np.random.default_rng(0).normal(size=v.shape)
    weight = torch.tensor(v.reshape(3, 64), requires_grad=True)
    out = steps.fake_quantize(weight)
    out.backward(torch.tensor(upstream.reshape(3, 64), dtype=torch.float32))
    values, of_v, of_s = lsq(v, steps.first.numpy(), -127, 127, upstream)
    assert out.detach().numpy() == pytest.approx(values.reshape(3, 64), rel=1e-5, abs=1e-7)
    assert weight.grad.numpy() == pytest.approx(of_v.reshape(3, 64), abs=1e-6)
    assert steps.log.shape == (1, 1)
    assert float(steps.log.grad) == pytest.approx(2.0**-5 * of_s.sum() / np.sqrt(3 * 64 * 127), rel=2e-4)
    with torch.no_grad():
        steps.log.fill_(0.2)
    fake_quantized = steps.fake_quantize(weight).detach()
    quantize_into(matrix, weight.detach(), steps.quantizer())
    assert matrix.dequantize().equal(fake_quantized)
    assert matrix.scales.unique().numel() == 1
    assert float(matrix.scales[0]) == pytest.approx(2.0**-5 * np.exp(0.2), rel=1e-5)


def test_group_padding_is_not_counted_in_gradient_scale():
    """1 / sqrt(N Q_P): the last group of 40 inputs has 8 weights, where the others have 32."""
    torch.manual_seed(0)
    matrix = schemes.rounded_matrix("int4", torch.randn(3, 40), group_size=32)
    steps = StepSizes(matrix)
    weight = torch.full((3, 40), 100.0)  # all beyond the end, which then is the gradient of each
    steps.fake_quantize(weight).sum().backward()
    low, high = (
        float(torch.as_tensor(end).max())
        for end in matrix.scheme.code_range(matrix.unpack().qparams, matrix.options)
    )
    beyond = torch.where(steps.first > 0, high, low) * steps.first  # times ds/dlog
    expected = beyond * torch.tensor([32 / (32 * high) ** 0.5, 8 / (8 * high) ** 0.5])
    torch.testing.assert_close(steps.log.grad, expected, rtol=1e-3, atol=1e-6)
