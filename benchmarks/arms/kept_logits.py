"""A teacher that is run in every epoch beside one whose logits were kept before the first: three epochs."""

from __future__ import annotations

from typing import Any

TRAIN, SEEDS = 1920, 3
_SETTINGS: dict[str, Any] = {
    "student": {"decoder_layers": 1},
    "losses": {"logits": 1.0, "labels": 0},
    "temperature": 1.0,
    "epochs": 3,
    "batch_size": 32,
    "learning_rate": 5e-4,
    "num_evals": 0,
}
ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "teacher in every epoch": [("distill", _SETTINGS)],
    "kept logits, 32 of a position": [("distill", {**_SETTINGS, "cache_logits": {"top_k": 32}})],
}
