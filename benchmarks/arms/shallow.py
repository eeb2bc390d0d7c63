"""Where layers go: from the decoder, from the encoder, or from both; 240 updates from the teacher."""

from __future__ import annotations

from typing import Any

from updates import FROM_LOGITS

TRAIN, SEEDS = 7680, 3


def _student(**layers: int) -> list[tuple[str, dict[str, Any]]]:
    return [("distill", {"student": layers, **FROM_LOGITS})]


ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "4 + 2 layers": _student(decoder_layers=2),
    "3 + 3 layers": _student(encoder_layers=3),
    "4 + 1 layers": _student(decoder_layers=1),
    "2 + 3 layers": _student(encoder_layers=2),
}
AGAINST = {"2 + 3 layers": "4 + 1 layers"}
