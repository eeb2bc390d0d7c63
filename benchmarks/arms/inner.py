"""What a student with two of three decoder layers gains where it learns from the teacher's inside too.

All arms have 240 updates of 32 rows; those in two phases spend half of them inside. The loss of the words is
the same in all: KL with the teacher at T 1.
"""

from __future__ import annotations

from typing import Any

from updates import UPDATES

TRAIN, SEEDS = 7680, 3
_STUDENT: dict[str, Any] = {"student": {"decoder_layers": 2}, **UPDATES}


def _beside(**losses: float) -> list[tuple[str, dict[str, Any]]]:
    return [("distill", {**_STUDENT, "losses": {"logits": 1.0, "labels": 0, **losses}})]


def _before(layer_map: Any = "uniform", **losses: float) -> list[tuple[str, dict[str, Any]]]:
    phases = [{"losses": losses, "max_steps": 120}, {"losses": {"logits": 1.0}, "max_steps": 120}]
    return [("distill", {**_STUDENT, "phases": phases, "layer_map": layer_map})]


ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "logits alone": _beside(),
    "hidden, attention, embeddings before (TinyBERT)": _before(
        hidden_states=1.0, attention=1.0, input_embeddings=1.0
    ),
    "relations before (MiniLMv2)": _before("last", self_attention_relations=1.0),
    "hidden beside": _beside(hidden_states=1.0),
}
