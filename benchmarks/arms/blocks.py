"""Whole attentions and feed-forward parts, and channels of the hidden states, beside heads and neurons."""

from __future__ import annotations

from typing import Any

Stages = list[tuple[str, dict[str, Any]]]


def _parts(importance: str, keep: float = 0.75, rows: int = 64) -> Stages:
    what = ["attention", "cross-attention", "ffn"]
    return [
        (
            "drop-layers",
            {"targets": what, "keep_ratio": keep, "importance": importance, "calibration_samples": rows},
        )
    ]


def _width(**more: Any) -> Stages:
    return [("prune", {"targets": ["width"], "keep_ratio": 0.75, **more})]


def _units(share: float) -> Stages:
    return [("prune", {"budget": {"parameters": share}})]


ARMS: dict[str, Stages] = {
    "model": [],
    "parts, keep 0.75, influence": _parts("block-influence"),
    "parts, keep 0.75, loss": _parts("loss"),
    "parts, keep 0.75, random": _parts("random"),
    "width, keep 0.75": _width(),
    "width, keep 0.75, not compensated": _width(reconstruct=False),
    "width, keep 0.75, random": _width(importance="random"),
    "heads and neurons, parameters 0.75": _units(0.75),
    "heads and neurons, parameters 0.82": _units(0.82),
    "heads and neurons, parameters 0.84": _units(0.84),
    "heads and neurons, parameters 0.87": _units(0.87),
}
