"""How high a learning rate: further training, recovery, adapters, and training through codes.

What learns from a teacher's logits alone has no dropout, as by default. With `--arm`: `student`, `one layer`
and `two layers` are of a translator, the other layers of models with one stack. Where the defaults of
`learning_rate` come from.
"""

from __future__ import annotations

from typing import Any

Arm = list[tuple[str, dict[str, Any]]]
TRAIN, SEEDS = 7680, 1
_UPDATES: dict[str, Any] = {"max_steps": 240, "batch_size": 32, "num_evals": 0}
_TEACHER: dict[str, Any] = _UPDATES | {
    "losses": {"logits": 1.0, "labels": 0}, "temperature": 1.0, "dropout": 0.0,
}  # fmt: skip
_HALF: Arm = [("prune", {"targets": ["ffn"], "keep_ratio": 0.5})]
_KINDS: dict[str, tuple[Arm, str, dict[str, Any], tuple[float, ...]]] = {
    "whole": ([], "finetune", _UPDATES, (3e-5, 1e-4, 3e-4, 1e-3)),
    "half of the neurons": (_HALF, "distill", _TEACHER, (3e-5, 1e-4, 3e-4, 1e-3)),
    "half of the neurons, LoRA": (
        _HALF, "distill", _TEACHER | {"lora": {"rank": 16}}, (1e-4, 3e-4, 1e-3, 3e-3)
    ),
    "two bits": ([("quantize", {"scheme": "int2"})], "distill", _TEACHER, (1e-4, 3e-4, 1e-3, 3e-3)),
    "half of the layers": ([], "distill", _TEACHER | {"student": {"layers": 3}}, (1e-4, 3e-4, 1e-3, 3e-3)),
    "student": ([], "distill", _TEACHER | {"student": {"decoder_layers": 1}}, (1e-4, 3e-4, 1e-3, 3e-3)),
    "one layer": (
        [("drop-layers", {"decoder_layers": 1})], "distill", _TEACHER, (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
    ),
    "two layers": ([("drop-layers", {"decoder_layers": 2})], "distill", _TEACHER, (3e-5, 1e-4, 3e-4, 1e-3)),
    "three layers": ([("drop-layers", {"layers": 3})], "distill", _TEACHER, (3e-5, 1e-4, 3e-4, 1e-3)),
    "four layers": ([("drop-layers", {"layers": 4})], "distill", _TEACHER, (3e-5, 1e-4, 3e-4, 1e-3)),
}  # fmt: skip
ARMS: dict[str, Arm] = {
    f"{kind}, {rate:g}": [*before, (word, settings | {"learning_rate": rate})]
    for kind, (before, word, settings, rates) in _KINDS.items()
    for rate in rates
}
AGAINST = {name: f"{name.rsplit(', ', 1)[0]}, 0.0001" for name in ARMS if not name.endswith("0.0001")}
