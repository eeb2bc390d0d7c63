"""Feed-forward layers shared by two neighbours, and the embedding in two thin matrices: at once, and trained.

What is trained has 240 updates of 32 rows from the teacher's logits; so has the whole model.
"""

from __future__ import annotations

from typing import Any

from updates import FROM_LOGITS

Arm = list[tuple[str, dict[str, Any]]]
TRAIN, SEEDS = 7680, 3
_SHARED: Arm = [("share-weights", {"targets": ["ffn"], "group_size": 2})]
# as many values as the feed-forward parts shared alone
_DIFFERENT: Arm = [("share-weights", {"group_size": 2, "low_rank_delta": {"rank": 33}})]
_THIN: Arm = [("factorize", {"targets": "embeddings", "rank": 128})]

ARMS: dict[str, Arm] = {
    "whole, trained": [("distill", {**FROM_LOGITS, "learning_rate": 1e-4})],
    "ffn shared": _SHARED,
    "ffn shared, trained": [*_SHARED, ("distill", FROM_LOGITS)],
    "all shared, thin differences": _DIFFERENT,
    "all shared, thin differences, trained": [*_DIFFERENT, ("distill", FROM_LOGITS)],
    "embedding of rank 128": _THIN,
    "embedding of rank 128, trained": [*_THIN, ("distill", FROM_LOGITS)],
}
