"""Which layers go where two and two stay: without training, and after 240 updates from the teacher."""

from __future__ import annotations

from typing import Any

from updates import FROM_LOGITS

Arm = list[tuple[str, dict[str, Any]]]
TRAIN, SEEDS = 7680, 3
_CHOICES = ("random", "uniform", "block-influence", "loss")


def _depth(importance: str) -> Arm:
    return [("drop-layers", {"importance": importance, "encoder_layers": 2, "decoder_layers": 2})]


ARMS: dict[str, Arm] = {
    **{choice: _depth(choice) for choice in (*_CHOICES, "first", "last")},
    **{f"{choice}, trained": [*_depth(choice), ("distill", FROM_LOGITS)] for choice in _CHOICES},
}
AGAINST = {
    **dict.fromkeys(("random", "block-influence", "loss", "first", "last"), "uniform"),
    **{f"{choice}, trained": "uniform, trained" for choice in ("random", "block-influence", "loss")},
}
