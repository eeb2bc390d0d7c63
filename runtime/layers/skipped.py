"""What stands in the place of a part of a block that is gone: it adds nothing to the hidden states."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Skipped(nn.Module):
    """Gives a zero [] of the type of what it is fed, whatever else it is fed; it has no parameters.

    results: how many things a block takes from what stood here: 1, or the 2 or 3 of an attention (what is
    added, the bias by distance that it was given where there are 3, and no weights). A zero without axes adds
    to states of any shape, and an exporter folds it: nothing of the part is left in a graph.
    """

    def __init__(self, results: int = 1) -> None:
        super().__init__()
        self.results = results

    def forward(self, hidden_states: Tensor, *unused: Any, **given: Any) -> Any:
        """Return the zero; of an attention a tuple that begins with it."""
        zero = hidden_states.new_zeros(())
        if self.results == 1:
            return zero
        return (zero, None) if self.results == 2 else (zero, given.get("position_bias"), None)

    def extra_repr(self) -> str:
        """Say what it gives, where a model is printed."""
        return f"results={self.results}"
