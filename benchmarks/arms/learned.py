"""What goes is learned while the model trains, beside what was chosen before: all with as many updates."""

from __future__ import annotations

from typing import Any

_UPDATES: dict[str, Any] = {"max_steps": 240, "batch_size": 32, "learning_rate": 2e-4, "num_evals": 4}


def _distill(**more: Any) -> tuple[str, dict[str, Any]]:
    return "distill", {**_UPDATES, **more}


ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "model": [],
    "nothing goes": [_distill()],
    "heads and neurons: keep 0.6 by taylor, compensated": [
        ("prune", {"targets": ["heads", "ffn"], "keep_ratio": 0.6}),
        _distill(),
    ],
    "heads and neurons: masks, keep 0.6": [_distill(learned_masks={"keep_ratio": 0.6, "warmup": 0.3})],
    "heads, neurons and width: masks, keep 0.6": [
        _distill(learned_masks={"targets": ["heads", "ffn", "width"], "keep_ratio": 0.6, "warmup": 0.3})
    ],
    "weights: 85 % at once by magnitude": [
        ("sparsify", {"method": "magnitude", "sparsity": 0.85}),
        _distill(),
    ],
    "weights: 85 % at once by sparsegpt": [
        ("sparsify", {"method": "sparsegpt", "sparsity": 0.85}),
        _distill(),
    ],
    "weights: 85 % step by step by magnitude": [_distill(sparsify={"method": "magnitude", "sparsity": 0.85})],
    "weights: 85 % step by step by movement": [_distill(sparsify={"method": "movement", "sparsity": 0.85})],
}
