"""Replaces a removed part of a block: it adds zero to the hidden states."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class SkippedSublayer(nn.Module):
    """Returns a zero [] of the type of its input; it has no parameters.

    results: number of outputs that a block expects: 1, or the 2 or 3 of an attention (the addend, the
    relative position bias that it was given where there are 3, and no weights). A zero without axes adds
    to states of any shape, and an exporter folds it: nothing of the part remains in a graph.
    """

    def __init__(self, results: int = 1) -> None:
        super().__init__()
        self.results = results

    def forward(self, hidden_states: Tensor, *unused: Any, **given: Any) -> Any:
        """Return the zero; for an attention a tuple that begins with it."""
        zero = hidden_states.new_zeros(())
        if self.results == 1:
            return zero
        return (zero, None) if self.results == 2 else (zero, given.get("position_bias"), None)

    def extra_repr(self) -> str:
        """Return the number of outputs, for printing."""
        return f"results={self.results}"
