"""How similar the two texts of a pair are: a number in a column, in all rows of a file or in none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from smelt.core.errors import InputError


def read_score(value: Any, where: str, column: str) -> float | None:
    """Return the number that `value` is, None for nothing.

    Raises:
        InputError: it is something else.
    """
    if value is None or value == "":
        return None
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise InputError(
            f"{where}: column '{column}' must be a number, how similar the two texts are, read"
            f" {repr(value)[:80]}. Rows without scores leave it out.",
            code="wrong-column-type",
        )
    return score


def require_alike(there: Iterable[bool], lines: Iterable[int], column: str, what: str) -> None:
    """Require that all rows have a value in `column`, or none of them.

    Args:
        there: for each row whether it has.
        lines: where each row stands.
        column: as the data call it.
        what: as the message calls it.

    Raises:
        InputError: some have and some have not; the first of each are named.
    """
    firsts: dict[bool, int] = {}
    for has, line in zip(there, lines, strict=True):
        firsts.setdefault(has, line)
    if len(firsts) == 2:
        raise InputError(
            f"row {firsts[True]} has a {what} (column '{column}') and row {firsts[False]} has none:"
            " all rows of a file have one, or none has.",
            code="partly-missing-column",
        )
