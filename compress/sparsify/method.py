"""What a method of sparsification is given and gives."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from torch import Generator, Tensor

from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.sparsify.pattern import Pattern

# What a method asks of a layer's inputs: nothing, their norms, their second moments.
Looks = Literal["nothing", "norms", "moments"]


class Method(Protocol):
    """One way to choose the weights that become zero, and to change those that stay."""

    name: ClassVar[str]
    source: ClassVar[str]
    looks: ClassVar[Looks]

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: Pattern, draw: Generator
    ) -> Tensor:
        """Return the new weight, float32 [N, K], with zeros as `pattern` says.

        Args:
            weight: float32 [N, K].
            found: what the layer is fed; None where `looks` is nothing.
            pattern: which zeros.
            draw: for what is drawn.
        """
