"""What the ways to score units give, and how scores of several layers are made comparable.

Shapes: H = heads of a layer, F = neurons of its feed-forward block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """Importance by group name: float64 [H] per attention, [F] per feed-forward block.

    comparable: whether scores of one layer can be compared with those of another as they are; else each
    layer's are divided by their length first (Molchanov et al. 2017, arXiv:1611.06440, equation 9).
    """

    heads: dict[str, Tensor]
    neurons: dict[str, Tensor]
    comparable: bool = False

    def across_layers(self) -> Scores:
        """Return scores that can be compared from layer to layer, of units of one kind."""
        if self.comparable:
            return self
        heads, neurons = (
            {name: found / found.norm().clamp_min(1e-300) for name, found in kind.items()}
            for kind in (self.heads, self.neurons)
        )
        return Scores(heads, neurons, comparable=True)
