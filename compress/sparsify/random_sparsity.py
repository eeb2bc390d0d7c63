"""Random sparsity: a baseline for the other methods."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Generator, Tensor

from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.sparsify.method import RequiredStatistics
from smelt.compress.sparsify.pattern import SparsityPattern


class RandomSparsity:
    """Chooses the weights to remove at random, by the recipe's seed."""

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "random: a control"
    statistics: ClassVar[RequiredStatistics] = "nothing"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: SparsityPattern, draw: Generator
    ) -> Tensor:
        """Return `weight` with zeros at random places."""
        return weight.masked_fill(pattern.zero_mask(torch.rand(weight.shape, generator=draw), "matrix"), 0.0)
