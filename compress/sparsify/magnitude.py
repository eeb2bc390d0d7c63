"""Magnitude sparsity: set the smallest weights of a layer to zero."""

from __future__ import annotations

from typing import ClassVar

from torch import Generator, Tensor

from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.sparsify.method import RequiredStatistics
from smelt.compress.sparsify.pattern import SparsityPattern


class MagnitudeSparsity:
    """Compares |W| in a whole layer (Han et al. 2015; the baseline of Wanda's and SparseGPT's papers)."""

    name: ClassVar[str] = "magnitude"
    source: ClassVar[str] = "magnitude: Han et al. 2015, arXiv:1506.02626"
    statistics: ClassVar[RequiredStatistics] = "nothing"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: SparsityPattern, draw: Generator
    ) -> Tensor:
        """Return `weight` with zeros at its smallest magnitudes."""
        return weight.masked_fill(pattern.zero_mask(weight.abs(), "matrix"), 0.0)
