"""Batch texts of similar length, padded to the longest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def length_batches(token_rows: list[list[int]], pad: int, size: int, left: bool = False) -> Iterator[Any]:
    """Yield indices, ids and mask (int64 [B, L]) of rows of similar length, the longest first."""
    order = sorted(range(len(token_rows)), key=lambda i: (-len(token_rows[i]), i))
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        length = max(1, len(token_rows[indices[0]]))
        ids = np.full((len(indices), length), pad, dtype=np.int64)
        mask = np.zeros_like(ids)
        for batch_index, row in enumerate(token_rows[i] for i in indices):
            part = slice(length - len(row), None) if left else slice(len(row))
            ids[batch_index, part], mask[batch_index, part] = row, 1
        yield indices, ids, mask
