"""Sentences about a step's details that decide how its numbers are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BATCH_DEPENDENCE_TEXT = (
    "answers depend on the other samples of their batch, because int8 ranges are computed over all of them;"
    " those of int8-static and int8-groupwise do not."
)


def detail_notes(details: Mapping[str, Any]) -> list[str]:
    """Return what a budget kept, which labels each teacher has, and whether answers depend on their batch."""
    texts = [_budget_text(details.get("budget")), _teachers_text(details.get("labels_by_teacher"))]
    texts += [_BATCH_DEPENDENCE_TEXT] if details.get("depends_on_batch") else []
    return [text for text in texts if text]


def _budget_text(budget: Any) -> str:
    """Return what a budget of `prune` (its details) kept, as a sentence; empty where there was none."""
    if not isinstance(budget, Mapping) or not isinstance(budget.get("units"), Mapping):
        return ""
    units = ", ".join(
        f"{name} {before:,} -> {after:,}" if after != before else f"{name} {before:,}"
        for name, (before, after) in budget["units"].items()
    )
    return (
        f"{100 * budget['left']:.1f} % of the {budget['unit']} are left, with a budget of"
        f" {100 * budget['asked']:g} %: {units}."
    )


def _teachers_text(teachers: Any) -> str:
    """Return which labels each of several teachers has (details of `distill`); empty if all have the same."""
    if not isinstance(teachers, list):
        return ""
    if len({frozenset(entry["labels"]) for entry in teachers}) < 2:
        return ""
    parts = (f"{entry['teacher'].rpartition('/')[2]}: {', '.join(entry['labels'])}" for entry in teachers)
    return f"Labels by teacher: {'; '.join(parts)}."
