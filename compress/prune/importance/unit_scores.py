"""Importance scores of units, and their normalization across layers.

Shapes: H = heads of a layer, F = neurons of its feed-forward block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class UnitScores:
    """Importance by group name: float64 [H] per attention, [F] per feed-forward block.

    comparable_across_layers: whether scores can be compared between layers without normalization; else the
    scores of each layer are divided by their norm first (Molchanov et al. 2017, arXiv:1611.06440, equation
    9).
    """

    heads: dict[str, Tensor]
    neurons: dict[str, Tensor]
    comparable_across_layers: bool = False

    def normalized(self) -> UnitScores:
        """Return scores that are comparable between layers, for units of one kind."""
        if self.comparable_across_layers:
            return self
        heads, neurons = (
            {name: found / found.norm().clamp_min(1e-300) for name, found in kind.items()}
            for kind in (self.heads, self.neurons)
        )
        return UnitScores(heads, neurons, comparable_across_layers=True)
