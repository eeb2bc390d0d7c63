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
    "keep 0.735, taylor": [("prune", {"keep": 0.735})],
    "budget 0.6, fisher": _budget(0.6, "fisher"),
    "keep 0.47, taylor": [("prune", {"keep": 0.47})],
}
