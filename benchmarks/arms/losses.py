"""What a student is told beside the teacher's logits: nothing or the labels, at T 1 or 2; half of the neurons
are gone. Where the defaults of `losses` and `temperature` come from."""

from __future__ import annotations

from typing import Any

from updates import UPDATES

Arm = list[tuple[str, dict[str, Any]]]
TRAIN, SEEDS = 7680, 3


def _recovered(rate: float, **more: Any) -> Arm:
    return [
        ("prune", {"targets": ["ffn"], "keep_ratio": 0.5}),
        ("distill", {**UPDATES, "learning_rate": rate, **more}),
    ]


ARMS: dict[str, Arm] = {
    f"{label}, T {heat:g}": _recovered(3e-4, losses={"logits": 1.0, "labels": labels}, temperature=heat)
    for label, labels in (("logits alone", 0.0), ("logits and half of labels", 0.5))
    for heat in (1.0, 2.0)
} | {"labels alone": _recovered(3e-4, losses={"logits": 0.0, "labels": 1.0})}
AGAINST = dict.fromkeys(tuple(ARMS)[1:], "logits alone, T 1")
