"""Wanda: score weights by their magnitude times the norm of their input."""

from __future__ import annotations

from typing import ClassVar

from torch import Generator, Tensor

from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.sparsify.method import RequiredStatistics
from smelt.compress.sparsify.pattern import SparsityPattern


class Wanda:
    """Compares |W_ij| |X_j| inside each output's row, X_j being input j over all calibration tokens.

    Sun et al. 2024, A Simple and Effective Pruning Approach for Large Language Models, arXiv:2306.11695,
    equation 1. Kept weights are not updated.
    """

    name: ClassVar[str] = "wanda"
    source: ClassVar[str] = "wanda: Sun et al. 2024, arXiv:2306.11695"
    statistics: ClassVar[RequiredStatistics] = "norms"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: SparsityPattern, draw: Generator
    ) -> Tensor:
        """Return `weight` with zeros at the smallest scores."""
        assert found is not None
        scores = weight.abs() * found.l2_norms.to(weight)
        return weight.masked_fill(pattern.zero_mask(scores, "row"), 0.0)
