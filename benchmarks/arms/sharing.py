"""Feed-forward layers shared by two neighbours, and the embedding in two thin matrices: at once, and trained.

What is trained has 240 updates of 32 rows from the teacher's logits; so has the whole model.
"""

from __future__ import annotations

from typing import Any

Arm = list[tuple[str, dict[str, Any]]]
TRAIN, SEEDS = 7680, 3
_UPDATES: dict[str, Any] = {
    "max_steps": 240,
    "batch_size": 32,
    "learning_rate": 5e-4,
    "evals": 0,
    "temperature": 1.0,
    "losses": {"logits": 1.0, "labels": 0},
}
_SHARED: Arm = [("share", {"what": ["ffn"], "every": 2})]
_THIN: Arm = [("factorize", {"what": "embeddings", "rank": 128})]

ARMS: dict[str, Arm] = {
    "whole, trained": [("distill", {**_UPDATES, "learning_rate": 1e-4})],
    "ffn shared": _SHARED,
    "ffn shared, trained": [*_SHARED, ("distill", _UPDATES)],
    "embedding of rank 128": _THIN,
    "embedding of rank 128, trained": [*_THIN, ("distill", _UPDATES)],
}
