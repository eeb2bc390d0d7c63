"""What the arms that train have in common: 240 updates of 32 rows, validated nowhere."""

from __future__ import annotations

from typing import Any

UPDATES: dict[str, Any] = {
    "max_steps": 240,
    "batch_size": 32,
    "learning_rate": 5e-4,
    "num_evals": 0,
    "temperature": 1.0,
}
FROM_LOGITS: dict[str, Any] = {**UPDATES, "losses": {"logits": 1.0, "labels": 0}}
"""From the teacher's logits alone."""
