"""Training through 2-bit codes, 120 updates on labels: scales that follow the weights, or LSQ's."""

from __future__ import annotations

from typing import Any

Arm = list[tuple[str, dict[str, Any]]]
TRAIN, SEEDS = 3840, 3
_CODES: Arm = [("quantize", {"scheme": "int2", "embedding_scheme": "int8-dynamic"})]


def _finetune(**more: Any) -> Arm:
    return [("finetune", {"max_steps": 120, "batch_size": 32, "learning_rate": 5e-4, "num_evals": 0, **more})]


def _learned(rate: float) -> Arm:
    return _finetune(qat={"scales": "lsq", "learning_rate": rate})


ARMS: dict[str, Arm] = {
    "not trained": _CODES,
    "scales follow": [*_CODES, *_finetune()],
    "learned, 1e-3": [*_CODES, *_learned(1e-3)],
    "learned, 1e-2": [*_CODES, *_learned(1e-2)],
}
AGAINST = {"learned, 1e-3": "scales follow", "learned, 1e-2": "scales follow"}
