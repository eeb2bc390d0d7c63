"""Runs each text of a batch alone, to compare graphs whose ranges of activations are computed at run time.

Such a range is of all tokens of a batch: in torch with padding, in an encoder for `ort-cpu` without
(`smelt.export.remove_padding`). A text alone has no padding in either.

Shapes: B = batch, L = length, D = width of an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.generation.backend import Batch, Tokens
from smelt.quantization.layers import QuantizedLinear

FloatArray = NDArray[np.floating[Any]]


def has_run_time_ranges(model: Any) -> bool:
    """Return whether a layer of a torch model computes one range for all of its activations at run time."""
    schemes = {module.matrix.scheme for module in model.modules() if isinstance(module, QuantizedLinear)}
    return any(scheme.per_tensor_activations and not scheme.requires_calibration for scheme in schemes)


def split_texts(batch: Batch) -> Iterator[Batch]:
    """Yield each text of a batch as a batch without padding."""
    types = batch.token_type_ids
    for row, mask in enumerate(batch.attention_mask):
        columns = mask == 1
        yield Batch(
            batch.input_ids[row : row + 1, columns],
            batch.attention_mask[row : row + 1, columns],
            None if types is None else types[row : row + 1, columns],
        )


def join_outputs(outputs: Sequence[FloatArray], batch: Batch) -> FloatArray:
    """Return the outputs of single texts as those of `batch`; of tokens [B, L, D], 0 at padding."""
    if outputs[0].ndim != 3:
        return np.concatenate(outputs)
    joined = np.zeros((*batch.attention_mask.shape, outputs[0].shape[2]), dtype=outputs[0].dtype)
    for row, output in enumerate(outputs):
        joined[row, batch.attention_mask[row] == 1] = output[0]
    return joined


class SingleTexts:
    """A runner whose batches are computed text by text; methods as those of `runner`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def forward(self, batch: Batch) -> FloatArray:
        """Return the outputs of an encoder."""
        return join_outputs([self._runner.forward(text).copy() for text in split_texts(batch)], batch)

    def encoder_outputs(self, batch: Batch) -> dict[str, FloatArray]:
        """Return the hidden states of an encoder."""
        name = "last_hidden_state"
        states = [self._runner.encoder_outputs(text)[name].copy() for text in split_texts(batch)]
        return {name: join_outputs(states, batch)}

    def encode(self, batch: Batch) -> list[Any]:
        """Run the encoder; nothing is decoded yet."""
        return [self._runner.encode(text) for text in split_texts(batch)]

    def decode_step(self, states: Sequence[Any], tokens: Tokens) -> FloatArray:
        """Run one token per text, update `states` in place."""
        steps = [
            self._runner.decode_step(state, tokens[row : row + 1]).copy() for row, state in enumerate(states)
        ]
        return np.concatenate(steps)
