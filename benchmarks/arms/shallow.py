"""Where layers go: from the decoder, from the encoder, or from both; 240 updates from the teacher."""

from __future__ import annotations

from typing import Any

TRAIN, SEEDS = 7680, 3


def _student(**layers: int) -> list[tuple[str, dict[str, Any]]]:
    settings: dict[str, Any] = {
        "student": layers,
        "max_steps": 240,
        "batch_size": 32,
        "learning_rate": 5e-4,
        "evals": 0,
        "temperature": 1.0,
        "losses": {"logits": 1.0, "labels": 0},
    }
    return [("distill", settings)]


ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "4 + 2 layers": _student(decoder_layers=2),
    "3 + 3 layers": _student(encoder_layers=3),
    "4 + 1 layers": _student(decoder_layers=1),
    "2 + 3 layers": _student(encoder_layers=2),
}
AGAINST = {"2 + 3 layers": "4 + 1 layers"}
