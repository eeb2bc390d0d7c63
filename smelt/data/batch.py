"""Inputs and outputs of a runner: arrays, and tokenized texts as a batch.

Shapes: B = batch, L = tokens of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import RunError

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]
# The output name of an encoder's graph: a classifier's logits, or the vectors of texts.
ENCODER_OUTPUTS = ("logits", "sentence_embedding")


@dataclass(frozen=True)
class Batch:
    """Tokenized texts, padded on the right.

    input_ids: int64 [B, L]; attention_mask: int64 [B, L], 1 where a token is; token_type_ids:
    int64 [B, L] for text pairs, else None.
    """

    input_ids: Tokens
    attention_mask: Tokens
    token_type_ids: Tokens | None = None


def check_finite_outputs(outputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `outputs`, [n, ...], if all of them are finite."""
    wrong = np.flatnonzero(~np.isfinite(outputs).all(axis=1))
    if not len(wrong):
        return outputs
    raise RunError(
        f"The model's outputs are NaN or infinite for {len(wrong):,} of {len(outputs):,} examples (the"
        f" first is example {wrong[0] + 1}). A weight is not finite, or a value exceeds the range"
        " of its type. Check the step that created the model; if it sets dtype, use fp32.",
        code="non-finite-outputs",
    )
