"""Wanda: weights matter as much as what they are multiplied with."""

from __future__ import annotations

from typing import ClassVar

from torch import Generator, Tensor

from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.sparsify.method import Looks
from smelt.compress.sparsify.pattern import Pattern


class Wanda:
    """Compares |W_ij| |X_j| inside each output's row, X_j being all that input j was on rows of data.

    Sun et al. 2024, A Simple and Effective Pruning Approach for Large Language Models, arXiv:2306.11695,
    equation 1. Nothing is updated.
    """

    name: ClassVar[str] = "wanda"
    source: ClassVar[str] = "wanda: Sun et al. 2024, arXiv:2306.11695"
    looks: ClassVar[Looks] = "norms"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: Pattern, draw: Generator
    ) -> Tensor:
        """Return `weight` with zeros where the score is least."""
        assert found is not None
        scores = weight.abs() * found.norms.to(weight)
        return weight.masked_fill(pattern.gone(scores, "row"), 0.0)
