"""Call a graph with a fixed batch size or length on any number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np


class FixedGraph:
    """A session whose batches are split and padded to the shape of the graph.

    batch_size, length: of the graph, None if dynamic. Missing rows repeat the last one; `input_ids` are
    padded with `pad`, other inputs [B, L] with 0. Outputs of both are removed.
    """

    def __init__(self, session: Any, batch_size: int | None, length: int | None, pad: int) -> None:
        self.session, self.batch_size, self.length, self.pad = session, batch_size, length, pad
        self.get_inputs = session.get_inputs

    def run(self, names: list[str], feeds: dict[str, Any]) -> list[Any]:
        """Return the outputs `names`, as the session's `run`."""
        first = next(iter(feeds.values()))
        rows = len(first)
        if not rows:  # the shapes of the outputs are those of a row of zeros
            feeds = {name: np.zeros((1, *values.shape[1:]), values.dtype) for name, values in feeds.items()}
        size, parts = self.batch_size or max(1, rows), []
        for begin in range(0, max(1, rows), size):
            indices = np.minimum(np.arange(begin, begin + size), max(1, rows) - 1)
            parts.append(self.session.run(names, {n: self.padded(n, v[indices]) for n, v in feeds.items()}))
        outputs = [np.concatenate(values)[:rows] for values in zip(*parts, strict=True)]
        is_token_output = first.ndim == 2 and self.length is not None
        return [v[:, : first.shape[1]] if is_token_output and v.ndim == 3 else v for v in outputs]

    def padded(self, name: str, values: Any) -> Any:
        """Return an input padded to the graph's length."""
        if self.length is None or values.ndim != 2:
            return values
        missing = ((0, 0), (0, self.length - values.shape[1]))
        return np.pad(values, missing, constant_values=self.pad if name == "input_ids" else 0)
