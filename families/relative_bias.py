"""What a bias by distance must be able to do; a family with one hands over a module that can."""

from __future__ import annotations

from typing import Any, Protocol


class RelativeBias(Protocol):
    """A bias per head and distance that is added to the scores of attention.

    A stack owns one table for all of its blocks, so that all have the same heads, until each gets its own.
    """

    def hand_on(self, old: Any, new: Any) -> None:
        """Give the block `new`, which becomes the first of its stack, the table of the block `old`."""

    def own(self, attention: Any, heads: int, name: str) -> None:
        """Let the attention called `name`, of `heads` heads, compute its own bias; values are left open."""

    def own_all(self, model: Any, edits: list[dict[str, Any]]) -> None:
        """Give every attention of `model` its own bias, once; append the edits that say so."""

    def prune(self, model: Any, edits: list[dict[str, Any]], name: str, stay: Any) -> None:
        """Keep the heads `stay` (int64 tensor, rising) of the bias that the attention `name` owns."""

    def values_of_a_head(self, attention: Any, name: str) -> int:
        """Return how many values a head of the attention called `name` has once it owns its bias."""

    def values_now(self, model: Any) -> int:
        """Return how many values the biases of `model` have now, each once."""

    def by_distance(self, attention: Any) -> tuple[Any, int] | None:
        """Return the bias by distance, float32 [H, 2 f + 1], and f, beyond which all is as at f.

        None where the attention has no table: it is given its bias.
        """
