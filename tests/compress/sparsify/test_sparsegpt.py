"""SparseGPT against its paper's equations with inverses written out, and against exact least squares."""

import numpy as np
import pytest
import torch

from smelt.calibration.statistics import empty_statistics
from smelt.compress.sparsify.methods import sparsegpt, wanda
from smelt.compress.sparsify.pattern import SparsityInput, SparsityPattern

pytestmark = pytest.mark.quick


def made(method, weight, x, pattern, zeros=None):
    statistics = empty_statistics(x.shape[1], second=True)
    statistics.update(x)
    return (
        method.sparsify_layer(SparsityInput(weight, statistics, zeros), pattern, torch.Generator())
        .double()
        .numpy()
    )


def drawn(inputs=12, tokens=60, outputs=5):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, inputs, generator=draw) @ torch.randn(inputs, inputs, generator=draw)
    return torch.randn(outputs, inputs, generator=draw), x


def by_the_equations(weight, x, pattern, columns, zeros=None):
    """Column by column, with the inverse of what is left of H each time (equations 3 to 5 of the paper).

    Zeros of before are the first of the mask, and what falls on them is an error of a removed weight.
    """
    existing_zeros = np.zeros(weight.shape, dtype=bool) if zeros is None else zeros.numpy()
    new = weight.double().numpy().copy()
    h = 2 * x.double().numpy().T @ x.double().numpy() / len(x)
    dead = np.diag(h) == 0
    h[dead, dead] = 1
    new[:, dead] = 0
    h += 0.01 * np.diag(h).mean() * np.eye(len(h))
    k = len(h)
    inverses = [np.linalg.inv(h[j:, j:]) for j in range(k)]  # of the columns from j on
    removed = np.zeros_like(new, dtype=bool)
    for j in range(k):
        step = pattern.group or columns
        if j % step == 0:
            part = range(j, min(j + step, k))
            scores = np.stack([new[:, c] ** 2 / inverses[c][0, 0] for c in part], axis=1)
            scores[existing_zeros[:, part]] = -1
            removed[:, part] = existing_zeros[:, part]
            if pattern.group:
                for row in range(len(new)):
                    removed[row, j + np.argsort(scores[row])[: step - pattern.kept]] = True
            else:
                order = np.argsort(scores.ravel())[: int(scores.size * pattern.sparsity)]
                removed[:, part] |= np.isin(np.arange(scores.size), order).reshape(scores.shape)
        for row in np.flatnonzero(removed[:, j]):
            new[row, j:] -= new[row, j] / inverses[j][0, 0] * inverses[j][:, 0]
            new[row, j] = 0
    return new


@pytest.mark.parametrize(
    "pattern", [SparsityPattern(0.5), SparsityPattern(0.5, 2, 4), SparsityPattern(1 / 3, 2, 3)]
)
def test_sparsegpt_equals_equations_of_paper(pattern, monkeypatch):
    monkeypatch.setattr(sparsegpt, "_BLOCK_COLUMNS", 6)  # two blocks; of groups of 4 three
    weight, x = drawn()
    new = made(sparsegpt, weight, x, pattern)
    expected = by_the_equations(weight, x, pattern, columns=6)
    assert ((new == 0) == (expected == 0)).all()
    np.testing.assert_allclose(new, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pattern", [SparsityPattern(0.6), SparsityPattern(0.5, 2, 4)])
def test_compensation_of_existing_zeros_is_passed_to_later_columns(pattern, monkeypatch):
    monkeypatch.setattr(sparsegpt, "_BLOCK_COLUMNS", 12)
    weight, x = drawn(inputs=24, outputs=8)
    zeros = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    weight[zeros] = 0
    new = made(sparsegpt, weight, x, pattern, zeros)
    expected = by_the_equations(weight, x, pattern, 12, zeros)
    assert ((new == 0) == (expected == 0)).all()
    assert (new[zeros] == 0).all()
    np.testing.assert_allclose(new, expected, rtol=1e-3, atol=1e-4)


def test_always_zero_input_loses_its_weights():
    weight, x = drawn()
    x[:, 3] = 0
    new = made(sparsegpt, weight, x, SparsityPattern(0.5))
    np.testing.assert_allclose(
        new, by_the_equations(weight, x, SparsityPattern(0.5), 128), rtol=1e-3, atol=1e-4
    )
    assert (new[:, 3] == 0).all()


def test_sparsegpt_error_is_between_least_squares_and_no_update():
    weight, x = drawn(inputs=32, tokens=400)
    plain, values = weight.double().numpy(), x.double().numpy()

    def error(new):
        return float(((values @ (new - plain).T) ** 2).sum())

    new = made(sparsegpt, weight, x, SparsityPattern(0.5))
    masked = np.where(new == 0, 0, plain)
    exact = np.zeros_like(plain)
    for row in range(len(plain)):
        nonzero = new[row] != 0
        exact[row, nonzero] = np.linalg.lstsq(values[:, nonzero], values @ plain[row], rcond=None)[0]
    assert error(exact) <= error(new) < error(masked)
    assert error(new) < error(made(wanda, weight, x, SparsityPattern(0.5)))


def test_zero_sparsity_changes_nothing():
    weight, x = drawn()
    np.testing.assert_array_equal(made(sparsegpt, weight, x, SparsityPattern(0.001)), weight.double().numpy())
