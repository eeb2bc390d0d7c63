"""One bit a weight, 60 updates with the float model as teacher: inputs whole, or of two values (BiT)."""

from __future__ import annotations

from typing import Any

Arm = list[tuple[str, dict[str, Any]]]
TRAIN = 1920
_CODES: Arm = [("quantize", {"scheme": "binary"})]


def _distill(updates: int = 60, **more: Any) -> Arm:
    losses = {"logits": 1.0, "labels": 0.5}
    options = {
        "max_steps": updates,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "precision": "fp32",
        "num_evals": 0,
    }
    return [("distill", {"losses": losses, **options, **more})]


def _binary(rate: float = 1e-2) -> dict[str, Any]:
    return {"qat": {"activations": "one-bit", "learning_rate": rate}}


ARMS: dict[str, Arm] = {
    "not trained": _CODES,
    "weights": [*_CODES, *_distill()],
    "both, 1e-2": [*_CODES, *_distill(**_binary())],
    "both, 1e-3": [*_CODES, *_distill(**_binary(1e-3))],
    "weights in 30, both in 30": [*_CODES, *_distill(30), *_distill(30, **_binary())],
}
AGAINST = {name: "weights" for name in ARMS if "both" in name}
