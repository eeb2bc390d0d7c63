"""One budget over all heads and neurons, beside the same fraction of each layer at as many parameters."""

from __future__ import annotations

from typing import Any


def _budget(share: float, importance: str) -> list[tuple[str, dict[str, Any]]]:
    return [("prune", {"budget": {"parameters": share}, "importance": importance})]


ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "model": [],
    "budget 0.8, fisher": _budget(0.8, "fisher"),
    "budget 0.8, taylor": _budget(0.8, "taylor"),
    "budget 0.8, random": _budget(0.8, "random"),
    "keep 0.735, taylor": [("prune", {"targets": ["heads", "ffn"], "keep_ratio": 0.735})],
    "budget 0.6, fisher": _budget(0.6, "fisher"),
    "keep 0.47, taylor": [("prune", {"targets": ["heads", "ffn"], "keep_ratio": 0.47})],
    "keep 0.735, fisher": [
        ("prune", {"targets": ["heads", "ffn"], "keep_ratio": 0.735, "importance": "fisher"})
    ],
    **{
        f"heads 0.5, {importance}, {word}": [
            ("prune", {"targets": ["heads"], "keep_ratio": 0.5, "importance": importance, "scope": scope})
        ]
        for importance in ("taylor", "fisher")
        for scope, word in (("layer", "of each layer"), ("global", "of all"))
    },
}
AGAINST = {
    "budget 0.8, fisher": "keep 0.735, fisher",
    "budget 0.8, taylor": "keep 0.735, taylor",
    "heads 0.5, taylor, of all": "heads 0.5, taylor, of each layer",
    "heads 0.5, fisher, of all": "heads 0.5, fisher, of each layer",
}
SEEDS = 3
