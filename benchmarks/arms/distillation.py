"""What a student with two of three decoder layers learns from labels, from a teacher, and from its texts.

All arms have 240 updates of 32 rows, one pass over the same rows, and nothing is chosen on validation rows.
"""

from __future__ import annotations

from typing import Any

from updates import UPDATES

Arm = list[tuple[str, dict[str, Any]]]
TRAIN, SEEDS = 7680, 3
_SHALLOW: dict[str, Any] = {"student": {"decoder_layers": 2}}
_GOLD: dict[str, Any] = {"losses": {"logits": 0, "labels": 1.0}}
_LOGITS: dict[str, Any] = {"losses": {"logits": 1.0, "labels": 0}}
_GENTLE: dict[str, Any] = {"learning_rate": 1e-4}  # five times as much is too much for a trained model


def _distill(*more: dict[str, Any]) -> Arm:
    settings = dict(UPDATES)
    for each in more:
        settings |= each
    return [("distill", settings)]


ARMS: dict[str, Arm] = {
    "model": [],
    "student, labels": _distill(_SHALLOW, _GOLD),
    "student, logits": _distill(_SHALLOW, _LOGITS),
    "student, teacher's texts": [
        ("onnx", {"target": "ort-cpu"}),
        *_distill(_SHALLOW, _GOLD, {"sequence_level": {"num_beams": 5, "generator": "onnx"}}),
    ],
    "whole, labels": _distill(_GOLD, _GENTLE),
    "whole, logits": _distill(_LOGITS, _GENTLE),
}
AGAINST = {
    "student, labels": "whole, labels",
    "student, logits": "student, labels",
    "student, teacher's texts": "student, labels",
    "whole, logits": "whole, labels",
}
TEXTS = dict.fromkeys(("model", "student, labels", "student, teacher's texts"), (1, 4))
