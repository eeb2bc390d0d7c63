"""Training through 2-bit codes, 120 updates on labels: scales that follow the weights, or LSQ's."""

from __future__ import annotations

from typing import Any

Arm = list[tuple[str, dict[str, Any]]]
TRAIN, SEEDS = 3840, 3
_CODES: Arm = [("quantize", {"scheme": "int2", "vocabulary": "int8-dynamic"})]
_LEARNED = {"codes": {"scales": "lsq"}}


def _finetune(rate: float, **more: Any) -> Arm:
    return [("finetune", {"max_steps": 120, "batch_size": 32, "learning_rate": rate, "evals": 0, **more})]


ARMS: dict[str, Arm] = {
    "not trained": _CODES,
    "follow, 5e-4": [*_CODES, *_finetune(5e-4)],
    "learned, 5e-4": [*_CODES, *_finetune(5e-4, **_LEARNED)],
    "follow, 1e-3": [*_CODES, *_finetune(1e-3)],
    "learned, 1e-3": [*_CODES, *_finetune(1e-3, **_LEARNED)],
}
AGAINST = {"learned, 5e-4": "follow, 5e-4", "learned, 1e-3": "follow, 1e-3"}
