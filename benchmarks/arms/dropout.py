"""A part of the model is gone, and the teacher's logits alone teach: with the model's dropout, and without.

`longer` has three times the updates. `three layers` are of models with one stack, such as a language model,
which may lose half of its neurons and nothing with them. Where the default of `dropout` comes from.
"""

from __future__ import annotations

from typing import Any

Arm = list[tuple[str, dict[str, Any]]]
TRAIN, SEEDS = 7680, 3
_TEACHER: dict[str, Any] = {
    "batch_size": 32, "learning_rate": 1e-4, "num_evals": 0, "temperature": 1.0,
    "losses": {"logits": 1.0, "labels": 0},
}  # fmt: skip


def _recovered(updates: int, dropout: float | None) -> Arm:
    settings = _TEACHER | {"max_steps": updates, "dropout": dropout}
    return [("prune", {"targets": ["ffn"], "keep_ratio": 0.5}), ("distill", settings)]


def _layers(dropout: float | None) -> Arm:
    settings = _TEACHER | {"max_steps": 240, "learning_rate": 1e-3, "dropout": dropout}
    return [("drop-layers", {"layers": 3}), ("distill", settings)]


ARMS: dict[str, Arm] = {
    "half of the neurons": _recovered(1, None)[:1],
    "dropout of the model": _recovered(240, None),
    "no dropout": _recovered(240, 0.0),
    "longer, dropout of the model": _recovered(720, None),
    "longer, no dropout": _recovered(720, 0.0),
    "three layers": _layers(None)[:1],
    "three layers, dropout of the model": _layers(None),
    "three layers, no dropout": _layers(0.0),
}
AGAINST = {
    "no dropout": "dropout of the model",
    "longer, dropout of the model": "dropout of the model",
    "longer, no dropout": "longer, dropout of the model",
    "three layers, dropout of the model": "three layers",
    "three layers, no dropout": "three layers, dropout of the model",
}
