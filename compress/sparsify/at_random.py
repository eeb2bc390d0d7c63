"""Weights become zero by chance: what every other method has to be better than."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Generator, Tensor

from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.sparsify.method import Looks
from smelt.compress.sparsify.pattern import Pattern


class Random:
    """Draws the weights that go, by the recipe's seed."""

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "random: a control"
    looks: ClassVar[Looks] = "nothing"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: Pattern, draw: Generator
    ) -> Tensor:
        """Return `weight` with zeros at random places."""
        return weight.masked_fill(pattern.gone(torch.rand(weight.shape, generator=draw), "matrix"), 0.0)
