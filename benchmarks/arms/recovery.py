"""Half of heads and neurons gone, then 240 updates on labels: of all weights, or of adapters."""

from __future__ import annotations

from typing import Any

Arm = list[tuple[str, dict[str, Any]]]
TRAIN, SEEDS = 7680, 3
_HALF: Arm = [("prune", {"targets": ["heads", "ffn"], "keep_ratio": 0.5})]
_NF4: Arm = [("quantize", {"scheme": "bnb-nf4"})]


def _finetune(rate: float, **more: Any) -> Arm:
    return [("finetune", {"max_steps": 240, "batch_size": 32, "learning_rate": rate, "num_evals": 0, **more})]


_ADAPTERS: Arm = _finetune(2e-3, lora={"rank": 16})
ARMS: dict[str, Arm] = {
    "pruned": _HALF,
    "all weights": [*_HALF, *_finetune(5e-4)],
    "all weights, 1e-3": [*_HALF, *_finetune(1e-3)],
    "all weights, 2e-4": [*_HALF, *_finetune(2e-4)],
    "LoRA, rank 16": [*_HALF, *_ADAPTERS],
    "QLoRA, rank 16": [*_HALF, *_NF4, *_ADAPTERS],
    "pruned, coded": [*_HALF, *_NF4],
}
AGAINST = {
    "all weights, 1e-3": "all weights",
    "all weights, 2e-4": "all weights",
    "LoRA, rank 16": "all weights, 2e-4",  # the best of the three rates
    "QLoRA, rank 16": "LoRA, rank 16",
}
