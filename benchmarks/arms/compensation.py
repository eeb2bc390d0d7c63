"""Structured pruning with and without a least-squares refit of what reads the units that stay."""

from __future__ import annotations

from typing import Any


def _prune(what: str, keep: float, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    return [("prune", {"targets": [what], "keep_ratio": keep, **more})]


ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {"model": []}
for _what, _word in (("ffn", "neurons"), ("heads", "heads")):
    for _keep in (0.5, 0.75):
        for _importance in ("taylor", "magnitude"):
            for _compensate in (False, True):
                _how = ", compensated" if _compensate else ""
                ARMS[f"{_word}, keep {_keep}, {_importance}{_how}"] = _prune(
                    _what, _keep, importance=_importance, reconstruct=_compensate
                )
AGAINST = {name: name.removesuffix(", compensated") for name in ARMS if name.endswith(", compensated")}
SEEDS = 3
