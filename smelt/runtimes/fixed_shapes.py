"""Run graphs whose inputs have fixed shapes (`onnx: {batch_size: 1, sequence_length: 128}`).

A batch of another size is split into calls of the graph's batch size. The last call is filled by repeating
its last sample, which changes no range that an int8 graph computes over a batch. Texts are padded to the
graph's length, with an attention mask of 0. Outputs of filling and padding are removed.

Shapes: B = batch, L = tokens of the longest row, R = rows of one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.generation.backend import Backend, Feeds


@dataclass(frozen=True)
class FixedShape:
    """The fixed sizes of a graph's inputs; None: dynamic."""

    batch_size: int | None = None
    sequence_length: int | None = None

    def __bool__(self) -> bool:
        """Return whether a size is fixed."""
        return self.batch_size is not None or self.sequence_length is not None


def read_fixed_shape(inputs: Mapping[str, Sequence[int | None]]) -> FixedShape:
    """Return the fixed sizes of a graph with these input shapes (None: a dynamic size).

    Inputs of rank 2 are [B, L], all others [B, ...].
    """
    shapes = [shape for shape in inputs.values() if len(shape) >= 2]
    return FixedShape(
        next((shape[0] for shape in shapes if shape[0] is not None), None),
        next((shape[1] for shape in shapes if len(shape) == 2 and shape[1] is not None), None),
    )


def fixed_feeds(feeds: Feeds, shape: FixedShape, pad: int = 0) -> list[dict[str, NDArray[Any]]]:
    """Return the inputs of each call of a graph with fixed shapes; an empty batch is a call too.

    Args:
        feeds: arrays [B, L] or [B, ...].
        shape: of the graph.
        pad: the token id of padding, in `input_ids`.

    Raises:
        InputError: `longer-than-graph`, the rows are longer than the graph's length.
    """
    rows = len(next(iter(feeds.values())))
    if not rows and shape.batch_size is not None:  # a call of samples whose outputs are all removed
        rows = shape.batch_size
        feeds = {name: np.zeros((rows, *values.shape[1:]), values.dtype) for name, values in feeds.items()}
    size = shape.batch_size or rows
    calls = []
    for begin in range(0, max(rows, 1), max(size, 1)):
        indices = np.minimum(np.arange(begin, begin + size), rows - 1)
        calls.append(
            {
                name: _pad_row_ends(values[indices], shape.sequence_length, pad * (name == "input_ids"))
                for name, values in feeds.items()
            }
        )
    return calls


def _pad_row_ends(values: NDArray[Any], length: int | None, pad: int) -> NDArray[Any]:
    """Return [R, L] padded to [R, length]; arrays of another rank are returned as they are."""
    if length is None or values.ndim != 2:
        return values
    if values.shape[1] > length:
        raise InputError(
            f"A text has {values.shape[1]} tokens, but the graph was exported for {length}. Truncate the"
            f" text, or export the model with a larger sequence_length.",
            code="longer-than-graph",
        )
    return np.pad(values, ((0, 0), (0, length - values.shape[1])), constant_values=pad)


class FixedShapeBackend:
    """A `Backend` that calls a graph with fixed shapes; all else is that of the wrapped backend.

    pad: as in `fixed_feeds`. max_tokens_per_call: the graph's length, so that longer texts are truncated, or
    refused, like those beyond the model's limit.
    """

    def __init__(self, backend: Backend, shape: FixedShape, pad: int = 0) -> None:
        self._backend, self._shape, self._pad = backend, shape, pad
        self.max_tokens_per_call = shape.sequence_length or backend.max_tokens_per_call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run a graph on any number of rows; return all of its outputs by name."""
        first = next(iter(feeds.values()))
        rows, length = len(first), first.shape[1]
        calls = [
            self._backend.call(graph, call_feeds) for call_feeds in fixed_feeds(feeds, self._shape, self._pad)
        ]
        outputs = {name: np.concatenate([call[name] for call in calls])[:rows] for name in calls[0]}
        is_text = first.ndim == 2 and self._shape.sequence_length is not None
        return {
            # [R, L, ...] of a head of tokens
            name: value[:, :length] if is_text and value.ndim == 3 else value
            for name, value in outputs.items()
        }
