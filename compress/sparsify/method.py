"""The interface of a sparsity method."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from torch import Generator, Tensor

from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.sparsify.pattern import SparsityPattern

# Statistics of a layer's inputs that a method needs: none, norms, second moments.
RequiredStatistics = Literal["nothing", "norms", "moments"]


class SparsityMethod(Protocol):
    """Chooses the weights to set to zero, and may update the kept ones."""

    name: ClassVar[str]
    source: ClassVar[str]
    statistics: ClassVar[RequiredStatistics]

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: SparsityPattern, draw: Generator
    ) -> Tensor:
        """Return the new weight, float32 [N, K], with zeros as `pattern` says.

        Args:
            weight: float32 [N, K].
            found: statistics of the layer's inputs; None if the method needs none.
            pattern: number and positions of zeros.
            draw: generator of random numbers.
        """
