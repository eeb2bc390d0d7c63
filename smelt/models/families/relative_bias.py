"""The interface of a relative position bias; a family with one provides an implementation."""

from __future__ import annotations

from typing import Any, Protocol


class RelativeBias(Protocol):
    """A bias per head and distance that is added to attention scores.

    A stack has one table for all of its blocks, so all have the same heads, until each gets its own table.
    """

    def move_table(self, old: Any, new: Any) -> None:
        """Move the table of the block `old` to `new`, which becomes the first of its stack."""

    def make_independent(self, attention: Any, heads: int, name: str) -> None:
        """Make the attention `name`, with `heads` heads, compute its own bias, not initialized."""

    def make_all_independent(self, model: Any, edits: list[dict[str, Any]]) -> None:
        """Give every attention of `model` its own bias, once; append the edits."""

    def prune_bias_heads(self, model: Any, edits: list[dict[str, Any]], name: str, stay: Any) -> None:
        """Keep the heads `stay` (int64 tensor, rising) of the own bias of the attention `name`."""

    def parameters_per_head(self, attention: Any, name: str) -> int:
        """Return the number of bias values per head of the attention `name` with its own bias."""

    def count_bias_parameters(self, model: Any) -> int:
        """Return the number of values in the biases of `model`, each once."""

    def bias_by_distance(self, attention: Any) -> tuple[Any, int] | None:
        """Return the bias by distance, float32 [H, 2 f + 1], and f, the largest distance with its own value.

        None if the attention has no table: it gets its bias as an input.
        """
