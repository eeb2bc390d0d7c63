"""VBMF finds the rank that was planted, and the noise with it; below a known threshold nothing is found."""

import math

import numpy as np
import pytest

from smelt.compress.factorize.convolutions import free_energy, vbmf

pytestmark = pytest.mark.quick


def drawn(rows, columns, rank, noise, seed=0):
    draw = np.random.default_rng(seed)
    signal = draw.normal(size=(rows, rank)) @ draw.normal(size=(rank, columns))
    return signal + noise * draw.normal(size=(rows, columns))


@pytest.mark.parametrize(("rank", "noise"), [(0, 0.1), (1, 0.2), (5, 0.1), (12, 0.5), (3, 1.0)])
@pytest.mark.parametrize(("rows", "columns"), [(40, 300), (120, 60)])
def test_vbmf_recovers_planted_rank_and_noise(rows, columns, rank, noise):
    values = np.linalg.svd(drawn(rows, columns, rank, noise), compute_uv=False)
    solution = vbmf(values, rows, columns)
    assert solution.rank == rank
    assert math.sqrt(solution.variance) == pytest.approx(noise, rel=0.05)


def test_vbmf_threshold_equals_theorem():
    """Theorem 4: sqrt(M v (1 + t) (1 + a / t)) with t = 2.5129 sqrt(a), beyond the largest of pure noise."""
    values = np.linalg.svd(drawn(50, 200, 2, 0.3), compute_uv=False)
    solution = vbmf(values, 50, 200)
    alpha = 50 / 200
    zero = 2.5129 * math.sqrt(alpha)
    expected = math.sqrt(200 * solution.variance * (1 + zero) * (1 + alpha / zero))
    assert solution.threshold == pytest.approx(expected, rel=1e-12)
    assert solution.threshold > math.sqrt(solution.variance) * (math.sqrt(50) + math.sqrt(200))
    assert values[1] > solution.threshold > values[2]


def test_vbmf_variance_minimizes_free_energy():
    values = np.linalg.svd(drawn(30, 90, 4, 0.2), compute_uv=False)
    solution = vbmf(values, 30, 90)
    least = free_energy(solution.variance, values**2, 90, 1 / 3)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        other = solution.variance * factor
        more = free_energy(other, values**2, 90, 1 / 3)
        assert more >= least - 1e-6


def test_zero_matrix_has_rank_zero():
    assert vbmf(np.zeros(4), 4, 9).rank == 0
