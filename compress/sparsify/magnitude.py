"""The smallest weights of a layer become zero."""

from __future__ import annotations

from typing import ClassVar

from torch import Generator, Tensor

from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.sparsify.method import Looks
from smelt.compress.sparsify.pattern import Pattern


class Magnitude:
    """Compares |W| in a whole layer (Han et al. 2015; the baseline of Wanda's and SparseGPT's papers)."""

    name: ClassVar[str] = "magnitude"
    source: ClassVar[str] = "magnitude: Han et al. 2015, arXiv:1506.02626"
    looks: ClassVar[Looks] = "nothing"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: Pattern, draw: Generator
    ) -> Tensor:
        """Return `weight` with zeros where it is least."""
        return weight.masked_fill(pattern.gone(weight.abs(), "matrix"), 0.0)
