"""Similarity scores of text pairs: a number in a column, in all rows of a file or in none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from smelt.core.errors import InputError


def parse_score(value: Any, location: str, column: str) -> float | None:
    """Return `value` as a number, None if it is empty.

    Raises:
        InputError: it is not a number.
    """
    if value is None or value == "":
        return None
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise InputError(
            f"{location}: column '{column}' must be a number, the similarity of the two texts, got"
            f" {repr(value)[:80]}. Leave it empty in files without scores.",
            code="wrong-column-type",
        )
    return score


def require_all_or_none(present: Iterable[bool], lines: Iterable[int], column: str, description: str) -> None:
    """Require that all rows have a value in `column`, or none of them.

    Args:
        present: whether each row has a value.
        lines: the line of each row.
        column: the name of the column.
        description: of the value, for the message.

    Raises:
        InputError: only some rows have a value; the first of each kind are named.
    """
    firsts: dict[bool, int] = {}
    for has, line in zip(present, lines, strict=True):
        firsts.setdefault(has, line)
    if len(firsts) == 2:
        raise InputError(
            f"row {firsts[True]} has a {description} (column '{column}'), but row {firsts[False]} has"
            " none. Set it in all rows of a file, or in none.",
            code="partly-missing-column",
        )
