"""What goes into a runner and comes out of it: arrays, and tokenized texts as a batch.

Shapes: B = batch, L = tokens of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]
# What an encoder's graph calls its output: a classifier's scores, or the vectors of texts.
ENCODED = ("logits", "sentence_embedding")


@dataclass(frozen=True)
class Batch:
    """Tokenized texts, padded on the right.

    input_ids: int64 [B, L]; attention_mask: int64 [B, L], 1 where a token is; token_type_ids:
    int64 [B, L] for text pairs, else None.
    """

    input_ids: Tokens
    attention_mask: Tokens
    token_type_ids: Tokens | None = None
