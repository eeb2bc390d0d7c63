"""GPTQ against its paper's equations with inverses written out; the stage: test_gptq_stage.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from smelt.calibration.statistics import NotInvertibleError, empty_statistics, inverse_cholesky
from smelt.compress.quantize import gptq as module
from smelt.compress.quantize.gptq import column_updates, gptq_quantize
from smelt.compress.quantize.plan_layers import (
    PlannedLayer,
    dequantize_codes,
    round_to_nearest,
    scheme_grid,
)
from smelt.quantization.schemes.registry import default_options, find_scheme
from tests.support import schemes

SCHEMES = {
    "int4": {"group_size": 16}, "int3": {"group_size": 16}, "int2": {"group_size": 32, "symmetric": False},
    "ternary": {"group_size": 32}, "int8-groupwise": {"group_size": 32, "symmetric": False},
    "int8-dynamic": {}, "binary": {"group_size": 32}, "bnb-nf4": {},
}  # fmt: skip


def drawn(inputs=40, tokens=200, outputs=6):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, inputs, generator=draw) @ torch.randn(inputs, inputs, generator=draw)
    statistics = empty_statistics(inputs, second=True)
    statistics.update(x)
    return torch.randn(outputs, inputs, generator=draw), x, statistics


def by_the_equations(weight, x, scheme, options, act_order="none", zeros=None, gptaq=None):
    """Column by column, with the inverse of what is left of H each time (equations 2 and 3 of the paper).

    gptaq: alpha, and the inputs in the float model; what a column lacks on the difference is made up for by
    later ones, with the inverse of their own part of H (GPTAQ's paper, section 4).
    """
    k = weight.shape[1]
    size = scheme.group_size(k, options)
    h = 2 * x.double().numpy().T @ x.double().numpy() / len(x)
    dead = np.diag(h) == 0
    h[dead, dead] = 1
    h += 0.01 * np.diag(h).mean() * np.eye(k)
    new, values = weight.double().numpy().copy(), np.zeros(weight.shape)
    new[:, dead] = 0
    # grids of groups are those of what is left, as in fasterquant with static_groups
    grid = round_to_nearest(torch.tensor(new, dtype=torch.float32), scheme, options).qparams
    left = list(range(k)) if act_order == "none" else list(np.argsort(-(x.double() ** 2).sum(0).numpy()))
    while left:
        j = left[0]
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        group = {name: t[:, j // size : j // size + 1] if t.dim() > 1 else t for name, t in grid.items()}
        column = torch.tensor(new[:, j], dtype=torch.float32)
        if zeros is not None:
            column[zeros[:, j]] = 0
        rounded = scheme.quantize(column[:, None, None], group, options)
        values[:, j] = scheme.dequantize(rounded, group, options)[:, 0, 0].double().numpy()
        new[:, left] -= np.outer((new[:, j] - values[:, j]) / inverse[0, 0], inverse[0])
        left.pop(0)
        if gptaq is not None and left:
            alpha, reference = gptaq
            lacking = 2 / len(x) * (reference - x).double().numpy()[:, j] @ x.double().numpy()[:, left]
            shift = alpha * lacking @ np.linalg.inv(h[np.ix_(left, left)])
            new[:, left] += np.outer(column.double().numpy(), shift)
    return values


def gptq(weight, statistics, scheme, options, act_order="none", zeros=None):
    updates = column_updates(statistics, act_order)
    return gptq_quantize(weight, updates, scheme, options, scheme_grid, zeros)


def of(codes, scheme, options, width):
    return scheme.dequantize(codes.q_weight, codes.qparams, options).flatten(1)[:, :width].double().numpy()


@pytest.mark.parametrize("act_order", ["none", "static"])
@pytest.mark.parametrize("name", SCHEMES)
def test_gptq_equals_equations_of_paper(name, act_order, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_COLUMNS", 24)  # two blocks; 40 inputs: the last group is filled up
    weight, x, statistics = drawn()
    scheme = find_scheme(name)
    options = default_options(scheme) | SCHEMES[name]
    codes = gptq(weight, statistics, scheme, options, act_order)
    expected = by_the_equations(weight, x, scheme, options, act_order)
    # a weight that lies between two codes may become either in float32
    assert np.isclose(of(codes, scheme, options, 40), expected, rtol=1e-5, atol=1e-6).mean() > 0.99
    assert inverse_cholesky(statistics)[1] == 0.01
    nearest = of(round_to_nearest(weight, scheme, options), scheme, options, 40)
    plain, moment = weight.double().numpy(), (x.double().T @ x.double()).numpy()

    def error(values):
        return float((((values - plain) @ moment) * (values - plain)).sum())

    assert error(expected) < 0.95 * error(nearest)


@pytest.mark.parametrize("act_order", ["none", "static"])
def test_zeros_are_kept_and_compensated_in_either_order(act_order):
    weight, x, statistics = drawn()
    scheme, options = find_scheme("int4"), default_options(find_scheme("int4")) | {"group_size": 16}
    zeros = torch.arange(40).view(1, 40) % 4 < torch.arange(6).view(6, 1) % 2 + 1  # another pattern by row
    weight[zeros] = 0
    values = of(gptq(weight, statistics, scheme, options, act_order, zeros), scheme, options, 40)
    assert not values[zeros.numpy()].any()
    expected = by_the_equations(weight, x, scheme, options, act_order, zeros)
    assert np.isclose(values, expected, rtol=1e-5, atol=1e-6).mean() > 0.99


@pytest.mark.parametrize("act_order", ["none", "static"])
@pytest.mark.parametrize(("name", "alpha"), [("int4", 0.25), ("int2", 0.25), ("int3", 0.5)])
def test_gptaq_equals_equations_of_paper(name, alpha, act_order, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_COLUMNS", 24)
    weight, x, _ = drawn(tokens=400)
    draw = torch.Generator().manual_seed(1)
    reference = x @ (torch.eye(40) + 0.15 * torch.randn(40, 40, generator=draw))
    statistics = empty_statistics(40, second=True)
    statistics.update(x)
    statistics.cross_moment = (reference - x).double().T @ x.double()
    scheme = find_scheme(name)
    options = default_options(scheme) | SCHEMES[name]
    updates = column_updates(statistics, act_order, alpha)
    values = of(gptq_quantize(weight, updates, scheme, options, scheme_grid), scheme, options, 40)
    expected = by_the_equations(weight, x, scheme, options, act_order, gptaq=(alpha, reference))
    assert np.isclose(values, expected, rtol=1e-5, atol=1e-6).mean() > 0.99
    target = (reference @ weight.T).double().numpy()
    plain = of(gptq(weight, statistics, scheme, options, act_order), scheme, options, 40)
    errors = [((x.double().numpy() @ v.T - target) ** 2).sum() for v in (values, plain)]
    assert errors[0] < 0.97 * errors[1]  # nearer to the outputs of the float model


def test_static_act_order_rounds_unequal_inputs_with_less_error():
    """The published motivation of act-order: inputs whose errors count most are rounded first."""
    draw, errors = torch.Generator().manual_seed(1), {"none": 0.0, "static": 0.0}
    scheme, options = find_scheme("int3"), default_options(find_scheme("int3")) | {"group_size": 32}
    scale = torch.logspace(-1, 1, 128)[torch.randperm(128, generator=draw)]
    x = torch.randn(2000, 128, generator=draw) @ torch.randn(128, 128, generator=draw) * scale
    weight, statistics = torch.randn(16, 128, generator=draw), empty_statistics(128, second=True)
    statistics.update(x)
    for act_order in errors:
        values = of(gptq(weight, statistics, scheme, options, act_order), scheme, options, 128)
        errors[act_order] = float(((x.double().numpy() @ (values - weight.double().numpy()).T) ** 2).sum())
    assert errors["static"] < 0.8 * errors["none"]


def test_dead_input_does_not_change_other_weights():
    weight, x, _ = drawn()
    weight[:, 3] = 50 * weight.abs().max()  # which would leave the rest of its group one step
    x[:, 3] = 0
    statistics = empty_statistics(40, second=True)
    statistics.update(x)
    scheme, options = find_scheme("int4"), default_options(find_scheme("int4")) | {"group_size": 16}
    values = of(gptq(weight, statistics, scheme, options), scheme, options, 40)
    assert (values[:, 3] == 0).all()
    assert np.isclose(values, by_the_equations(weight, x, scheme, options), atol=1e-5).mean() > 0.99


@pytest.mark.parametrize("name", ["binary", "ternary", "kmeans4", "int4"])
def test_dead_inputs_do_not_raise_error_of_other_inputs(name):
    """Half of them: grids that average over all weights are not those of so many zeros."""
    weight, x, _ = drawn(inputs=128, tokens=400)
    x[:, ::2] = 0
    statistics = empty_statistics(128, second=True)
    statistics.update(x)
    scheme, moment = find_scheme(name), (x.double().T @ x.double()).numpy()
    options = default_options(scheme)

    def error(codes):
        difference = of(codes, scheme, options, 128) - weight.double().numpy()
        return float(((difference @ moment) * difference).sum())

    nearest = error(round_to_nearest(weight, scheme, options))
    assert error(gptq(weight, statistics, scheme, options)) < 0.9 * nearest


def test_reported_gptq_error_is_relative_to_rtn():
    weight, x, _ = drawn()
    weight[:, 3] = 50 * weight.abs().max()
    x[:, 3] = 0
    statistics = empty_statistics(40, second=True)
    statistics.update(x)
    scheme, options = find_scheme("int4"), default_options(find_scheme("int4")) | {"group_size": 16}
    layer = torch.nn.Linear(40, len(weight), bias=False)
    layer.weight.data = weight.clone()
    work = module.GptqRunner(None, scheme_grid, "static", None, None)
    work.quantize([PlannedLayer(layer, "layer", "int4", options, True)], {"layer": statistics})
    moment = (x.double().T @ x.double()).numpy()

    def error(values):
        difference = values - weight.double().numpy()
        return float(((difference @ moment) * difference).sum())

    nearest = error(of(round_to_nearest(weight, scheme, options), scheme, options, 40))
    share = error(layer.weight.detach().double().numpy()) / nearest
    assert work.left["layer"] == pytest.approx(share, rel=1e-3)
    assert share < 0.05  # nearest has one step for all that is next to the weight without input


def test_singular_moment_gets_more_damping():
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moment = x.T @ x
    moment[0, 1] = moment[1, 0] = 1.08 * float((moment[0, 0] * moment[1, 1]).sqrt())  # no moment at all
    statistics = empty_statistics(6, second=True)
    statistics.second_moment, statistics.tokens = moment, 2  # so that H is the moment itself
    factor, damp = inverse_cholesky(statistics)
    assert damp > 0.01
    damped = moment + damp * moment.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(factor.T @ factor, torch.linalg.inv(damped))
    with pytest.raises(NotInvertibleError):
        inverse_cholesky(replace(statistics, second_moment=moment * torch.nan))


def test_columns_compensate_error_of_double_quantized_scales():
    """The scales that bitsandbytes stores, not those before their quantization."""
    weight, _, statistics = drawn(inputs=128, outputs=40)
    scheme, updates = find_scheme("bnb-nf4"), column_updates(statistics, "none")
    plain = default_options(scheme)
    double = plain | {"use_double_quant": True}
    codes = gptq_quantize(weight, updates, scheme, double, scheme_grid)
    matrix = schemes.rounded_matrix("bnb-nf4", weight, use_double_quant=True)
    matrix.set_weight_(codes)
    stored = matrix.unpack().qparams
    expected = gptq_quantize(weight, updates, scheme, plain, lambda *_: stored)
    assert torch.equal(codes.q_weight, expected.q_weight)
    assert not torch.equal(stored["scales"], codes.qparams["scales"])
    assert torch.equal(dequantize_codes(codes, scheme, double, weight), matrix.dequantize())
